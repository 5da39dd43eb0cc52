"""The file that completions are written to: looked at before they are sampled, not after."""

from __future__ import annotations

from pathlib import Path

from razona.errors import ConfigError


def output_file(name: str) -> Path | None:
    """The path, its folder made; None where ``name`` is empty. ConfigError for a path that cannot be written
    and for a file that is there already: nothing is overwritten.
    """
    if not name:
        return None
    path = Path(name).expanduser()
    if path.exists():
        raise ConfigError(
            f"output = '{name}' is there already, and would be lost. Give another --output, or move it away."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)  # asks the system itself whether it can be written
        path.unlink()
    except OSError as error:
        raise ConfigError(
            f"output = '{name}' cannot be written: {error.strerror}. Give one in a folder that you may use."
        ) from error
    return path
