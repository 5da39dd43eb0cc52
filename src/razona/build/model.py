"""From a configuration to the model, the policy that trains it and the engine that samples from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from razona.build.device import choose_device
from razona.build.precision import resolved
from razona.config import (
    BUNDLED_MODEL,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
)
from razona.engines.hf import HFEngine
from razona.engines.native import NativeEngine
from razona.errors import ConfigError
from razona.models import HubSilent, LoadedModel, attach, load, with_adapter
from razona.models.lora import CONFIG as ADAPTER_CONFIG
from razona.models.multimodal import set_dtype
from razona.models.quant import NF4, quantized_layers
from razona.models.scorer import FlatScorer
from razona.policy import Policy
from razona.run.console import Console
from razona.types import Engine, EngineName

NO_LORA = LoRAConfig()


def load_model(
    config: ModelConfig,
    console: Console,
    *,
    lora: LoRAConfig = NO_LORA,
    seed: int = 0,
    given: LoadedModel | None = None,
) -> LoadedModel:
    """The model on the device asked for, with the adapter that ``lora`` asks for; prints what there is to say
    about it. In fp32, or in bf16 where nothing is lost by it. ``given`` stands in for ``config.name``.
    """
    lora.check_fresh()
    config = resolved(config)
    if given is None:
        device = choose_device(config.device)
        loaded = load(
            config.name,
            dtype=_dtype(config, lora),
            device=device,
            trust_remote_code=config.trust_remote_code,
            quantization=NF4 if config.load_in_4bit else None,
        )
    else:
        loaded = given
        if config.load_in_4bit and not quantized_layers(loaded.model):
            raise ConfigError(
                f"model.load_in_4bit = True, but the model handed in, {loaded.name}, is not in 4 bits. Load "
                "it so, or give its name."
            )
        if config.precision == "fp32":
            set_dtype(loaded.model, torch.float32)
    if lora.adapter:
        loaded = with_adapter(loaded, lora.adapter)
    if lora.r:
        if hasattr(loaded.model, "peft_config"):
            raise ConfigError(
                f"lora.r = {lora.r}, but {loaded.name} has an adapter already, with a rank of its own. Leave "
                "lora.r out to train that one, or give its base as the model."
            )
        loaded = replace(loaded, model=attach(loaded.model, lora, base=loaded.name, seed=seed))
    for note in loaded.notices:
        console.note(note)
    if config.precision == "pure_bf16":
        console.note(
            "pure_bf16: updates smaller than 1/256 of a weight are rounded away; bf16 keeps fp32 masters."
        )
    return loaded


def or_bundled(make: Callable[[str], LoadedModel], name: str, console: Console) -> LoadedModel:
    """``make(name)``; without a hub to ask, the bundled model stands in for one that is not here; said in a
    line.
    """
    try:
        return make(name)
    except HubSilent as error:
        console.note(
            f"{error}\nIn its place: the bundled model, {BUNDLED_MODEL}. This is not the model you named."
        )
        return make(BUNDLED_MODEL)


def _dtype(config: ModelConfig, lora: LoRAConfig) -> torch.dtype:
    """What the weights are read as: the base of an adapter needs no masters, nor what is beside 4 bits."""
    has_adapter = lora.r or lora.adapter or (Path(config.name).expanduser() / ADAPTER_CONFIG).is_file()
    frozen_bf16 = config.precision == "bf16" and (has_adapter or config.load_in_4bit)
    return torch.bfloat16 if config.precision == "pure_bf16" or frozen_bf16 else torch.float32


def max_context(model: Any) -> int | None:
    """Positions the model was made for, where its config says; fewer where it is bound to ``max_seq_length``
    (razona.unsloth).
    """
    limits = (
        getattr(model.config.get_text_config(), "max_position_embeddings", None),
        getattr(model, "max_seq_length", None),
    )
    return min((limit for limit in limits if limit is not None), default=None)


def make_policy(
    loaded: LoadedModel, config: ModelConfig, optimizer: OptimizerConfig, *, total_updates: int
) -> Policy:
    """What trains ``loaded.model``, or the adapter on it."""
    return Policy(
        loaded.model,
        loaded.processor or loaded.tokenizer,
        optimizer=optimizer,
        precision=resolved(config).precision,
        total_updates=total_updates,
        gradient_checkpointing=config.gradient_checkpointing,
    )


def make_engine(policy: Policy, loaded: LoadedModel, console: Console, name: EngineName = "auto") -> Engine:
    """The engine that ``sampling.engine`` asks for; auto takes transformers' generate for a model that cannot
    share prompts, and says so. ModelError for native with such a model.
    """
    shares_prompts = isinstance(policy.scorer, FlatScorer)
    if name == "native" or (name == "auto" and shares_prompts):
        return NativeEngine(policy, stop_token_ids=loaded.stop_token_ids)
    if not shares_prompts:
        console.note(
            f"{type(policy.model).__name__} mixes tokens by other means than attention, or by its own: it "
            "runs full padded rows and transformers' generate. Right, but slower; prompts are not shared."
        )
    return HFEngine(policy, stop_token_ids=loaded.stop_token_ids)
