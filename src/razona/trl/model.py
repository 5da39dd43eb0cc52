"""What a trainer is given as its model: a name or an object, its tokenizer, an adapter where asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from razona.build.model import load_model, or_bundled
from razona.config import LoRAConfig
from razona.errors import ConfigError, ModelError
from razona.models import LoadedModel, from_model
from razona.run.console import Console
from razona.trl.arguments import Arguments
from razona.trl.translate import model_config


def given_model(
    model: Any, processing_class: Any, args: Arguments, peft_config: Any, console: Console
) -> LoadedModel:
    """The model by name or as an object, with its tokenizer, and with an adapter where one is asked for."""
    config = replace(model_config(args), name=model) if isinstance(model, str) else model_config(args)
    if isinstance(model, str):
        lora = _lora(peft_config, args)
        loaded = or_bundled(
            lambda name: load_model(replace(config, name=name), console, **lora), config.name, console
        )
        return loaded if processing_class is None else from_model(loaded.model, processing_class, loaded.name)
    name = str(getattr(model.config, "_name_or_path", "") or "handed in")
    if processing_class is None:
        from transformers import AutoTokenizer

        try:
            processing_class = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ModelError(
                "a model object without processing_class, and there is no tokenizer under its name "
                f"'{name}'. Pass processing_class=tokenizer."
            ) from error
    return load_model(
        config, console, given=from_model(model, processing_class, name), **_lora(peft_config, args)
    )


def _lora(peft_config: Any, args: Arguments) -> dict[str, Any]:
    """``peft_config`` as options of `load_model`."""
    if peft_config is None:
        return {}
    for name, off in LORA_OFF.items():
        if (value := getattr(peft_config, name, off)) != off:
            raise ConfigError(f"peft_config.{name} = {value!r} is not supported. Leave it at {off!r}.")
    targets = peft_config.target_modules
    if isinstance(targets, str) and targets != "all-linear":
        raise ConfigError(
            f"peft_config.target_modules = {targets!r} is a pattern. Give a list of layer names."
        )
    names = () if targets == "all-linear" else tuple(sorted(targets or PEFT_TARGETS))
    options = {"alpha": peft_config.lora_alpha, "rslora": peft_config.use_rslora, "target_modules": names}
    return {"lora": LoRAConfig(r=peft_config.r, **options), "seed": args.seed}


PEFT_TARGETS = ("q_proj", "v_proj")  # what peft takes for Llama and its kin where none are named
LORA_OFF: dict[str, Any] = {
    "bias": "none",
    "modules_to_save": None,
    "use_dora": False,
    "init_lora_weights": True,
    "layers_to_transform": None,
    "exclude_modules": None,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Options of `peft.LoraConfig` that have no place here. Dropout is off in any case."""
