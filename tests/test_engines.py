"""The engine contract, on every engine; and that it catches engines that break it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import in_bf16
from tiny_models import ARCHITECTURES, tiny_model, tiny_tokenizer
from tiny_runs import grpo_config, lines, model_folder, run_grpo

from razona.batch import collate
from razona.build.model import make_engine
from razona.config import OptimizerConfig
from razona.engines.fake import FakeEngine
from razona.engines.hf import HFEngine
from razona.engines.native import NativeEngine
from razona.engines.sampling import draw, truncate
from razona.engines.testing import BUDGET, check_engine
from razona.errors import ModelError
from razona.models import from_model
from razona.models.flat import padded_length
from razona.policy import Policy
from razona.run.console import Console
from razona.types import Completion, Engine, Group, Prompt, Sampling

WORDS = ("yes", "no", "maybe", "so", "</s>")
LOGITS = (0.3, 1.0, -0.4, 0.0, -1.0)
STOP = 4


def policy_of(arch: str = "llama", precision: str = "fp32", **changes: Any) -> Policy:
    return Policy(
        tiny_model(arch, **changes), tiny_tokenizer(), optimizer=OptimizerConfig(), precision=precision
    )


def prompts_of(*lengths: int) -> list[Prompt]:
    chance = random.Random(0)
    ids = [tuple(chance.randrange(5, 195) for _ in range(length)) for length in lengths]
    return [Prompt(id=10 + i, input="?", token_ids=tokens, columns={}) for i, tokens in enumerate(ids)]


def scores_of(policy: Policy) -> Callable[[Prompt, tuple[int, ...]], list[float]]:
    """The trainer's pass as a scorer, padded as the sampler pads."""

    def scores(prompt: Prompt, token_ids: tuple[int, ...]) -> list[float]:
        completion = Completion(token_ids, (0.0,) * len(token_ids), "", "length", 0)
        group = Group(prompt, (completion,), padded_length(len(prompt.token_ids) + BUDGET))
        with torch.no_grad():
            found: list[float] = policy.logprobs(collate([group]), temperature=1.0)[0].tolist()
        return found

    return scores


def likely_token(policy: Policy, prompts: Sequence[Prompt]) -> int:
    """A token this model says often: tiny random models hardly ever say their own end token."""
    engine = NativeEngine(policy, stop_token_ids=())
    groups = engine.generate(prompts, Sampling(max_completion_length=32), seeds=[range(16)] * len(prompts))
    said = [token for group in groups for c in group.completions for token in c.token_ids]
    return max(set(said), key=lambda token: (said.count(token), token))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_native_engine_keeps_the_contract(arch: str) -> None:
    policy, prompts = policy_of(arch), prompts_of(5, 17, 9)
    stop = likely_token(policy, prompts)
    engine = NativeEngine(policy, stop_token_ids=[stop])
    check_engine(engine, prompts, stop_token_id=stop, policy=policy, logprobs=scores_of(policy))


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2", "gpt_neox", "opt"])
def test_native_engine_in_bf16_equals_the_trainer_bit_for_bit(arch: str) -> None:
    policy, prompts = policy_of(arch, "bf16"), prompts_of(5, 17, 9)
    stop = likely_token(policy, prompts)
    engine = NativeEngine(policy, stop_token_ids=[stop])
    check_engine(engine, prompts, stop_token_id=stop, policy=policy, logprobs=scores_of(policy), **in_bf16())


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_hf_engine_keeps_the_contract(arch: str) -> None:
    policy, prompts = policy_of(arch), prompts_of(5, 9)
    stop = likely_token(policy, prompts)
    engine = HFEngine(policy, stop_token_ids=[stop])
    check_engine(engine, prompts, stop_token_id=stop, policy=policy, logprobs=scores_of(policy))


def fake_scores(prompt: Prompt | None, token_ids: tuple[int, ...]) -> list[float]:
    return torch.tensor(LOGITS).log_softmax(-1)[list(token_ids)].tolist()


def rescored(completion: Completion) -> Completion:
    return replace(completion, logprobs=tuple(fake_scores(None, completion.token_ids)))


def lowered(completion: Completion) -> Completion:
    return replace(completion, logprobs=tuple(x - 0.01 for x in completion.logprobs))


def test_fake_engine_keeps_the_contract() -> None:
    engine = FakeEngine(WORDS, stop_token_ids=[STOP], logits=LOGITS)
    check_engine(
        engine, prompts_of(1, 2, 3), stop_token_id=STOP, policy=object(), logprobs=fake_scores, exact=True
    )


def test_native_engine_equals_hf_engine_token_for_token() -> None:
    """In fp32, with unequal lengths, several prompts, every truncation."""
    policy, prompts = policy_of("llama"), prompts_of(3, 40, 11)
    stop = likely_token(policy, prompts)
    seeds = [[100 * p + g for g in range(4)] for p in range(3)]
    for options in (
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"temperature": 0.0},
    ):
        sampling = Sampling(max_completion_length=40, **options)
        native, hf = (
            engine(policy, stop_token_ids=[stop]).generate(prompts, sampling, seeds=seeds)
            for engine in (NativeEngine, HFEngine)
        )
        for a, b in zip(native, hf, strict=True):
            for x, y in zip(a.completions, b.completions, strict=True):
                assert (x.token_ids, x.text, x.finish_reason) == (y.token_ids, y.text, y.finish_reason)
                assert x.logprobs == pytest.approx(y.logprobs, abs=1e-4)


def test_rows_that_do_not_fit_in_memory_are_sampled_in_waves() -> None:
    policy, prompts = policy_of("llama"), prompts_of(5, 9, 3, 30)
    seeds = [[p, p + 50] for p in range(4)]
    sampling = Sampling(max_completion_length=16)
    at_once = NativeEngine(policy, stop_token_ids=()).generate(prompts, sampling, seeds=seeds)
    in_waves = NativeEngine(policy, stop_token_ids=(), kv_bytes=1).generate(prompts, sampling, seeds=seeds)
    assert [g.prompt for g in in_waves] == prompts
    for a, b in zip(at_once, in_waves, strict=True):
        assert [c.token_ids for c in a.completions] == [c.token_ids for c in b.completions]


def test_native_engine_refuses_a_model_it_cannot_run() -> None:
    from transformers import AutoModelForCausalLM, BloomConfig

    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=200, hidden_size=32, n_layer=1, n_head=2))
    policy = Policy(model, tiny_tokenizer(), optimizer=OptimizerConfig(), precision="fp32")
    with pytest.raises(ModelError, match=r"cannot run BloomForCausalLM.*cannot be shared.*sampling\.engine"):
        NativeEngine(policy, stop_token_ids=())
    loaded, console = from_model(model, tiny_tokenizer(), "bloom"), Console()
    with pytest.raises(ModelError, match="cannot be shared"):
        make_engine(policy, loaded, console, "native")
    assert isinstance(make_engine(policy, loaded, console), HFEngine)


def test_the_configuration_chooses_the_engine() -> None:
    policy, console = policy_of("llama"), Console()
    loaded = from_model(policy.model, tiny_tokenizer(), "tiny")
    auto, native, hf = (make_engine(policy, loaded, console, name) for name in ("auto", "native", "hf"))
    assert [type(engine) for engine in (auto, native, hf)] == [NativeEngine, NativeEngine, HFEngine]
    for engine in (native, hf, FakeEngine(WORDS, stop_token_ids=())):
        assert isinstance(engine, Engine) and engine.description and engine.exactness


def test_a_run_with_either_engine_samples_the_same(tmp_path: Path) -> None:
    folder, sampled = model_folder(tmp_path / "model"), {}
    for name in ("auto", "hf"):
        options = {"model__precision": "fp32", "run__num_steps": 1, "sampling__engine": name}
        _, printed = run_grpo(grpo_config(folder, tmp_path / name, **options))
        engine = HFEngine if name == "hf" else NativeEngine
        assert f"samples: {engine.description}; {engine.exactness}" in printed
        sampled[name] = [line["completion"] for line in lines(tmp_path / name / "rollouts.jsonl")]
    assert sampled["auto"] == sampled["hf"]


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = truncate(logits, Sampling(top_k=2)).isfinite()
    assert kept.sum() == 2 and not kept[0, 0] and not kept[0, 4]
    token, logprob, _ = draw(logits, torch.tensor([0.99], dtype=torch.float64), Sampling(top_k=1))
    assert token.item() == logits.argmax() and logprob.item() == 0


class Broken(FakeEngine):
    """A fake engine with one thing wrong, done to every completion or to the whole answer."""

    def __init__(
        self,
        *,
        completion: Callable[[Completion, Sampling], Completion] = lambda c, s: c,
        answer: Callable[[list[Group]], list[Group]] = lambda groups: groups,
        sampling: Callable[[Sampling], Sampling] = lambda s: s,
        seeds: Callable[[Any], Any] = lambda seeds: seeds,
    ) -> None:
        super().__init__(WORDS, stop_token_ids=[STOP], logits=LOGITS)
        self.completion, self.answer, self.sampling, self.seeds = completion, answer, sampling, seeds

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seeds: Sequence[Sequence[int]]
    ) -> list[Group]:
        groups = super().generate(prompts, self.sampling(sampling), seeds=self.seeds(seeds))
        return self.answer(
            [
                replace(g, completions=tuple(self.completion(c, sampling) for c in g.completions))
                for g in groups
            ]
        )


def stopped(change: Callable[[Completion], Completion]) -> Callable[[Completion, Sampling], Completion]:
    return lambda c, s: change(c) if c.finish_reason == "stop" and len(c.token_ids) > 1 else c


CHANCE = random.Random(1)
BROKEN = {
    "3 prompts gave 2 groups": Broken(answer=lambda groups: groups[: max(1, len(groups) - 1)]),
    "the order is lost": Broken(answer=lambda groups: groups[::-1]),
    "3 seeds gave 2 completions": Broken(
        answer=lambda groups: [replace(g, completions=g.completions[:2]) for g in groups]
    ),
    "and max_completion_length is 24": Broken(
        sampling=lambda s: replace(s, max_completion_length=2 * s.max_completion_length)
    ),
    "tokens have": Broken(completion=lambda c, s: replace(c, logprobs=c.logprobs[1:])),
    "finite and at most 0": Broken(completion=lambda c, s: replace(c, logprobs=(0.5,) * len(c.logprobs))),
    "there are tokens after the stop token": Broken(
        completion=stopped(lambda c: replace(c, token_ids=(*c.token_ids, 0), logprobs=(*c.logprobs, -1.0)))
    ),
    "the last token, . is no stop token|the last token, ., is no stop token": Broken(
        completion=stopped(lambda c: replace(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1]))
    ),
    "finish_reason is length, but the last token is a stop": Broken(
        completion=lambda c, s: replace(c, finish_reason="length")
    ),
    "finish_reason is 'aborted'": Broken(completion=lambda c, s: replace(c, finish_reason="aborted")),
    "the stop token is in the text": Broken(completion=stopped(lambda c: replace(c, text=c.text + " </s>"))),
    "the same seed a second time": Broken(
        seeds=lambda seeds: [[CHANCE.randrange(1 << 40) for _ in group] for group in seeds]
    ),
    "other seeds gave the same completions": Broken(
        seeds=lambda seeds: [list(range(len(group))) for group in seeds]
    ),
    "all seeds of a call gave the same completion": Broken(
        seeds=lambda seeds: [[sum(seeds[0])] * len(group) for group in seeds]
    ),
    "the same seed twice in a group": Broken(
        seeds=lambda seeds: [[seed + g for g, seed in enumerate(group)] for group in seeds]
    ),
    "a call of another order": Broken(
        seeds=lambda seeds: [[seed + p for seed in group] for p, group in enumerate(seeds)]
    ),
    "with the prompt alone": Broken(seeds=lambda seeds: [[s + (len(seeds) < 2) for s in g] for g in seeds]),
    "one completion alone": Broken(seeds=lambda seeds: [[s + (len(g) < 2) for s in g] for g in seeds]),
    "there are tokens after the stop token .1.": Broken(sampling=lambda s: replace(s, stop_token_ids=())),
    "temperature 0 with two seeds": Broken(
        sampling=lambda s: replace(s, temperature=s.temperature or 1.0)
    ),
    "top_k = 1 takes another token": Broken(sampling=lambda s: replace(s, top_k=0)),
    "top_k = 1 records": Broken(
        completion=lambda c, s: rescored(c)
    ),
    "with the further stop ids .*was to become": Broken(
        seeds=lambda seeds: [[s + (len(g) == 16 and not CHANCE.randrange(9)) for s in g] for g in seeds]
    ),
    "against the scorer's": Broken(
        completion=lambda c, s: c if s.top_k or not s.temperature else lowered(c)
    ),
    "'temperature': 1.7.*off the scorer's": Broken(
        sampling=lambda s: replace(s, temperature=min(s.temperature, 1.0))
    ),
    "'top_p': 0.5.*not of the truncated": Broken(sampling=lambda s: replace(s, top_p=1.0)),
    "'min_p': 0.3.*of the best came": Broken(sampling=lambda s: replace(s, min_p=0.0)),
    "'top_k': 2.*3 different|'top_k': 2.*5 different": Broken(
        sampling=lambda s: replace(s, top_k=0 if s.top_k == 2 else s.top_k)
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_engine_is_caught(text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_engine(BROKEN[text], prompts_of(1, 2, 3), stop_token_id=STOP, logprobs=fake_scores)


def test_a_version_left_behind_is_caught() -> None:
    engine = Broken(completion=lambda c, s: replace(c, policy_version=0))
    with pytest.raises(AssertionError, match=r"after load_weights\(version=3\) completions carry \[0\]"):
        check_engine(engine, prompts_of(1, 2, 3), stop_token_id=STOP, policy=object())


def test_log_probs_of_another_distribution_are_caught_without_a_scorer() -> None:
    """Truncated draws recorded with the whole distribution's log-probs; draws unlike what is recorded."""
    untruncated = Broken(completion=lambda c, s: rescored(c) if s.top_p < 1 else c)
    with pytest.raises(AssertionError, match=r"'top_p': 0.5.*they are of another distribution"):
        check_engine(untruncated, prompts_of(1, 2, 3), stop_token_id=STOP)
    uneven = Broken(sampling=lambda s: replace(s, temperature=s.temperature and 0.3))
    recorded = Broken(completion=lambda c, s: c)
    uneven.completion = lambda c, s: c if s.temperature == 0 or s.top_k == 1 else rescored(c)
    with pytest.raises(AssertionError, match="not drawn as often as recorded"):
        check_engine(uneven, prompts_of(1, 2, 3), stop_token_id=STOP)
    check_engine(recorded, prompts_of(1, 2, 3), stop_token_id=STOP)


def test_check_engine_needs_prompts_of_two_lengths() -> None:
    with pytest.raises(ValueError, match="prompts of different lengths"):
        check_engine(FakeEngine(WORDS, stop_token_ids=[STOP]), prompts_of(2, 2), stop_token_id=STOP)
