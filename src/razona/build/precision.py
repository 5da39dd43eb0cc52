"""`model.precision = "auto"`: the numbers that this machine is fast in."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from razona.build.device import choose_device
from razona.config import GRPOConfig, ModelConfig, SFTConfig
from razona.models.cpu.processor import bf16_is_fast, bf16_speed
from razona.run.folder import stored_config

NUMBERS = {
    "bf16": "bf16 compute, fp32 masters",
    "fp32": "fp32",
    "pure_bf16": "bf16 weights without fp32 masters",
}


def resolved(config: ModelConfig) -> ModelConfig:
    """``config`` with bf16 or fp32 in place of ``auto``."""
    if config.precision != "auto":
        return config
    fast = choose_device(config.device).type != "cpu" or bf16_is_fast()
    return replace(config, precision="bf16" if fast else "fp32")


Config = TypeVar("Config", GRPOConfig, SFTConfig)


def with_precision(config: Config) -> tuple[Config, str]:
    """``config`` with its precision `resolved`, and a line for the header: which, and why. A resumed run goes
    on in what it began with, whatever the machine."""
    asked = config.model
    if asked.precision != "auto":
        return config, f"{NUMBERS[asked.precision]}, as model.precision asks"
    stored = stored_config(config.run.output_dir) if config.run.resume else None
    began = stored["config"].get("model", {}).get("precision") if stored is not None else None
    if began in NUMBERS:
        model, why = replace(asked, precision=began), "as the run began"
    else:
        model, why = resolved(asked), _why(asked)
    return replace(config, model=model), f"{NUMBERS[model.precision]}: {why}"


def _why(config: ModelConfig) -> str:
    if choose_device(config.device).type != "cpu":
        return "the device is a GPU"
    speed = bf16_speed()
    if bf16_is_fast():
        return f"bf16 products are {speed:.1f} times as fast as fp32 ones here"
    return f"bf16 products take {1 / speed:.1f} times as long as fp32 ones here"
