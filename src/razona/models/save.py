"""Writing a model as a folder that plain transformers loads."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from razona.errors import ModelError


def save(
    model: PreTrainedModel, tokenizer: Any, folder: str | Path, *, dtype: torch.dtype | None = None
) -> Path:
    """Write weights (safetensors), config, tokenizer (or processor) and chat template to ``folder``, whole or
    not at all.

    ``dtype`` is that of the floating-point weights in the file; None keeps the model's, each parameter's own,
    and declares the widest of them: plain loading then rounds none. A model that is
    already there is replaced; a folder that holds something else is refused (ModelError).
    """
    bars = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    with replacing(folder) as new:
        try:
            model.save_pretrained(new, state_dict=None if dtype is None else _cast(model.state_dict(), dtype))
            tokenizer.save_pretrained(new)
        finally:
            if bars:
                transformers.utils.logging.enable_progress_bar()
        if dtype is None:
            declare_widest(model, new)
        else:
            _declare_dtype(new / "config.json", dtype)
    return Path(folder).expanduser().absolute()


def declare_widest(model: PreTrainedModel, folder: Path) -> None:
    """Has the config.json that ``model`` was saved with say the widest dtype of its weights, where there are
    several: plain transformers takes the first one it sees.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(dtypes) > 1:
        _declare_dtype(folder / "config.json", functools.reduce(torch.promote_types, dtypes))


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """A path to make a folder at, which then takes the place of ``folder``; on an error nothing does.
    ModelError where ``folder`` holds something else than a model or an adapter.
    """
    target = Path(folder).expanduser().absolute()
    if target.exists() and not (target.is_dir() and _may_replace(target)):
        raise ModelError(f"{target} exists and is not a model. Give another folder, or remove it first.")
    target.parent.mkdir(parents=True, exist_ok=True)
    new, old = (target.with_name(f".{target.name}.{what}") for what in ("new", "old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    yield new
    _flush(new)
    if target.exists():
        os.rename(target, old)
    os.rename(new, target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings of transformers; its exceptions still come through."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _may_replace(folder: Path) -> bool:
    models = ("config.json", "adapter_config.json")
    return any((folder / name).is_file() for name in models) or not any(folder.iterdir())


def _cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors that are one stay one, so that transformers sees what is tied."""
    done: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for tensor in state.values():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in done:
            done[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return {name: done[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}


def _declare_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in (config, *config.values()):
        if part is config or (isinstance(part, dict) and "dtype" in part):
            part["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _flush(folder: Path) -> None:
    """Have the disk hold every file before the rename makes them visible."""
    for path in [*(p for p in folder.rglob("*") if p.is_file()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
