"""Unsloth's arguments that razona has no use for, or cannot honour. docs/one-gpu.md is held to these tables.

One that is "not needed" may have any value, and changes nothing, for the reason given. One that is "not
supported" is refused with its text when it is set to anything but its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from razona.errors import ConfigError, nearest


class Argument(NamedTuple):
    """``default`` is that of a refused one; ``text``: why it is not needed, or what to do instead."""

    refused: bool
    text: str
    default: Any = None


def not_needed(text: str) -> Argument:
    return Argument(False, text)


def refused(default: Any, text: str) -> Argument:
    return Argument(True, text, default)


ONLY_VLLM = "an option of vLLM, which is off"
ONE_DEVICE = "one process, one device"
ONLY_4BIT = "leave it out: weights are in 4 bits (load_in_4bit) or in bf16"

LOADING: dict[str, Argument] = {
    "fast_inference": refused(
        False, "there is no vLLM engine yet: leave it out, the trained model itself samples"
    ),
    "load_in_8bit": refused(False, ONLY_4BIT),
    "load_in_fp8": refused(False, ONLY_4BIT),
    "qat_scheme": refused(None, ONLY_4BIT),
    "float8_kv_cache": refused(False, "leave it out: keys and values are in the dtype of the model"),
    "rope_scaling": refused(None, "leave it out: positions are not stretched; take a model made for more"),
    "resize_model_vocab": refused(None, "leave it out: the vocabulary stays as it is"),
    "revision": refused(None, "download it (hf download NAME --revision ... --local-dir DIR), and give DIR"),
    "token": refused(None, "leave it out, and log in with `hf auth login` or set HF_TOKEN"),
    "attn_implementation": refused(None, "leave it out: attention shares prompts here, and is razona's own"),
    "offload_embedding": refused(False, "leave it out: the model stays on one device"),
    "unsloth_tiled_mlp": refused(
        False, "set gradient_checkpointing and tokens_per_microbatch to save memory"
    ),
    "float32_mixed_precision": refused(None, "leave it out: bf16 of the trainer's configuration says it"),
    "max_lora_rank": not_needed(ONLY_VLLM),
    "gpu_memory_utilization": not_needed(ONLY_VLLM),
    "disable_log_stats": not_needed(ONLY_VLLM),
    "use_gradient_checkpointing": not_needed("gradient_checkpointing of the trainer's configuration says it"),
    "random_state": not_needed("nothing is drawn while loading; get_peft_model has its own"),
    "fix_tokenizer": not_needed("a pad token is always there, and stop tokens are known"),
    "use_exact_model_name": not_needed("names are always taken as they are"),
}

ADAPTING: dict[str, Argument] = {
    "lora_dropout": refused(0, "set it to 0: sampler and trainer must be the same model"),
    "bias": refused("none", 'set it to "none": biases are the base\'s'),
    "layers_to_transform": refused(None, "leave it out: all layers get one"),
    "layers_pattern": refused(None, "leave it out: all layers get one"),
    "modules_to_save": refused(None, "leave it out: what is not LoRA stays as it is"),
    "target_parameters": refused(None, "leave it out: LoRA is on linear layers"),
    "init_lora_weights": refused(True, "leave it out: A is drawn at random, B is 0"),
    "loftq_config": refused(None, "leave it out: the base is not changed to suit the adapter"),
    "qat_scheme": refused(None, "leave it out: the adapter is in fp32"),
    "ensure_weight_tying": refused(False, "leave it out: embeddings and head have no adapter"),
    "finetune_language_layers": refused(True, "leave it out: the language model is what is trained"),
    "use_gradient_checkpointing": not_needed("gradient_checkpointing of the trainer's configuration says it"),
    "max_seq_length": not_needed("from_pretrained's counts"),
    "temporary_location": not_needed("nothing is put aside"),
}

SAVING: dict[str, Argument] = {
    "push_to_hub": refused(False, "call push_to_hub_merged"),
    "state_dict": refused(None, "leave it out: it is the model's"),
    "variant": refused(None, "leave it out: plain from_pretrained would not find the file"),
    "tags": refused(None, "give them to push_to_hub_merged: they stand in the card"),
    "commit_description": refused(None, "leave it out: the card says what the model is"),
    "create_pr": refused(False, "leave it out, and give revision=, a branch, to open one from"),
    "safe_serialization": refused(True, "leave it out: weights are safetensors, always"),
    "max_shard_size": refused("5GB", "leave it out: transformers cuts large models"),
    "is_main_process": not_needed(ONE_DEVICE),
    "save_function": not_needed("there is one way to write a model"),
    "save_peft_format": not_needed("an adapter's folder is always peft's"),
    "use_temp_dir": not_needed("the upload always comes from a temporary folder"),
    "temporary_location": not_needed("nothing is put aside"),
    "maximum_memory_usage": not_needed("the sum is taken in fp32 in the machine's memory"),
}


def check(call: str, given: Mapping[str, Any], table: Mapping[str, Argument]) -> None:
    """ConfigError for an argument that cannot be honoured, TypeError for one that Unsloth does not have."""
    for name, value in given.items():
        if name not in table:
            raise TypeError(f"{call} has no argument '{name}'.{nearest(name, table)}")
        argument = table[name]
        if argument.refused and value != argument.default and value not in (None, {}):
            raise ConfigError(f"{call}({name}={value!r}) is not supported: {argument.text}.")
