"""`razona merge`: a LoRA adapter and its base as one model folder, for what reads no adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from razona.config import MergeConfig
from razona.config.check import validate
from razona.errors import ConfigError, ModelError
from razona.models import load, save
from razona.models.lora import CONFIG, load_adapter
from razona.models.quant import plain_copy, quantized_layers
from razona.run.console import Console


def run(config: MergeConfig, *, console: Console) -> dict[str, Any]:
    """Adds ``B A * scaling`` to every weight it belongs to, once and in fp32, and writes the model.

    Merged into bf16, most of a small update would be rounded away; so the folder is fp32 unless asked
    otherwise, and then it is rounded after the sum. A base that was trained on in 4 bits is read from where
    it lies, put in 4 bits as it was then, and de-quantized once: that is the model that was trained.
    """
    validate(config)
    adapter = _adapter_folder(config.adapter)
    output = Path(config.output or adapter.parent / "merged").expanduser()
    if output.exists():
        raise ConfigError(
            f"{output} is there already, and would be lost. Give another --output, or move it away."
        )
    loaded = load(str(adapter), dtype=torch.float32)
    for note in loaded.notices:
        console.note(note)
    model = loaded.model
    if quantized_layers(model):
        model = load_adapter(plain_copy(model.get_base_model()), adapter)
    merged = model.merge_and_unload(safe_merge=True)
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    folder = save(merged, loaded.tokenizer, output, dtype=dtype)
    console.print(f"{adapter} and its base are one model now, in {config.dtype}: {folder}")
    return {"adapter": str(adapter), "model": str(folder), "dtype": config.dtype}


def _adapter_folder(name: str) -> Path:
    """Of a run its ``model``, else the folder itself. ModelError where there is no adapter."""
    folder = Path(name).expanduser()
    for candidate in (folder / "model", folder):
        if (candidate / CONFIG).is_file():
            return candidate
    if (folder / "model" / "config.json").is_file() or (folder / "config.json").is_file():
        raise ModelError(
            f"{name} holds a whole model and no adapter: there is nothing to merge. It can be used as it is."
        )
    raise ModelError(f"{name} holds no {CONFIG}. Give the folder of a run with LoRA, or of an adapter.")
