"""The run folder: what was asked for, what each step measured, what was sampled, how long it took.

Files and fields are described in docs/run-folder.md. ``metrics.jsonl`` and ``rollouts.jsonl`` hold no
wall-clock time: a resumed run writes the bytes that the uninterrupted one would have. Seconds are in
``timings.jsonl``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from razona import __version__
from razona.config.names import other_version
from razona.errors import CheckpointError, ConfigError

STREAMS = ("metrics", "rollouts", "timings")


class RunFolder:
    """Owns ``output_dir`` and its JSONL files; its state is how many bytes of each belong to the run."""

    def __init__(
        self, path: str | Path, *, resume: bool = False, overwrite: bool = False, resume_hint: str = ""
    ) -> None:
        """Create the folder. One that holds a run is a ConfigError, unless ``resume`` goes on with it or
        ``overwrite`` moves it aside (``moved`` then says where to). ``resume_hint`` says how to go on with
        it once it was stopped."""
        self.path = Path(path).expanduser().absolute()
        self.resume, self.resume_hint = resume, resume_hint
        self.moved: Path | None = None
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"output_dir {self.path} is a file. Give another output_dir.")
        if resume and overwrite:
            raise ConfigError("resume and overwrite exclude each other: go on with the run, or start anew.")
        if self._holds_run() and overwrite:
            self.moved = _free_name(self.path)
            os.rename(self.path, self.moved)
        elif self._holds_run() and not resume:
            raise ConfigError(
                f"output_dir {self.path} already holds a run. Go on with it (--run.resume), start anew "
                "(--run.overwrite moves it aside), or give another --run.output-dir."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._offsets = dict.fromkeys(STREAMS, 0)
        self._files: dict[str, IO[bytes]] = {}

    def _holds_run(self) -> bool:
        return any((self.path / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoints"))

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go."""
        return self.path / "checkpoints"

    @property
    def recorded_steps(self) -> int:
        """Whole lines of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def write_config(self, config: Any, *, header: str = "", **fingerprint: Any) -> None:
        """Write config.json, with what the run's header said and with ``fingerprint`` that the config does
        not hold (the model that was found, the fingerprint of the data, functions given from Python). When
        one is there (a resumed run), a difference of fingerprint or config is a CheckpointError naming it,
        except in fields that may change on resume."""
        stored = {
            "razona": __version__,
            "header": header.splitlines(),
            **_plain(fingerprint),
            "config": _plain(dataclasses.asdict(config)),
        }
        path = self.path / "config.json"
        if (before := stored_config(self.path)) is not None:
            if other := other_version(before["config"], config):
                raise CheckpointError(
                    f"The run in {self.path} was begun by another version of razona, "
                    f"{before.get('razona')} (this is {__version__}): in its config.json, {other}. "
                    "Finish it with that version, or give another --run.output-dir."
                )
            changed = [
                line
                for name in fingerprint
                for line in _fingerprint_differences(before.get(name), stored[name], name)
            ] + config_differences(before["config"], config)
            if changed:
                raise CheckpointError(
                    f"The run in {self.path} cannot be resumed with another setting. {'; '.join(changed)}. "
                    "Put it back, or give another --run.output-dir."
                )
        new = path.with_suffix(".json.new")
        new.write_text(json.dumps(stored, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(new, path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of metrics.jsonl."""
        self._write("metrics", {"step": step, **metrics})

    def log_timings(self, step: int, seconds: Mapping[str, float]) -> None:
        """One line of timings.jsonl: seconds by phase, and the time of day."""
        self._write("timings", {"step": step, "time": time.time(), **seconds})

    def log_rollouts(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Lines of rollouts.jsonl, from ``rollout_records``."""
        for record in records:
            self._write("rollouts", record)

    def state_dict(self) -> dict[str, Any]:
        """Bytes of each file that belong to the run so far, safely on the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {
            name: self._files[name].tell() if name in self._files else self._offsets[name] for name in STREAMS
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Cut the files back to where they were; what came after is written again by the resumed run."""
        self.close()
        self._offsets = {name: int(state[name]) for name in STREAMS}
        for name in STREAMS:
            truncate_jsonl(self.path / f"{name}.jsonl", self._offsets[name])

    def close(self) -> None:
        try:
            self._offsets = self.state_dict()
        finally:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _write(self, stream: str, record: Mapping[str, Any]) -> None:
        if stream not in self._files:  # a resumed run without a checkpoint starts from nothing
            path = self.path / f"{stream}.jsonl"
            truncate_jsonl(path, self._offsets[stream])
            self._files[stream] = path.open("ab")
        self._files[stream].write(json_line(record))
        self._files[stream].flush()


def stored_config(folder: str | Path) -> dict[str, Any] | None:
    """What `RunFolder.write_config` wrote in ``folder``; None where there is no run. CheckpointError for a
    file that is something else.
    """
    path = Path(folder).expanduser() / "config.json"
    if not path.exists():
        return None
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(stored["config"], dict)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise CheckpointError(
            f"{path} is not what a run writes there ({type(error).__name__}: {error}). Put the file back, or "
            "give another --run.output-dir."
        ) from error
    return stored


def json_line(record: Mapping[str, Any]) -> bytes:
    """One line of valid JSON: floats to their last bit, nan as null, infinities as "inf" and "-inf".

    >>> json_line({"a": 0.1, "b": float("nan"), "c": float("-inf")})
    b'{"a": 0.1, "b": null, "c": "-inf"}\\n'
    """
    text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
    # a lone surrogate (half of an emoji) becomes its \uXXXX, which is valid JSON
    return (text + "\n").encode("utf-8", errors="backslashreplace")


def truncate_jsonl(path: str | Path, offset: int) -> None:
    """Cut ``path`` back to ``offset`` bytes; a file that is shorter has lost lines: CheckpointError."""
    path = Path(path)
    size = path.stat().st_size if path.exists() else 0
    if size < offset:
        raise CheckpointError(
            f"{path} has {size} bytes, and the checkpoint was written when it had {offset}: lines were lost. "
            "Put the file back, or resume from an older checkpoint."
        )
    if size > offset:
        with path.open("r+b") as file:
            file.truncate(offset)
            os.fsync(file.fileno())


def _fingerprint_differences(before: Any, now: Any, name: str) -> Iterator[str]:
    """What differs between two plain values, tables field by field."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _fingerprint_differences(before.get(key), now.get(key), f"{name}.{key}")
    elif not _same(before, now):
        yield f"{name}: it was {before!r} and is {now!r}"


def _same(before: Any, now: Any) -> bool:
    """Equal, or two spellings of a file or folder that is there."""
    if before == now or not (isinstance(before, str) and isinstance(now, str)):
        return bool(before == now)
    try:
        return Path(before).expanduser().samefile(Path(now).expanduser())
    except (OSError, RuntimeError, ValueError):  # not there, or text that no path can be
        return False


def config_differences(before: Mapping[str, Any], config: Any, prefix: str = "") -> list[str]:
    """What differs between a stored config and this one, without the fields that may change on resume.

    ``num_steps`` may, but only with a constant learning rate: the others are drawn out over all the steps.
    """
    constant = getattr(getattr(config, "optimizer", None), "schedule", "constant") == "constant"
    return list(_differences(before, config, prefix, steps_may_change=constant))


def _differences(
    before: Mapping[str, Any], config: Any, prefix: str, *, steps_may_change: bool
) -> Iterator[str]:
    for field in dataclasses.fields(config):
        name, now = prefix + field.name, getattr(config, field.name)
        was = before.get(field.name)
        if dataclasses.is_dataclass(now):
            yield from _differences(was or {}, now, f"{name}.", steps_may_change=steps_may_change)
            continue
        now = _plain(now)
        may_change = field.metadata.get("resume", False) and (field.name != "num_steps" or steps_may_change)
        if not may_change and not _same(was, now):
            yield f"{name}: it was {was!r} and is {now!r}"


class Phases:
    """Seconds by phase. Time within an inner phase is not counted in the outer one, so the sum is the whole.

    >>> ticks = iter([0.0, 1.0, 3.0, 4.0])
    >>> phases = Phases(clock=lambda: next(ticks))
    >>> with phases("train"):
    ...     with phases("update"):
    ...         pass
    >>> phases.pop()
    {'update': 2.0, 'train': 2.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner = [0.0]  # per open phase, seconds spent in phases within it

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self._clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            elapsed = self._clock() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed - self._inner.pop()
            self._inner[-1] += elapsed

    def pop(self) -> dict[str, float]:
        """The seconds since the last ``pop``, by phase."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def _plain(value: Any) -> Any:
    """What json can write: tuples as lists, nan as None, infinities as strings, other numbers as floats."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else (None if math.isnan(value) else str(float(value)))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(float(value))


def _free_name(path: Path) -> Path:
    return next(p for n in range(1, 10**6) if not (p := path.with_name(f"{path.name}.old-{n}")).exists())
