"""razona: post-training of language models whose whole route can be read in one page, ``razona.train.grpo``.

Public names load on first use, so that ``import razona`` costs no torch.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# OpenMP threads that spin through every pause make decoding up to 60 times slower beside one busy neighbour
# process. libgomp reads this once, when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from razona.config import (
        DataConfig as DataConfig,
        DifficultyConfig as DifficultyConfig,
        DynamicSamplingConfig as DynamicSamplingConfig,
        EvalConfig as EvalConfig,
        GRPOConfig as GRPOConfig,
        ImportanceConfig as ImportanceConfig,
        LoRAConfig as LoRAConfig,
        ModelConfig as ModelConfig,
        ObjectiveConfig as ObjectiveConfig,
        OptimizerConfig as OptimizerConfig,
        PassRule as PassRule,
        RunConfig as RunConfig,
        SFTConfig as SFTConfig,
        SFTEvalConfig as SFTEvalConfig,
    )
    from razona.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DataError as DataError,
        DifficultyError as DifficultyError,
        HubError as HubError,
        ModelError as ModelError,
        RazonaError as RazonaError,
        RewardError as RewardError,
    )
    from razona.types import (
        Completion as Completion,
        Group as Group,
        Prompt as Prompt,
        Sampling as Sampling,
    )

_PUBLIC = {
    "razona.config": (
        "DataConfig DifficultyConfig EvalConfig GRPOConfig ImportanceConfig LoRAConfig ModelConfig "
        "ObjectiveConfig OptimizerConfig DynamicSamplingConfig PassRule RunConfig SFTConfig SFTEvalConfig"
    ),
    "razona.errors": (
        "CheckpointError ConfigError DataError DifficultyError HubError ModelError RazonaError RewardError"
    ),
    "razona.types": "Completion Group Prompt Sampling",
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'razona' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
