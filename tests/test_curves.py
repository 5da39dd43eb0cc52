"""Golden curves: five steps of a tiny fp32 model, which a refactor must leave as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import CHATS, grpo_config, lines, model_folder, run_grpo, run_sft, sft_config

GRPO = {
    "loss": [-0.032328, 0.001788, 0.024587, -0.034006, 0.060371],
    "reward": [0.449742, 0.518686, 0.574742, 0.353737, 0.532861],
    "grad_norm": [6.474713, 15.724378, 18.730914, 5.278626, 6.33495],
}
SFT = {
    "loss": [7.355899, 6.748952, 5.937433, 4.6148, 4.065434],
    "grad_norm": [23.353838, 21.144075, 15.301915, 15.596109, 14.592968],
}
TOLERANCE = 1e-4  # absolute, and relative where a figure is above 1: other processors round in another order


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


def curves(out: Path, names: tuple[str, ...]) -> dict[str, list[float]]:
    steps = lines(out / "metrics.jsonl")
    return {name: [round(step[name], 6) for step in steps] for name in names}


def test_grpo(model: Path, tmp_path: Path) -> None:
    """Two updates per rollout and a KL term: every part of the loss is in the figures."""
    config = grpo_config(
        model, tmp_path / "run", run__num_steps=5, model__precision="fp32", epochs_per_rollout=2,
        objective__kl_coef=0.1, optimizer__eps=1e-3,
    )  # fmt: skip
    run_grpo(config, rows=CHATS)
    found = curves(tmp_path / "run", ("loss", "reward", "grad_norm"))
    assert found == {
        name: pytest.approx(values, abs=TOLERANCE, rel=TOLERANCE) for name, values in GRPO.items()
    }


def test_sft(model: Path, tmp_path: Path) -> None:
    config = sft_config(
        model, tmp_path / "run", run__num_steps=5, model__precision="fp32", optimizer__eps=1e-3
    )
    run_sft(config, rows=[{**row, "completion": f"It is {row['answer']}."} for row in CHATS])
    found = curves(tmp_path / "run", ("loss", "grad_norm"))
    assert found == {
        name: pytest.approx(values, abs=TOLERANCE, rel=TOLERANCE) for name, values in SFT.items()
    }
