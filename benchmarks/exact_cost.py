"""What bit-for-bit agreement of sampler and trainer costs: steps with and without it, in turn."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from cases import CASES

from razona.batch import collate
from razona.build.model import load_model, make_engine, make_policy
from razona.config import DataConfig, ModelConfig, OptimizerConfig
from razona.config.common import BUNDLED_MODEL
from razona.data import build_prompts, load_rows
from razona.engines import native
from razona.losses.weights import masked_sum, per_token
from razona.models import flat
from razona.models.scorer import FlatScorer
from razona.run.console import Console
from razona.types import Sampling


@contextmanager
def inexact() -> Iterator[None]:
    """No common padding, no repeated query rows."""
    with (
        patch.object(FlatScorer, "exact", False),
        patch.object(flat, "MIN_QUERY_ROWS", 1),
        patch.object(native, "MIN_QUERY_ROWS", 1),
        patch.object(flat, "KV_STEP", 1),
        patch.object(flat, "kv_step", lambda: 1),
    ):
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=BUNDLED_MODEL)
    parser.add_argument("--case", default="G=8x128", choices=sorted(CASES))
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    case = CASES[options.case]
    console = Console()
    loaded = load_model(ModelConfig(name=options.model), console)
    policy = make_policy(loaded, ModelConfig(), OptimizerConfig(), total_updates=1)
    engine = make_engine(policy, loaded, console)
    engine.stop_token_ids = ()  # type: ignore[attr-defined]
    rows = load_rows([{"prompt": prompt} for prompt in case.prompts])
    prompts = build_prompts(rows, loaded.tokenizer, DataConfig()).prompts
    sampling = Sampling(group_size=case.group_size, max_completion_length=case.length)

    def step(seed: int) -> tuple[float, float]:
        start = time.perf_counter()
        seeds = [[seed + 100 * p + g for g in range(case.group_size)] for p in range(len(prompts))]
        batch = collate(engine.generate(prompts, sampling, seeds=seeds)).weighted(per_token)
        different = 0.0
        for micro in batch.split(0):
            logprobs = policy.logprobs(micro, temperature=1.0)
            masked_sum(logprobs, micro.weights).backward()  # type: ignore[arg-type]
            different += float((logprobs.detach() != micro.sampler_logprobs)[micro.loss_mask].sum())
        policy.optimizer.zero_grad()
        return time.perf_counter() - start, 1.0 - different / batch.num_tokens

    torch.set_num_threads(2)
    times: dict[str, list[float]] = {"exact": [], "inexact": []}
    shares: dict[str, float] = {}
    for repeat in range(options.repeats + 1):
        for name in times:
            with inexact() if name == "inexact" else patch.object(native, "MIN_QUERY_ROWS", 4):
                seconds, shares[name] = step(1000 * repeat)
            if repeat:  # the first one warms up
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        share = f"share of identical log-probs {shares[name]:.4f}"
        print(f"{name:<8} {value:6.2f} s for sampling and gradient, {share}")
    print(f"being exact costs {medians['exact'] / medians['inexact'] - 1:+.1%}")


if __name__ == "__main__":
    main()
