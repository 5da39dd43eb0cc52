"""Loading, adapting and saving under Unsloth's names."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from razona.build.device import choose_device
from razona.build.model import max_context, or_bundled
from razona.commands.push import upload
from razona.config import BUNDLED_MODEL, LoRAConfig
from razona.errors import ConfigError
from razona.models import LoadedModel, attach, load, save
from razona.models.attention import use_plain_attention
from razona.models.lora import load_adapter, unwrap
from razona.models.multimodal import towers
from razona.models.quant import NF4, plain_copy, write_record
from razona.report.card import model_card
from razona.run.console import Console
from razona.unsloth.arguments import ADAPTING, LOADING, SAVING, check

DTYPES = {"None": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class FastLanguageModel:
    """Models for razona.trl, with LoRA, in 4 bits or not."""

    @staticmethod
    def from_pretrained(
        model_name: str = BUNDLED_MODEL,
        max_seq_length: int | None = None,
        dtype: Any = None,
        load_in_4bit: bool = True,
        *,
        load_in_16bit: bool = False,
        full_finetuning: bool = False,
        device_map: str = "auto",
        trust_remote_code: bool = False,
        console: Console | None = None,
        **others: Any,
    ) -> tuple[Any, Any]:
        """``(model, tokenizer)``. A folder with an adapter gives a `peft.PeftModel`, ready to go on.

        ``max_seq_length`` bounds prompt and completion together in training. ``load_in_16bit`` and
        ``full_finetuning`` turn 4 bits off. Without a hub to ask, the bundled model stands in, and is named.
        """
        check("FastLanguageModel.from_pretrained", others, LOADING)
        kind = str(dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise ConfigError(
                f"dtype={dtype!r} is not supported: take torch.bfloat16, torch.float32 or None."
            )
        device = choose_device("auto" if device_map == "sequential" else str(device_map))
        quantized = load_in_4bit and not (load_in_16bit or full_finetuning)
        console = console or Console()
        loaded = or_bundled(
            lambda name: load(
                name,
                dtype=torch.float32 if full_finetuning else DTYPES[kind],
                device=device,
                trust_remote_code=trust_remote_code,
                quantization=NF4 if quantized else None,
            ),
            model_name,
            console,
        )
        for note in loaded.notices:
            console.note(note)
        _bound(loaded, max_seq_length)
        return _with_methods(loaded.model, loaded), loaded.tokenizer

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: Sequence[str] | str | None = None,
        lora_alpha: int = 16,
        *,
        random_state: int = 3407,
        use_rslora: bool = False,
        finetune_vision_layers: bool = False,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        **others: Any,
    ) -> Any:
        """A fresh LoRA adapter on ``model``, drawn from ``random_state``; by default on every linear layer of
        the decoder but the head.
        """
        check("FastLanguageModel.get_peft_model", others, ADAPTING)
        if hasattr(model, "peft_config"):
            raise ConfigError(
                "get_peft_model: the model has an adapter already. Train that one, or load its base."
            )
        if finetune_vision_layers and towers(model):
            raise ConfigError(
                "finetune_vision_layers=True is not supported: training is on text, and what sees stays as "
                "it is. Leave it out."
            )
        if isinstance(target_modules, str) and target_modules != "all-linear":
            raise ConfigError(f"target_modules={target_modules!r} is a pattern. Give a list of layer names.")
        targets = () if target_modules in (None, "all-linear") else tuple(target_modules or ())
        if not (finetune_attention_modules and finetune_mlp_modules):
            targets = _part(targets, finetune_attention_modules, finetune_mlp_modules)
        loaded: LoadedModel | None = getattr(model, "loaded_by_razona", None)
        base = loaded.name if loaded is not None else str(getattr(model.config, "_name_or_path", ""))
        config = LoRAConfig(r=r, alpha=lora_alpha, rslora=use_rslora, target_modules=targets)
        return _with_methods(attach(model, config, base=base, seed=random_state), loaded)

    @staticmethod
    def for_inference(model: Any) -> Any:
        """``model`` in evaluation mode, with an attention that transformers' ``generate`` can use."""
        use_plain_attention(_inner(model))
        return model.eval()

    @staticmethod
    def for_training(model: Any) -> Any:
        """``model`` in training mode."""
        return model.train()


class FastModel(FastLanguageModel):
    """The same: multimodal checkpoints train on text."""


def is_bfloat16_supported() -> bool:
    """True: bf16 computes on a CPU and on every GPU that razona runs on."""
    return True


def save_pretrained_merged(
    model: Any,
    save_directory: str | Path,
    tokenizer: Any = None,
    save_method: str = "merged_16bit",
    *,
    loaded: LoadedModel | None = None,
    **others: Any,
) -> Path:
    """One model of base and adapter in ``save_directory``, for plain transformers; the sum is taken in fp32,
    from 4-bit weights de-quantized once, and then rounded to bf16. ``save_method="lora"``: the adapter alone.
    """
    check("save_pretrained_merged", others, SAVING)
    if loaded is not None and tokenizer in (None, loaded.tokenizer):
        tokenizer = loaded.processor or loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(f"save_pretrained_merged({str(save_directory)!r}) without a tokenizer. Give it.")
    base, adapter = unwrap(model)
    if save_method == "lora":
        if adapter is None:
            raise ConfigError("save_method='lora': the model has no adapter. Take 'merged_16bit'.")
        return adapter.save(tokenizer, save_directory, {})
    if save_method != "merged_16bit":
        why = (
            " Rounding the sum to 4 bits again would lose what was learned." if "4bit" in save_method else ""
        )
        raise ConfigError(
            f"save_method={save_method!r} is not supported.{why} Take 'merged_16bit' or 'lora'."
        )
    whole = plain_copy(base)
    if adapter is not None:
        with tempfile.TemporaryDirectory() as folder:
            adapter.save(tokenizer, Path(folder) / "adapter", {})
            whole = load_adapter(whole, Path(folder) / "adapter").merge_and_unload(safe_merge=True)
    return save(whole, tokenizer, save_directory, dtype=torch.bfloat16)


def push_to_hub_merged(
    model: Any,
    repo_id: str,
    tokenizer: Any = None,
    save_method: str = "merged_16bit",
    *,
    loaded: LoadedModel | None = None,
    commit_message: str = "Model trained with razona",
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    tags: str | Sequence[str] = (),
    **others: Any,
) -> Any:
    """What `save_pretrained_merged` writes, uploaded with a card to the repository ``repo_id`` as `razona
    push` does, in one commit; returns huggingface_hub's CommitInfo. HF_ENDPOINT says which hub. Raises
    HubError where the hub refuses it.
    """
    check("push_to_hub_merged", others, SAVING)
    tags = [tags] if isinstance(tags, str) else tags
    name = "" if loaded is None else loaded.name
    with tempfile.TemporaryDirectory() as folder:
        path = save_pretrained_merged(model, Path(folder) / "model", tokenizer, save_method, loaded=loaded)
        return upload(
            path,
            repo_id,
            lambda repo: model_card(path, None, repo, tags=tags, name=name),
            private=private,
            console=Console(),
            token=token,
            revision=revision,
            message=commit_message,
        ).commit


def _bound(loaded: LoadedModel, max_seq_length: int | None) -> None:
    """ConfigError where the model was not made for so many positions."""
    if max_seq_length is None:
        return
    limit = max_context(loaded.model)
    if limit is not None and max_seq_length > limit:
        raise ConfigError(
            f"max_seq_length={max_seq_length} is more than the {limit} positions that {loaded.name} was made "
            "for, and they are not stretched here. Give less, or take a model with a longer context."
        )
    _inner(loaded.model).max_seq_length = max_seq_length


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _part(targets: tuple[str, ...], attention: bool, mlp: bool) -> tuple[str, ...]:
    if targets:
        raise ConfigError(
            "target_modules, and finetune_attention_modules or finetune_mlp_modules=False: both say which "
            "layers get an adapter. Give one of them."
        )
    if not (attention or mlp):
        raise ConfigError(
            "finetune_attention_modules=False and finetune_mlp_modules=False: no layer is left to train."
        )
    return ATTENTION if attention else MLP


def _with_methods(model: Any, loaded: LoadedModel | None) -> Any:
    """``model``, with what Unsloth puts on it."""
    model.loaded_by_razona = loaded
    model.save_pretrained_merged = partial(save_pretrained_merged, model, loaded=loaded)
    model.push_to_hub_merged = partial(push_to_hub_merged, model, loaded=loaded)
    if hasattr(model, "peft_config"):
        model.save_pretrained = partial(_save_adapter, model)
    return model


def _save_adapter(model: Any, save_directory: str | Path, **options: Any) -> None:
    """peft's own, and a note of how the base was quantized."""
    type(model).save_pretrained(model, save_directory, **options)
    write_record(model, Path(save_directory))
