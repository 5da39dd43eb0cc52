"""Named state on disk: whole or not there, without pickled code, restored to the bit.

A checkpoint is a folder: per object one ``NAME.json`` and, when it has tensors, one ``NAME.safetensors``;
``meta.json``; and ``COMPLETE``, written last, which lists size and CRC-32 of all the others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from razona.errors import CheckpointError
from razona.types import Stateful

COMPLETE = "COMPLETE"
FORMAT = 1


def save_checkpoint(
    folder: str | Path, name: str, objects: Mapping[str, Stateful], *, meta: Mapping[str, Any]
) -> Path:
    """Write the ``state_dict`` of every object to ``folder/name`` and return that path.

    Killed at any moment, it leaves nothing half written that ``newest_checkpoint`` would take. A ``name``
    that ends in a number ("step-000010") is found by it. ``meta`` (step, metrics, ...) comes back from
    ``load_checkpoint``. State that is neither tensor, number, string, None nor a list, tuple or dict of these
    is a CheckpointError naming it.
    """
    for text in (name, *objects):
        if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", text) or text == "meta":
            raise CheckpointError(
                f"{text!r} cannot name a checkpoint or a part of one. Use letters, digits, _ . -"
            )
    parent = Path(folder)
    parent.mkdir(parents=True, exist_ok=True)
    target, new, old = parent / name, parent / f".{name}.new", parent / f".{name}.old"
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    new.mkdir()
    for key, thing in objects.items():
        tensors: dict[str, torch.Tensor] = {}
        _write_json(new / f"{key}.json", _encode(thing.state_dict(), key, tensors))
        if tensors:
            save_file(_unshared(tensors), new / f"{key}.safetensors")
            _fsync(new / f"{key}.safetensors")
    _write_json(new / "meta.json", _encode(dict(meta), "meta", {}))
    manifest = {"format": FORMAT, "files": {path.name: _fingerprint(path) for path in sorted(new.iterdir())}}
    _fsync(new)
    if target.exists():
        os.rename(target, old)
    os.rename(new, target)
    _fsync(parent)
    _write_json(target / ".COMPLETE.new", manifest)
    os.rename(target / ".COMPLETE.new", target / COMPLETE)
    _fsync(target)
    shutil.rmtree(old, ignore_errors=True)
    return target


def load_checkpoint(path: str | Path, objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """Give every object its state back, and return the checkpoint's ``meta``.

    Nothing is changed unless the checkpoint is whole and holds exactly these objects; else CheckpointError.
    """
    path = Path(path)
    problem = what_is_wrong(path)
    if problem:
        raise CheckpointError(f"{path} is not a whole checkpoint: {problem}. Resume from another one.")
    stored = {file.stem for file in path.glob("*.json")} - {"meta"}
    missing, extra = sorted(set(objects) - stored), sorted(stored - set(objects))
    if missing or extra:
        parts = [
            f"it lacks {', '.join(missing)}, which this run has" if missing else "",
            f"it holds {', '.join(extra)}, which this run has not" if extra else "",
        ]
        raise CheckpointError(
            f"{path} does not fit: {' and '.join(part for part in parts if part)}. "
            "Resume with the configuration it was written with."
        )
    states = {name: _read_object(path, name) for name in objects}
    for name, thing in objects.items():
        try:
            thing.load_state_dict(states.pop(name))
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path}: '{name}' cannot take its state back: {error}") from error
    return read_meta(path)


def read_meta(path: str | Path) -> dict[str, Any]:
    """The ``meta`` a checkpoint was saved with."""
    meta: dict[str, Any] = _decode(json.loads((Path(path) / "meta.json").read_text(encoding="utf-8")), {})
    return meta


def newest_checkpoint(folder: str | Path) -> tuple[Path | None, list[str]]:
    """The whole checkpoint with the highest number at the end of its name, and a line per one skipped."""
    notices: list[str] = []
    for path in reversed(_numbered(folder)):
        problem = what_is_wrong(path)
        if problem is None:
            return path, notices
        notices.append(f"Skipped the checkpoint {path}: {problem}.")
    return None, notices


def prune(folder: str | Path, keep: int, protect: Iterable[str] = ()) -> list[Path]:
    """Delete all but the ``keep`` newest numbered checkpoints and those in ``protect``; return the deleted.

    Half-written ones are not counted, and go too.
    """
    protected, kept, deleted = set(protect), 0, []
    for path in reversed(_numbered(folder)):
        whole = (path / COMPLETE).is_file()
        if path.name in protected or (whole and kept < keep):
            kept += whole
        else:
            (path / COMPLETE).unlink(missing_ok=True)  # first: killed in between, it does not look whole
            shutil.rmtree(path)
            deleted.append(path)
    return deleted


def what_is_wrong(path: str | Path) -> str | None:
    """Why a folder is not a whole checkpoint; None when it is. Reads every byte."""
    path = Path(path)
    if not (path / COMPLETE).is_file():
        return "it was not written to its end (no COMPLETE file)"
    try:
        manifest = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        files: dict[str, dict[str, int]] = manifest["files"]
        version = manifest["format"]
    except (ValueError, KeyError, TypeError):
        return "its COMPLETE file cannot be read"
    if version != FORMAT:
        return f"its format is {version}, and this version of razona reads {FORMAT}"
    for name, expected in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        found = _fingerprint(path / name)
        if found["bytes"] != expected["bytes"]:
            return f"{name} has {found['bytes']} bytes instead of {expected['bytes']}"
        if found != expected:
            return f"{name} is damaged (its checksum differs)"
    return None


def _numbered(folder: str | Path) -> list[Path]:
    """Folders whose name ends in a number, lowest first."""
    found = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        match = re.fullmatch(r"[^.].*?(\d+)|\d+", path.name)
        if match and path.is_dir():
            found.append((int(match[1] or match[0]), path.name, path))
    return [path for _, _, path in sorted(found)]


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """JSON for ``value``; tensors are moved to ``tensors`` and leave their key behind."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)  # numpy's float64 is a float too
    if isinstance(value, torch.Tensor):
        key = str(len(tensors))
        tensors[key] = value.detach()
        return {"__tensor__": key}
    if isinstance(value, list):
        return [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"__tuple__": [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [(key, _encode(item, f"{where}[{key!r}]", tensors)) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("__") for key, _ in pairs):
            return dict(pairs)
        return {"__pairs__": [[_encode(key, f"a key of {where}", tensors), item] for key, item in pairs]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold. A state_dict must be made of "
        "tensors, numbers, strings, None, lists, tuples and dicts."
    )


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the CPU and contiguous; copied only where two share memory (tied weights, views), which safetensors
    refuses."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(storage.data_ptr())
        result[key] = tensor
    return result


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__tuple__" in value:
        return tuple(_decode(item, tensors) for item in value["__tuple__"])
    if "__pairs__" in value:
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value["__pairs__"]}
    return {key: _decode(item, tensors) for key, item in value.items()}


def _read_object(path: Path, name: str) -> dict[str, Any]:
    tensor_file = path / f"{name}.safetensors"
    stored = load_file(tensor_file) if tensor_file.is_file() else {}
    # out of the memory-mapped file, into memory aligned as it was: matrix products may depend on that
    tensors = {key: tensor.clone() for key, tensor in stored.items()}
    state: dict[str, Any] = _decode(json.loads((path / f"{name}.json").read_text(encoding="utf-8")), tensors)
    return state


def _write_json(path: Path, value: Any) -> None:
    # ensure_ascii keeps lone surrogates; NaN and Infinity are Python's own spelling, read by Python alone
    path.write_text(json.dumps(value), encoding="utf-8")
    _fsync(path)


def _fingerprint(path: Path) -> dict[str, int]:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
