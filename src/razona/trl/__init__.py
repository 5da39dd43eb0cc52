"""TRL's names on razona's loops: change ``from trl import`` to ``from razona.trl import``.

Defaults are those of TRL 1.16.0. Every field of its configurations is in docs/from-trl.md.
"""

from razona.trl.args import GRPOConfig, SFTConfig
from razona.trl.grpo import GRPOTrainer
from razona.trl.sft import SFTTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "SFTConfig", "SFTTrainer"]
