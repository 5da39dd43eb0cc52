"""A model handed in is given back as it was, however a run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_runs import grpo_config, run_grpo, run_sft, sft_config

from razona.config import OptimizerConfig
from razona.errors import CheckpointError, ConfigError
from razona.models import from_model
from razona.policy import Policy


def as_it_is(model: Any) -> tuple[Any, ...]:
    patched = [name for name, module in model.named_modules() if "forward" in vars(module)]
    dtypes = {p.dtype for p in model.parameters()}
    return patched, dtypes, model.config._attn_implementation, model.training


@pytest.mark.parametrize("run, config", [(run_grpo, grpo_config), (run_sft, sft_config)])
@pytest.mark.parametrize("how", ["dry run", "the folder is taken", "trained"])
def test_whatever_becomes_of_the_run(run: Any, config: Any, how: str, tmp_path: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    before = as_it_is(model)
    assert before[0] == [] and before[1] == {torch.float32}
    loaded = from_model(model, tiny_tokenizer(), "tiny")
    wanted = config(tmp_path, tmp_path / "run", run__num_steps=1)
    if how == "the folder is taken":
        (tmp_path / "run").mkdir()
        (tmp_path / "run/metrics.jsonl").write_text("")
        with pytest.raises(ConfigError, match="already holds a run"):
            run(wanted, model=loaded)
    else:
        run(wanted, model=loaded, dry_run=how == "dry run")
    assert as_it_is(model) == before


def test_a_vocabulary_smaller_than_the_probe_s_prompt() -> None:
    policy = Policy(tiny_model(vocab_size=5), tiny_tokenizer(), optimizer=OptimizerConfig())
    assert policy.scorer.shares_prefixes


@pytest.mark.parametrize("text", ["{", "[]", '{"config": 3}'])
def test_a_config_that_no_run_wrote(text: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(text)
    wanted = grpo_config(tmp_path, tmp_path / "run", run__resume=True, model__precision="auto")
    with pytest.raises(CheckpointError, match="not what a run writes"):
        run_grpo(wanted, model=from_model(tiny_model(), tiny_tokenizer(), "tiny"))
