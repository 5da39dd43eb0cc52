"""razona's GRPO step, timed: the loop of `razona.train.grpo` at its defaults, without stop tokens."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from cases import CASES, LORA_ALPHA, Case, reward
from child import StepClock, arguments, report

from razona.build.model import load_model, make_engine, make_policy
from razona.config import DataConfig, GRPOConfig, ModelConfig, RunConfig
from razona.config.common import LoRAConfig
from razona.data import PromptSource, build_prompts, load_rows
from razona.objective import grpo
from razona.policy import Policy
from razona.rewards import bind
from razona.run.console import Console
from razona.run.folder import RunFolder
from razona.train.grpo import Parts, train
from razona.types import Engine, Group, Prompt, Sampling


class Measured(Exception):
    """Enough steps have been seen: the loop is left before its closing checkpoint."""


class TimedEngine:
    """An engine whose `load_weights`, the first thing of a step, starts the clock."""

    def __init__(self, engine: Engine, clock: StepClock) -> None:
        self.engine = engine
        self.clock = clock
        self.groups: list[Group] = []

    def load_weights(self, policy: Policy, *, version: int) -> None:
        self.clock.start_step()
        self.engine.load_weights(policy, version=version)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seeds: Sequence[Sequence[int]]
    ) -> list[Group]:
        self.groups = self.engine.generate(prompts, sampling, seeds=seeds)
        return self.groups

    def close(self) -> None:
        self.engine.close()


class TimedLog(RunFolder):
    """A run folder that stops the clock when a step's timings come in, the last thing of a step."""

    def __init__(self, path: str, clock: StepClock, steps: int) -> None:
        super().__init__(path)
        self.clock = clock
        self.steps = steps

    def log_timings(self, step: int, seconds: Mapping[str, float]) -> None:
        super().log_timings(step, seconds)
        self.clock.end_step()
        measured = self.clock.steps[-1]
        for phase in ("generate", "reward", "train"):
            measured[phase] = seconds[phase]
            measured["optimizer"] -= seconds[phase]  # what is left: update, metrics, files
        if step == self.steps:
            raise Measured


def config_for(case: Case, model: str, steps: int, output_dir: str, *, lora: int) -> GRPOConfig:
    return GRPOConfig(
        model=ModelConfig(name=model),
        data=DataConfig(),
        sampling=Sampling(group_size=case.group_size, max_completion_length=case.length),
        run=RunConfig(output_dir=output_dir, num_steps=steps + 1, print_every=0),  # one is never run
        prompts_per_step=len(case.questions),
        lora=LoRAConfig(r=lora, alpha=LORA_ALPHA),
    )


def score(completions: list[Any], **columns: Any) -> list[float]:
    return reward([messages[0]["content"] for messages in completions])


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    case, clock, console = CASES[options.case], StepClock(), Console(json_mode=True)
    steps = options.steps + 1
    with tempfile.TemporaryDirectory() as folder:
        config = config_for(case, options.model, steps, folder, lora=options.lora)
        loaded = load_model(config.model, console, lora=config.lora)
        loaded = replace(loaded, stop_token_ids=())  # lengths are forced
        policy = make_policy(loaded, config.model, config.optimizer, total_updates=steps)
        rows = load_rows([{"prompt": prompt} for prompt in case.prompts])
        prompts = build_prompts(rows, loaded.tokenizer, config.data).prompts
        engine = TimedEngine(make_engine(policy, loaded, console), clock)
        parts = Parts(
            policy=policy,
            reference=None,
            engine=engine,
            source=PromptSource(prompts, seed=0),
            rewards=bind([score], columns=rows.columns),
            dynamic_sampling=None,
            evaluator=None,
            log=TimedLog(folder, clock, steps),
        )
        with contextlib.suppress(Measured):
            train(config, grpo(), parts, console)
    lengths = [len(completion.token_ids) for group in engine.groups for completion in group.completions]
    report(clock, [len(group.prompt.token_ids) for group in engine.groups], lengths)


if __name__ == "__main__":
    main()
