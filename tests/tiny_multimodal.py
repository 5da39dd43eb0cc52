"""Tiny random multimodal models: the text models of `tiny_models` behind a tower that sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import sharpen, tiny_config, tiny_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLForConditionalGeneration,
    SmolVLMForConditionalGeneration,
)

from razona.models import save

CLASSES = {
    "gemma3": Gemma3ForConditionalGeneration,
    "smolvlm": SmolVLMForConditionalGeneration,
    "qwen2_vl": Qwen2VLForConditionalGeneration,
}
PREPROCESSOR = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}}
PROCESSOR = {"image_seq_length": 4, "processor_class": "Gemma3Processor"}

_SEES = {"image_size": 16, "patch_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
_SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": {**_SEES, "hidden_size": 32, "intermediate_size": 48, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "image_token_index": 199,
        "boi_token_index": 197,
        "eoi_token_index": 198,
    },
    "smolvlm": {
        "vision_config": {**_SEES, "hidden_size": 32, "intermediate_size": 48},
        "image_token_id": 199,
        "scale_factor": 2,
    },
    "qwen2_vl": {
        "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8},
        "image_token_id": 199,
        "video_token_id": 198,
        "vision_start_token_id": 196,
        "vision_end_token_id": 197,
    },
}
_TEXT = {"gemma3": "gemma3", "smolvlm": "llama", "qwen2_vl": "qwen2"}


def tiny_multimodal(kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model with sharp logits; its tower's numbers are not those of a bfloat16, unless asked for."""
    text = tiny_config(_TEXT[kind], **({"tie_word_embeddings": True} if kind != "smolvlm" else {})).to_dict()
    if kind == "qwen2_vl":
        text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
        text["model_type"] = "qwen2_vl_text"
    config = AutoConfig.for_model(
        kind, text_config=text, tie_word_embeddings=text["tie_word_embeddings"], **_SHAPES[kind]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        sharpen(model, _TEXT[kind])
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


def multimodal_folder(folder: Path, kind: str = "gemma3", **options: Any) -> Path:
    """A tiny model on disk with its tokenizer and a processor's files."""
    path = save(tiny_multimodal(kind, **options), tiny_tokenizer(), folder)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (path / "processor_config.json").write_text(json.dumps(PROCESSOR))
    return path
