"""Trainers of razona.trl on a tiny model: the name resolution leads to it, whatever the name."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model, tiny_tokenizer
from tiny_runs import ROWS, STOPS, varied

from razona.config import BUNDLED_MODEL
from razona.models import HubSilent, save
from razona.models.resolve import Source
from razona.run.console import Console
from razona.trl import GRPOConfig, GRPOTrainer

SMALL: dict[str, Any] = {
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 8,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "gradient_checkpointing": False,
}


def tiny_folder(folder: Path) -> Path:
    """A tiny model whose completions are short and of unequal lengths."""
    model = tiny_model("llama", max_position_embeddings=1024)
    model.generation_config.eos_token_id = [2, *STOPS]
    return save(model, tiny_tokenizer(), folder)


def no_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the bundled model is there, and it is the tiny one; and folders."""

    def resolve(name: str, *, trust_remote_code: bool = False) -> Source:
        if name == BUNDLED_MODEL or Path(name).is_dir():
            return Source(folder if name == BUNDLED_MODEL else Path(name))
        raise HubSilent(f"'{name}' is not in the local hub cache, and the hub is switched off.")

    monkeypatch.setattr(sys.modules["razona.models.load"], "resolve", resolve)  # load is also a function


def trainer(
    folder: Path, out: Path, *, fields: dict[str, Any] | None = None, **arguments: Any
) -> GRPOTrainer:
    """On ``ROWS`` with the reward `varied`; the console writes to ``trainer.printed``."""
    printed = io.StringIO()
    args = GRPOConfig(output_dir=str(out), **{**SMALL, **(fields or {})})
    given = {"reward_funcs": varied, "train_dataset": ROWS, **arguments}
    made = GRPOTrainer(str(folder), args=args, console=Console(file=printed), **given)
    made.printed = printed
    return made
