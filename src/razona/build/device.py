"""Where a model computes."""

from __future__ import annotations

import torch

from razona.errors import ConfigError


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
