"""The SFT loop on a tiny model: exact trained tokens, an unchanging gradient, files, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import CHATS, ROWS, distance, lines, model_folder, run_sft, sft_config, weights

from razona.batch import Batch
from razona.build.model import load_model
from razona.config import DataConfig
from razona.data import build_demonstrations, load_rows
from razona.errors import CheckpointError, DataError
from razona.train import sft

TALKS = [{**row, "completion": f"It is {row['answer']}."} for row in CHATS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.mark.parametrize("rows", [None, TALKS], ids=["strings", "messages"])
def test_smoke(model: Path, tmp_path: Path, rows: Any) -> None:
    parts = {} if rows is None else {"rows": rows}
    result, printed = run_sft(sft_config(model, tmp_path / "run"), **parts)
    steps = lines(tmp_path / "run/metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3] and result["step"] == 3
    assert all(step["grad_norm"] > 0 and step["lr"] == 1e-3 for step in steps)
    assert "8 demonstrations" in printed and "done after step 3" in printed
    assert weights(tmp_path / "run") and not (tmp_path / "run/rollouts.jsonl").exists()


def test_the_loss_is_that_of_the_answer_and_its_stop_token(model: Path, tmp_path: Path) -> None:
    """Against transformers' own log-probs, token by token."""
    config = sft_config(model, tmp_path / "run", model__precision="fp32", run__num_steps=1, rows_per_step=8)
    run_sft(config, rows=TALKS)
    step = lines(tmp_path / "run/metrics.jsonl")[0]
    loaded = load_model(config.model, _console())
    found = build_demonstrations(
        load_rows(TALKS), loaded.tokenizer, DataConfig(), max_length=500, stop_token_ids=loaded.stop_token_ids
    )
    total, count = 0.0, 0
    for row, given in zip(found.demonstrations, TALKS, strict=True):
        trained = [
            token for token, is_trained in zip(row.token_ids, row.loss_mask, strict=True) if is_trained
        ]
        text = loaded.tokenizer.decode(trained)
        assert text.startswith(str(given["completion"])) and trained[-1] in loaded.stop_token_ids
        ids = torch.tensor([row.token_ids])
        with torch.no_grad():
            scores = loaded.model(ids).logits[0, :-1].log_softmax(-1)
        picked = scores.gather(1, ids[0, 1:, None])[:, 0][torch.tensor(row.loss_mask[1:])]
        total, count = total - picked.sum().item(), count + len(picked)
    assert step["trained_tokens"] == count
    assert step["loss"] == pytest.approx(total / count, rel=1e-5)


def _console() -> Any:
    import io

    from razona.run.console import Console

    return Console(file=io.StringIO())


def test_the_stop_token_is_trained_though_pad_is_the_same(model: Path, tmp_path: Path) -> None:
    """The tiny tokenizer has no pad token, so its end token pads; the model learns to end its answers."""
    config = sft_config(
        model, tmp_path / "run", run__num_steps=60, rows_per_step=8, optimizer__learning_rate=5e-3
    )
    run_sft(config, rows=[{"prompt": "a", "completion": "b"}] * 8)
    steps = lines(tmp_path / "run/metrics.jsonl")
    assert steps[0]["trained_tokens"] == 16 and steps[0]["loss"] > 2 and steps[-1]["loss"] < 0.05
    loaded = load_model(sft_config(tmp_path / "run/model", tmp_path).model, _console())
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id
    prompt = torch.tensor([loaded.tokenizer("a").input_ids])
    answer = loaded.model.generate(
        prompt, max_new_tokens=8, do_sample=False, eos_token_id=list(loaded.stop_token_ids)
    )
    assert loaded.tokenizer.decode(answer[0, 1:-1]) == "b" and answer[0, -1] in loaded.stop_token_ids


def test_the_micro_batch_budget_changes_nothing(model: Path, tmp_path: Path) -> None:
    for name, budget in (("all", 4096), ("few", 60), ("one", 1)):
        config = sft_config(
            model, tmp_path / name, model__precision="fp32", tokens_per_microbatch=budget, optimizer__eps=1e-3
        )
        run_sft(config, rows=TALKS)
    for name in ("few", "one"):
        assert distance(tmp_path / "all", tmp_path / name) < 1e-6
        for a, b in zip(
            lines(tmp_path / "all/metrics.jsonl"), lines(tmp_path / name / "metrics.jsonl"), strict=True
        ):
            assert a == pytest.approx(b, abs=1e-6, rel=1e-5)


def test_an_epoch_sees_every_row_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows, three a step: the third step ends one epoch and begins the next."""
    seen: list[tuple[int, ...]] = []
    original = sft.collate_demonstrations

    def spy(rows: Any) -> Batch:
        seen.extend(tuple(token_ids) for token_ids, _ in rows)
        return original(rows)

    monkeypatch.setattr(sft, "collate_demonstrations", spy)
    run_sft(sft_config(model, tmp_path / "run", run__num_steps=6), rows=TALKS)
    assert len(seen) == 18 and len(set(seen[:8])) == len(set(seen[8:16])) == 8
    assert seen[:8] != seen[8:16]


def test_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    result, printed = run_sft(sft_config(model, tmp_path / "run"), dry_run=True)
    assert result["dry_run"] and "nothing was trained or written" in printed and not list(tmp_path.iterdir())


def test_what_cannot_work_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'completion'.*--data\.completion-column"):
        run_sft(sft_config(model, tmp_path / "run"), rows=ROWS)
    assert not list(tmp_path.iterdir())
    run_sft(sft_config(model, tmp_path / "run"))
    again = {"run__resume": True, "run__num_steps": 4}
    with pytest.raises(CheckpointError, match=r"rows_per_step: it was 3 and is 2"):
        run_sft(sft_config(model, tmp_path / "run", **again, rows_per_step=2))
    with pytest.raises(CheckpointError, match=r"data_fingerprint: it was"):
        run_sft(sft_config(model, tmp_path / "run", **again), rows=TALKS)
    with pytest.raises(CheckpointError, match=r"num_steps: it was 3 and is 4"):
        run_sft(sft_config(model, tmp_path / "cosine", optimizer__schedule="cosine"))
        run_sft(sft_config(model, tmp_path / "cosine", **again, optimizer__schedule="cosine"))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_end_at_zero(model: Path, tmp_path: Path, schedule: str) -> None:
    config = sft_config(
        model, tmp_path / "run", run__num_steps=5, optimizer__schedule=schedule, optimizer__warmup_steps=2
    )
    run_sft(config)
    rates = [step["lr"] for step in lines(tmp_path / "run/metrics.jsonl")]
    assert rates[:3] == pytest.approx([0.5e-3, 1e-3, 1e-3])
    assert rates[2] > rates[3] > rates[4] > 0
