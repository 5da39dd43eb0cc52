"""From a configuration to the parts of a run: what every command builds before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from razona.config import DataConfig, ModelConfig, OptimizerConfig
from razona.console import Console
from razona.data import Rows, build_prompts
from razona.engines.hf import HFEngine
from razona.engines.native import NativeEngine
from razona.errors import ConfigError
from razona.models import LoadedModel, load
from razona.models.scorer import FlatScorer
from razona.policy import Policy
from razona.types import Engine, Prompt, Sampling


def load_model(config: ModelConfig, console: Console) -> LoadedModel:
    """The model in fp32 (or bf16 for pure_bf16) on the device asked for; prints what there is to say about
    it.
    """
    device = choose_device(config.device)
    dtype = torch.bfloat16 if config.precision == "pure_bf16" else torch.float32
    loaded = load(config.name, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code)
    for note in loaded.notes:
        console.note(note)
    if config.precision == "pure_bf16":
        console.note(
            "pure_bf16: updates smaller than 1/256 of a weight are rounded away; bf16 keeps fp32 masters."
        )
    return loaded


def make_policy(
    loaded: LoadedModel, config: ModelConfig, optimizer: OptimizerConfig, *, total_updates: int
) -> Policy:
    return Policy(
        loaded.model,
        loaded.processor or loaded.tokenizer,
        optimizer=optimizer,
        precision=config.precision,
        total_updates=total_updates,
        gradient_checkpointing=config.gradient_checkpointing,
    )


def make_engine(policy: Policy, loaded: LoadedModel, console: Console) -> Engine:
    """The native engine, or transformers' generate for a model that cannot share prompts; said when so."""
    if isinstance(policy.scorer, FlatScorer):
        return NativeEngine(policy, stop_token_ids=loaded.stop_token_ids)
    console.note(
        f"{type(loaded.model).__name__} mixes tokens by other means than attention, or by its own: it runs "
        "full padded rows and transformers' generate. Right, but slower; prompts are not shared."
    )
    return HFEngine(policy, stop_token_ids=loaded.stop_token_ids)


def choose_device(name: str) -> torch.device:
    """``auto`` takes CUDA where there is one. An accelerator that is not there is a ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"model.device is '{name}', which names no device. Use auto, cpu, cuda or cuda:N."
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device is '{name}', but torch sees no CUDA device here. Use auto or cpu.")
    return device


def fitting_prompts(
    rows: Rows, loaded: LoadedModel, data: DataConfig, sampling: Sampling, console: Console
) -> tuple[Prompt, ...]:
    """The rows that fit the model beside a completion, as prompts; what was dropped is printed."""
    prompts = build_prompts(
        rows,
        loaded.tokenizer,
        data,
        max_context=max_context(loaded.model),
        reserve=sampling.max_completion_length,
    )
    for notice in prompts.notices:
        console.note(notice)
    return prompts.prompts


def overlap_note(training: Sequence[Prompt], held_out: Sequence[Prompt]) -> str | None:
    """What to print when prompts are trained on and held out too: None when there are none."""
    trained = {prompt.token_ids for prompt in training}
    count = sum(prompt.token_ids in trained for prompt in held_out)
    if not count:
        return None
    return (
        f"{count} of the {len(held_out)} held-out prompts are training prompts too: for these, eval/... "
        "figures say what was learned by heart. Hold out rows that are not trained on."
    )


def max_context(model: Any) -> int | None:
    """Positions the model was made for, where its config says."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit
