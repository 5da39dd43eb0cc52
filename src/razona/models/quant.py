"""4-bit weights under an adapter: NF4 of bitsandbytes, as in QLoRA (arXiv 2305.14314).

A quantized layer holds half a byte per weight. Trainer and sampler multiply by the same de-quantized weight,
in the dtype of what comes in, with the kernels of a plain linear layer: so in bf16 on a CPU they agree bit
for bit here too. Nothing of it is kept for the backward pass, which de-quantizes again.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from razona.errors import ModelError
from razona.models.cpu.processor import linear
from razona.models.save import quiet

# On import it warns that a kernel of its own, which is not used here, cannot be downloaded.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
"""QLoRA's settings: 16 values, quantiles of a normal distribution, a scale per 64 weights, in 8 bits."""
RECORD = "base_quantization.json"
"""In an adapter's folder, the settings its base was quantized with: peft has no place for them."""


def quantized_layers(model: nn.Module) -> dict[str, Any]:
    """The 4-bit layers of ``model`` by name; empty without bitsandbytes."""
    library = sys.modules.get("bitsandbytes")
    if library is None:
        return {}
    return {name: m for name, m in model.named_modules() if isinstance(m, library.nn.Linear4bit)}


def check_quantized(name: str, config: Any) -> bool:
    """Whether the weights that ``config`` belongs to are in 4 bits already. Raises ModelError for another
    quantization, and where bitsandbytes is missing.
    """
    found = getattr(config, "quantization_config", None)
    settings = found if found is None or isinstance(found, dict) else found.to_dict()
    method = settings and settings.get("quant_method")
    if settings is None or method == "gguf":
        return False
    if method != "bitsandbytes" or not settings.get("load_in_4bit"):
        raise ModelError(
            f"The weights of '{name}' are quantized ({getattr(method, 'value', method)}), and updates cannot "
            "be written into them. Give the model they were made from; --load-in-4bit reads that in 4 bits."
        )
    check_installed(name)
    return True


def check_installed(name: str) -> None:
    """ModelError where 4-bit weights cannot be made or read."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            f"'{name}' in 4 bits needs the package bitsandbytes, which is not installed: "
            "pip install 'razona[quant]'. Or leave 4 bits out (load_in_4bit)."
        )


def settings_for(auto: Any, config: Any, settings: Mapping[str, Any], *, trust_remote_code: bool) -> Any:
    """``settings`` as transformers takes them, for the linear layers of the decoder alone: the head runs on
    its own weight, and the towers of a multimodal model stay as they are.
    """
    with torch.device("meta"):
        empty = auto.from_config(config, trust_remote_code=trust_remote_code)
    inside = {*empty.get_decoder().modules()} - {empty.get_output_embeddings()}
    linear = (nn.Linear, Conv1D)
    outside = [n for n, m in empty.named_modules() if isinstance(m, linear) and m not in inside]
    return BitsAndBytesConfig(**{"llm_int8_skip_modules": outside, **settings})


def made_ready(name: str, model: Any) -> list[str]:
    """Gives 4-bit layers the forward pass of `QuantizedForward`; a line about those that had it not yet.

    Raises ModelError for a quantized head, and for weights that bitsandbytes has repacked for inference.
    """
    layers = quantized_layers(model)
    if model.get_output_embeddings() in layers.values():
        raise ModelError(
            f"The output head of '{name}' is in 4 bits too, and it is run on scored positions only, by its "
            "own weight. Quantize without it: llm_int8_skip_modules=['lm_head']."
        )
    found = [layer for layer in layers.values() if "forward" not in vars(layer)]
    for layer in found:
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            raise ModelError(
                f"'{name}' has generated on a CPU already, for which bitsandbytes rounds the scales of 4-bit "
                "weights. Load the model anew, and hand it in before it generates."
            )
        layer.__dict__["forward"] = QuantizedForward(layer)  # before the class's own
    if not found:
        return []
    kinds = "/".join(sorted({layer.weight.quant_state.quant_type.upper() for layer in found}))
    held = sum(nbytes(layer) for layer in found) / 1e6
    plain = sum(2 * size_of(layer.weight) for layer in found) / 1e6
    return [
        f"{name}: {len(found)} linear layers in 4 bits ({kinds}), frozen: {held:.3g} MB; in bf16 they would "
        f"be {plain:.3g} MB."
    ]


def refuse_frozen(name: str, model: Any) -> None:
    """ModelError for a model in 4 bits without an adapter, which a training loop was given."""
    if quantized_layers(model) and not hasattr(model, "peft_config"):
        raise ModelError(
            f"'{name}' is in 4 bits and has no adapter: there is nothing to train. A 4-bit weight has 16 "
            "values, and an update is far smaller than the distance between two. Train an adapter on it: "
            "--lora.r 16 (lora.r = 16); or leave load_in_4bit out."
        )


def return_freed(model: nn.Module) -> None:
    """Lets go of what reading has left behind: the file, on which weights that are not quantized are windows,
    and freed memory that the allocator keeps. Both are larger than the model is now.
    """
    for parameter in model.parameters():
        if not hasattr(parameter, "quant_state"):
            parameter.data = parameter.data.clone()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)


def size_of(parameter: nn.Parameter) -> int:
    """Weights in ``parameter``: of a 4-bit one, more than elements."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(torch.Size(state.shape).numel())


def nbytes(layer: Any) -> int:
    """Bytes of a 4-bit layer's weight, scales included."""
    state = layer.weight.quant_state
    scales = [state.absmax, *([state.state2.absmax] if state.nested else [])]
    return sum(t.numel() * t.element_size() for t in (layer.weight, *scales))


def dequantized(layer: Any, dtype: torch.dtype) -> Tensor:
    """The weight ``[out, in]`` of a 4-bit layer. The one in bf16 is that in fp32, rounded."""
    from bitsandbytes.functional import dequantize_blockwise

    state = layer.weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    shape = list(state.shape)
    if (
        shape[-1] % state.blocksize
    ):  # its blocks go on over the ends of rows, and its CPU kernel thinks otherwise
        shape = [size_of(layer.weight)]
    weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        layer.weight.data, scales.float(), state.blocksize, state.quant_type, shape, dtype
    )
    return weight.view(*state.shape)


class QuantizedForward:
    """The forward pass of a 4-bit layer: a plain linear layer with its de-quantized weight."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = _Linear.apply(x, self.layer.bias, self.layer)  # type: ignore[no-untyped-call]
        return result


class _Linear(torch.autograd.Function):
    """``x W^T + b``; dx = g W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: Any) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        return linear(x, dequantized(layer, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        _, has_bias, _ = ctx.needs_input_grad
        grad_bias = grad.flatten(0, -2).sum(0) if has_bias else None
        return grad @ dequantized(ctx.layer, grad.dtype), grad_bias, None


def plain_copy(model: Any) -> Any:
    """``model``, the base of a `peft.PeftModel` too, as a plain one in fp32: 4-bit weights de-quantized once,
    what an adapter has added left out. The model itself stays as it is.
    """
    layers = {f"{name}.weight": layer for name, layer in quantized_layers(model).items()}
    saved, state = model.state_dict().keys(), {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in layers:
            weight = dequantized(layers[name], torch.float32)
            tensor = weight.T if getattr(layers[name], "source_cls", None) is Conv1D else weight
        elif name not in saved or ".lora_" in name or ".modules_to_save." in name:
            continue
        plain = name.replace(".base_layer", "").replace(".original_module", "")
        state[plain] = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else None)
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with quiet():
        made, report = type(model).from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    made.generation_config = copy.deepcopy(model.generation_config)
    return made


def write_record(model: Any, folder: Path) -> None:
    """Notes in an adapter's ``folder`` how its base was quantized, where it was."""
    if quantized_layers(model):
        found = model.config.quantization_config
        settings = found if isinstance(found, dict) else found.to_dict()
        text = json.dumps({key: settings[key] for key in NF4}, indent=2)
        (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """What `write_record` wrote; None where it wrote nothing."""
    path = folder / RECORD
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None  # type: ignore[no-any-return]
