"""Runs of tiny models in a few seconds: folders, rows, rewards, configurations."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiny_models import tiny_model, tiny_tokenizer

from razona.config import GRPOConfig, SFTConfig
from razona.config.load import merge
from razona.models import save
from razona.run.console import Console
from razona.train import grpo, sft

ROWS = [{"prompt": f"Count {'on and ' * (i % 4)}to {i}:", "answer": str(i)} for i in range(8)]
CHATS = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
STOPS = tuple(range(20, 36))  # tokens that also end a completion: lengths become unequal

# In bf16 whatever the processor is fast in: what is tested is what the model computes, not how fast.
GRPO_TABLE: dict[str, Any] = {
    "model": {"precision": "bf16"},
    "sampling": {"group_size": 4, "max_completion_length": 12, "stop_token_ids": list(STOPS)},
    "optimizer": {"learning_rate": 1e-3},
    "run": {"num_steps": 2, "print_every": 0},
    "prompts_per_step": 4,
}
SFT_TABLE: dict[str, Any] = {
    "model": {"precision": "bf16"},
    "optimizer": {"learning_rate": 1e-3},
    "run": {"num_steps": 3, "print_every": 0},
    "rows_per_step": 3,
}


def varied(*, completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within nearly every group."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def even(*, completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of even token ids: half, by chance."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def model_folder(folder: Path, arch: str = "llama") -> Path:
    """A tiny model with its tokenizer, on disk."""
    return save(tiny_model(arch), tiny_tokenizer(), folder)


def nested(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with dotted keys changed: ``nested({}, {"run.seed": 1})`` is ``{"run": {"seed": 1}}``."""
    out = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    for dotted, value in changes.items():
        *tables, key = dotted.split(".")
        table = out
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value
    return out


def grpo_config(model: Path, out: Path, **changes: Any) -> GRPOConfig:
    """Changes are spelled with two underscores for a dot: ``run__seed=1``."""
    given = {"model.name": str(model), "run.output_dir": str(out)}
    given |= {name.replace("__", "."): value for name, value in changes.items()}
    return merge(GRPOConfig(), nested(GRPO_TABLE, given))


def sft_config(model: Path, out: Path, **changes: Any) -> SFTConfig:
    given = {"model.name": str(model), "run.output_dir": str(out)}
    given |= {name.replace("__", "."): value for name, value in changes.items()}
    return merge(SFTConfig(), nested(SFT_TABLE, given))


def run_grpo(config: GRPOConfig, **parts: Any) -> tuple[dict[str, Any], str]:
    """The result, and what was printed. ``rows`` and ``reward_fns`` have defaults."""
    out = io.StringIO()
    parts = {"rows": ROWS, "reward_fns": [varied], **parts}
    return grpo.run(config, console=Console(file=out), **parts), out.getvalue()


def run_sft(config: SFTConfig, **parts: Any) -> tuple[dict[str, Any], str]:
    out = io.StringIO()
    parts = {"rows": [{**row, "completion": f" {row['answer']}, done."} for row in ROWS], **parts}
    return sft.run(config, console=Console(file=out), **parts), out.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def weights(out: Path) -> dict[str, Any]:
    """What the run's model folder holds, as fp32 tensors."""
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in load_file(out / "model" / "model.safetensors").items()}


def distance(a: Path, b: Path) -> float:
    """The largest difference of two runs' weights."""
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a run that must be the same byte for byte."""
    names = ("metrics.jsonl", "rollouts.jsonl", "model/model.safetensors")
    return {name: (out / name).read_bytes() for name in names if (out / name).exists()}
