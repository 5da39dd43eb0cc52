"""LoRA adapters of peft, unmerged: attached, loaded, scored with, switched off, saved.

A merged bf16 weight would round most of an update away, so the product goes beside the base layer, in the
trainer and in the sampler alike: ``base(x) + B(A(x)) * scaling``.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from razona.config.common import LoRAConfig
from razona.errors import ConfigError, ModelError, nearest
from razona.models.multimodal import language_model
from razona.models.quant import quantized_layers, size_of, write_record
from razona.models.save import replacing

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FOUND_BY = "--model BASE --lora.adapter FOLDER"


class Adapter:
    """The adapter of a `peft.PeftModel`, apart from the model it sits in."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.name: str = wrapped.active_adapter
        self.config = wrapped.peft_config[self.name]
        model = wrapped.get_base_model()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        products = [p for name, p in trained.items() if ".lora_B." in name]
        others = [name for name in trained if ".lora_B." not in name and ".lora_A." not in name]
        self.is_fresh = bool(products) and not others and not any(p.any() for p in products)
        """It changes nothing yet: without it the model is what it was given as."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is its base alone."""
        with self.wrapped.disable_adapter():
            yield

    def save(self, tokenizer: Any, folder: str | Path, weights: Mapping[str, Tensor]) -> Path:
        """An adapter folder that plain peft loads, with the tokenizer, whole or not at all. ``weights``, by
        the names that the model's parameters have, stand in for the model's own.
        """
        import peft

        state = self.wrapped.state_dict() | {f"base_model.model.{n}": w for n, w in weights.items()}
        state = peft.get_peft_model_state_dict(
            self.wrapped, state_dict=state, adapter_name=self.name, save_embedding_layers=False
        )
        config = copy.copy(self.config)
        config.inference_mode = True  # as peft's own save_pretrained writes it
        score = {f"base_model.model.{n}": w for n, w in weights.items() if n.startswith("score.")}
        if score:  # a reward model's: it replaces the language-model head
            state |= score
            config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
        if isinstance(config.target_modules, set):
            config.target_modules = sorted(config.target_modules)
        with replacing(folder) as new:
            new.mkdir()
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
            save_file(tensors, new / WEIGHTS, {"format": "pt"})
            config.save_pretrained(new)
            tokenizer.save_pretrained(new)
            write_record(self.wrapped, new)
        return Path(folder)

    def __str__(self) -> str:
        config, targets = self.config, self.config.target_modules
        scaling = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
        on = targets if isinstance(targets, str) else ", ".join(sorted(targets))
        base = self.wrapped.get_base_model()
        sizes = [(size_of(p), p.requires_grad) for p in base.parameters()]
        trained, total = sum(n for n, own in sizes if own), sum(n for n, _ in sizes)
        return (
            f"LoRA r {config.r}, alpha {config.lora_alpha} (scaling {scaling:g}"
            f"{', rslora' if config.use_rslora else ''}) on {on}: {trained:,} of {total:,} parameters trained"
            f"{', on a 4-bit base' if quantized_layers(base) else ''}"
        )


def unwrap(model: Any) -> tuple[Any, Adapter | None]:
    """The transformers model and, where ``model`` is a `peft.PeftModel`, its adapter; dropout 0 everywhere.

    Raises ModelError for an adapter that cannot be trained here: another kind than LoRA, on the head.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            "the model got its adapter from transformers (load_adapter, or from_pretrained on an adapter "
            "folder), which leaves no handle to train and save it by. Load it with "
            "peft.PeftModel.from_pretrained(base, folder, is_trainable=True)."
        )
    if not hasattr(model, "peft_config"):
        return model, None
    kind = str(getattr(model.peft_config[model.active_adapter].peft_type, "value", "another kind"))
    if kind != "LORA":
        raise ModelError(
            f"the adapter is {kind}, and only LoRA can be trained. Make it with peft.LoraConfig."
        )
    inner = model.get_base_model()
    if type(inner.get_output_embeddings()).__module__.startswith("peft."):
        raise ModelError(
            "the adapter sits on the output head, which runs on scored positions only and would go by it. "
            "Leave the head out of target_modules and modules_to_save."
        )
    for module in inner.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return inner, Adapter(model)


def attach(model: Any, config: LoRAConfig, *, base: str, seed: int) -> Any:
    """``model`` as a `peft.PeftModel` with a fresh adapter, which is noted to belong to ``base``. Raises
    ConfigError for targets that are not there.
    """
    import peft

    targets = _targets(model, config.target_modules)
    options = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=targets,
        use_rslora=config.rslora,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, options)
    path = Path(base).expanduser()
    options.base_model_name_or_path = str(path.absolute()) if path.exists() else base
    return wrapped


def _targets(model: Any, wanted: Sequence[str]) -> list[str]:
    """What to give to peft: ``wanted``, or every linear layer of the decoder but the head; in whole names
    where other parts of the model, its towers, have layers of the same names.
    """
    head, inside = model.get_output_embeddings(), {*model.get_decoder().modules()}
    every = {name: module for name, module in model.named_modules() if module is not head}
    ours = {name: module for name, module in every.items() if module in inside}
    endings = sorted({n.rpartition(".")[2] for n, m in ours.items() if isinstance(m, nn.Linear | Conv1D)})
    known = [name for name, m in ours.items() if isinstance(m, nn.Linear | Conv1D | nn.Embedding)]
    for target in wanted:
        if not _named(known, [target]):
            text = type(language_model(model)).__name__
            raise ConfigError(
                f"lora.target_modules: no layer of the {text} is called '{target}'."
                f"{nearest(target, endings)} There are {', '.join(endings)}; empty takes all of them."
            )
    targets = list(wanted) or endings
    found = _named(known, targets)
    return targets if _named(every, targets) == found else found


def _named(names: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Those that peft takes one of ``targets`` for."""
    return [name for name in names if any(name == t or name.endswith(f".{t}") for t in targets)]


def base_of(folder: Path) -> str:
    """The name of the model that the adapter in ``folder`` was trained on. Raises ModelError for an adapter
    that is no LoRA, has pickled weights or names no base.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA":
        raise ModelError(
            f"{folder} is an adapter of the kind {config.get('peft_type')}, and only LoRA can be used."
        )
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{folder} holds no {WEIGHTS}, and pickled weights are not loaded. Save it again.")
    base = config.get("base_model_name_or_path")
    if not base:
        raise ModelError(f"The adapter in {folder} does not say what its base model is. Give {FOUND_BY}.")
    return str(base)


def load_adapter(model: Any, folder: Path) -> Any:
    """``model`` as a `peft.PeftModel` with the adapter in ``folder``, ready to train. Raises ModelError for
    one that does not fit.
    """
    import peft

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of missing weights, which are an error below
            wrapped = peft.PeftModel.from_pretrained(
                model, str(folder), is_trainable=True, torch_device=str(model.device)
            )
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelError(
            f"The adapter in {folder} does not fit a {type(model).__name__}: {error}. Give its own base "
            f"model: {FOUND_BY}."
        ) from error
    with safe_open(folder / WEIGHTS, "pt") as file:
        apart = {*file.keys()} ^ {*peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)}
    if apart:
        raise ModelError(
            f"The adapter in {folder} does not fit a {type(model).__name__}: {sorted(apart)[0]} stands in "
            f"only one of the two. Give its own base model: {FOUND_BY}."
        )
    return wrapped
