"""Checkpoints that see or hear beside reading. They train on text: the language model within is what is
trained and sampled from; towers and projectors stay as they are, bit for bit, and are saved with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def language_model(model: Any) -> Any:
    """The decoder within a multimodal model, without its head; a text model is its own."""
    return model if model.config.get_text_config() is model.config else model.get_decoder()


def towers(model: Any) -> dict[str, nn.Parameter]:
    """**The rule of what does not train**: every parameter outside the language model and its head, by name.
    Empty for a text model.
    """
    text = language_model(model)
    if text is model:
        return {}
    trained = {id(p) for part in (text, model.get_output_embeddings()) for p in part.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in trained}


def set_dtype(model: Any, dtype: torch.dtype, *, towers_as: torch.dtype | None = None) -> None:
    """Casts the parameters, but those of `towers` only to ``towers_as``, and where that loses nothing.

    Parameters only: ``model.to`` would round the rotary frequencies too, and late positions with them.
    """
    kept = {id(p) for p in towers(model).values()}
    for parameter in model.parameters():
        if not parameter.is_floating_point() or hasattr(parameter, "quant_state"):
            continue  # 4-bit weights
        if id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)
        elif towers_as is not None:
            cast = parameter.data.to(towers_as)
            if torch.equal(cast.to(parameter.dtype), parameter.data):
                parameter.data = cast


def frozen_notice(name: str, model: Any) -> list[str]:
    """A line about a multimodal model's other parts, where it has some."""
    others = towers(model)
    if not others:
        return []
    parts = dict.fromkeys(key.removeprefix("model.").split(".")[0] for key in others)
    millions = sum(p.numel() for p in others.values()) / 1e6
    return [
        f"{name} is multimodal: its language model is trained, on text. {', '.join(parts)} ({millions:.1f} M "
        "parameters) are frozen, and are saved unchanged."
    ]


@dataclass(frozen=True)
class FolderProcessor:
    """A tokenizer, and the files beside it that make it a processor: kept as they are, for none of them is
    needed to read text (and images need libraries that may not be here).
    """

    tokenizer: Any
    files: dict[str, bytes]

    def save_pretrained(self, folder: str | Path) -> None:
        """As a processor's own: tokenizer and all."""
        self.tokenizer.save_pretrained(folder)
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)


def processor_in(folder: Path, tokenizer: Any, *, base: Any = None) -> Any:
    """The processor that ``tokenizer`` is part of in ``folder``, or the tokenizer itself. A chat template
    that only the processor has becomes the tokenizer's too. Files that an adapter's folder lacks are those
    of the ``base`` model's processor.
    """
    files = {name: (folder / name).read_bytes() for name in PROCESSOR_FILES if (folder / name).is_file()}
    if isinstance(base, FolderProcessor):
        files = base.files | files
    if not files:
        return tokenizer
    if not tokenizer.chat_template and "chat_template.json" in files:
        tokenizer.chat_template = json.loads(files["chat_template.json"])["chat_template"]
    return FolderProcessor(tokenizer, files)
