"""The engine contract in executable form: `check_engine` is for anyone who writes an engine.

>>> from razona.engines.fake import FakeEngine
>>> from razona.types import Prompt
>>> engine = FakeEngine(["yes", "no", "</s>"], stop_token_ids=[2], logits=[0.0, 1.0, -1.0])
>>> prompts = [Prompt(id=i, input="?", token_ids=(0,) * (i + 1), columns={}) for i in range(3)]
>>> scores = lambda prompt, token_ids: [engine.logprob(token) for token in token_ids]
>>> check_engine(engine, prompts, stop_token_id=2, logprobs=scores)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from razona.types import Completion, Engine, Group, Prompt, Sampling, TokenIds, seed_for

Scores = Callable[[Prompt, TokenIds], Sequence[float]]
"""Log-probs of a completion's tokens after a prompt, at temperature 1, nothing truncated."""

BUDGET = 24
"""max_completion_length of every call that ``logprobs`` is asked about, one-token completions apart."""
DRAWS = 512  # one-token completions that a distribution is measured by
DRAWS_AT_ONCE = 64


def check_engine(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    stop_token_id: int,
    logprobs: Scores | None = None,
    policy: Any = None,
    exact: bool = False,
    tolerance: float = 1e-3,
) -> None:
    """Raises AssertionError with what is wrong unless ``engine`` keeps the contract of `razona.types.Engine`.

    ``prompts``: two at least, of different lengths. ``stop_token_id``: the one id the engine was made to stop
    at; it must be likely enough to occur. ``logprobs`` scores tokens independently (a trainer's pass): what
    the engine records is then compared with it, within ``tolerance`` or, with ``exact``, bit for bit.
    ``policy`` is given to ``load_weights``; None leaves that call out.
    """
    if len({len(prompt.token_ids) for prompt in prompts}) < 2:
        raise ValueError(
            "check_engine needs prompts of different lengths, two at least: alone none has a neighbour"
        )
    trial = _Trial(engine, tuple(prompts), frozenset({stop_token_id}), logprobs, exact, tolerance)
    _check_shapes(trial)
    _check_seeds(trial)
    _check_neighbours(trial)
    _check_stops(trial, stop_token_id)
    _check_greedy(trial)
    _check_scores(trial)
    _check_distributions(trial)
    if policy is not None:
        _check_version(trial, policy)


@dataclass(frozen=True)
class _Trial:
    """An engine on trial, and what it is compared with."""

    engine: Engine
    prompts: tuple[Prompt, ...]
    stops: frozenset[int]
    scores: Scores | None
    exact: bool
    tolerance: float

    def sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[tuple[Completion, ...]]:
        """Completions of each prompt; every call's result is looked over here."""
        groups = self.engine.generate(list(prompts), sampling, seeds=[list(s) for s in seeds])
        _ensure(len(groups) == len(prompts), f"{len(prompts)} prompts gave {len(groups)} groups")
        stops = self.stops | set(sampling.stop_token_ids)
        for prompt, group, group_seeds in zip(prompts, groups, seeds, strict=True):
            _check_group(prompt, group, len(group_seeds))
            for completion in group.completions:
                _check_completion(completion, sampling.max_completion_length, stops)
        return [group.completions for group in groups]

    def same(self, a: Completion, b: Completion, what: str) -> None:
        """Fails unless the two have the same tokens and log-probs."""
        _ensure(a.token_ids == b.token_ids, f"{what}: tokens {a.token_ids} became {b.token_ids}")
        _ensure(a.text == b.text, f"{what}: text {a.text!r} became {b.text!r}")
        self.close(a.logprobs, b.logprobs, what)

    def close(self, a: Sequence[float], b: Sequence[float], what: str) -> None:
        """Fails unless the log-probs agree as far as this trial demands."""
        worst = max(abs(x - y) for x, y in zip(a, b, strict=True))
        allowed = 0.0 if self.exact else self.tolerance
        _ensure(worst <= allowed, f"{what}: log-probs differ by {worst:.3g}, and {allowed:.3g} is allowed")


def seeds_of(prompts: Sequence[Prompt], count: int, *, salt: int = 0) -> list[list[int]]:
    """``count`` sampling seeds for each prompt."""
    return [[seed_for(salt, 0, prompt.id, sample) for sample in range(count)] for prompt in prompts]


def _check_group(prompt: Prompt, group: Group, count: int) -> None:
    _ensure(
        group.prompt == prompt,
        f"prompt {prompt.id} got the group of prompt {group.prompt.id}: the order is lost",
    )
    _ensure(len(group.completions) == count, f"{count} seeds gave {len(group.completions)} completions")


def _check_completion(completion: Completion, budget: int, stops: frozenset[int] | set[int]) -> None:
    ids, logprobs = completion.token_ids, completion.logprobs
    _ensure(len(ids) >= 1, "a completion has no token")
    _ensure(len(ids) <= budget, f"a completion has {len(ids)} tokens, and max_completion_length is {budget}")
    _ensure(len(logprobs) == len(ids), f"{len(ids)} tokens have {len(logprobs)} log-probs")
    bad = [x for x in logprobs if not math.isfinite(x) or x > 1e-6]
    _ensure(not bad, f"a recorded log-prob is {bad[:1]}: it must be finite and at most 0")
    early = [token for token in ids[:-1] if token in stops]
    _ensure(not early, f"there are tokens after the stop token {early[:1]}: {ids}")
    if completion.finish_reason == "stop":
        _ensure(ids[-1] in stops, f"finish_reason is stop, but the last token, {ids[-1]}, is no stop token")
    else:
        _ensure(completion.finish_reason == "length", f"finish_reason is {completion.finish_reason!r}")
        _ensure(ids[-1] not in stops, "finish_reason is length, but the last token is a stop token")
        _ensure(len(ids) == budget, f"finish_reason is length after {len(ids)} tokens of {budget}")


def _check_shapes(trial: _Trial) -> None:
    """Group sizes, the smallest calls, the smallest budget."""
    _ensure(trial.sample((), Sampling(), []) == [], "no prompts gave some groups")
    trial.sample(trial.prompts, Sampling(max_completion_length=BUDGET), seeds_of(trial.prompts, 3))
    trial.sample(trial.prompts[:1], Sampling(max_completion_length=BUDGET), [[1]])
    trial.sample(trial.prompts, Sampling(max_completion_length=1), seeds_of(trial.prompts, 2))
    trial.sample(trial.prompts[:1], Sampling(max_completion_length=1), [[1]])
    sizes = [range(1 + index % 3) for index in range(len(trial.prompts))]
    trial.sample(trial.prompts, Sampling(max_completion_length=2), sizes)


def _check_seeds(trial: _Trial) -> None:
    """A seed decides, and only a seed."""
    sampling, seeds = Sampling(max_completion_length=BUDGET), seeds_of(trial.prompts, 4)
    first, again = (trial.sample(trial.prompts, sampling, seeds) for _ in range(2))
    for a, b in _pairs(first, again):
        trial.same(a, b, "the same seed a second time")
    other = trial.sample(trial.prompts, sampling, seeds_of(trial.prompts, 4, salt=1))
    _ensure(first != other, "other seeds gave the same completions")
    texts = {completion.token_ids for completions in first for completion in completions}
    _ensure(len(texts) > 1, "all seeds of a call gave the same completion")
    twins = trial.sample(trial.prompts[:1], sampling, [[7, 7, 8]])[0]
    trial.same(twins[0], twins[1], "the same seed twice in a group")


def _check_neighbours(trial: _Trial) -> None:
    """What else is in the call changes nothing."""
    sampling, prompts = Sampling(max_completion_length=BUDGET), trial.prompts
    seeds = seeds_of(prompts, 4)
    together = trial.sample(prompts, sampling, seeds)
    backwards = trial.sample(prompts[::-1], sampling, [s[::-1] for s in seeds[::-1]])
    for a, b in _pairs(together, [completions[::-1] for completions in backwards[::-1]]):
        trial.same(a, b, "the same seed in a call of another order")
    twice = trial.sample((prompts[0], *prompts), sampling, [[5, 6], *seeds])
    for a, b in _pairs(together, twice[1:]):
        trial.same(a, b, "the same seed in a call where a prompt stands twice")
    for prompt, own, expected in zip(prompts, seeds, together, strict=True):
        for a, b in _pairs([expected], trial.sample([prompt], sampling, [own])):
            trial.same(a, b, "the same seed with the prompt alone in the call")
        lone = trial.sample([prompt], sampling, [own[:1]])[0][0]
        trial.same(expected[0], lone, "the same seed with one completion alone in the call")


def _check_stops(trial: _Trial, stop_token_id: int) -> None:
    """The engine's own stop token, then further ones, which must cut the same completions short."""
    sampling, prompts = Sampling(max_completion_length=BUDGET), trial.prompts
    seeds = seeds_of(prompts, 16)
    free = trial.sample(prompts, sampling, seeds)
    stopped = [
        (i, g) for i, group in enumerate(free) for g, c in enumerate(group) if c.finish_reason == "stop"
    ]
    _ensure(bool(stopped), f"no completion of {16 * len(prompts)} ended at the stop token {stop_token_id}")
    for i, g in stopped[:4]:
        _check_stopped_text(trial, prompts[i], seeds[i][g], free[i][g])
    seen = Counter(t for group in free for c in group for t in c.token_ids if t != stop_token_id)
    usual = [token for token, _ in seen.most_common(3)]
    for further in (usual[:1], usual):
        cut = trial.sample(prompts, replace(sampling, stop_token_ids=tuple(further)), seeds)
        for a, b in _pairs(free, cut):
            ends = [at for at, token in enumerate(a.token_ids) if token in {*further, stop_token_id}]
            expected = a.token_ids[: ends[0] + 1 if ends else None]
            _ensure(
                b.token_ids == expected,
                f"with the further stop ids {further}, {a.token_ids} was to become {expected} "
                f"and is {b.token_ids}",
            )
            trial.close(a.logprobs[: len(expected)], b.logprobs, f"with the further stop ids {further}")


def _check_stopped_text(trial: _Trial, prompt: Prompt, seed: int, completion: Completion) -> None:
    """Compared with the same completion ended by its budget, one token earlier."""
    before = len(completion.token_ids) - 1
    if before == 0:
        _ensure(completion.text == "", f"the stop token is in the text: {completion.text!r} is to be empty")
        return
    shorter = trial.sample([prompt], Sampling(max_completion_length=before), [[seed]])[0][0]
    if (
        shorter.token_ids == completion.token_ids[:-1]
    ):  # rounding may part them: another budget, other padding
        _ensure(
            completion.text == shorter.text,
            f"the stop token is in the text: {completion.text!r}, and without it {shorter.text!r}",
        )


def _check_greedy(trial: _Trial) -> None:
    sampling = Sampling(max_completion_length=BUDGET, temperature=0.0)
    greedy = trial.sample(trial.prompts, sampling, seeds_of(trial.prompts, 2))
    for a, b in greedy:
        trial.same(a, b, "temperature 0 with two seeds")
    single = replace(sampling, temperature=1.0, top_k=1)
    for completions, best in zip(
        trial.sample(trial.prompts, single, seeds_of(trial.prompts, 2)), greedy, strict=True
    ):
        for one in completions:
            _ensure(one.token_ids == best[0].token_ids, "top_k = 1 takes another token than temperature 0")
            worst = min(one.logprobs)
            _ensure(
                worst >= -1e-6, f"top_k = 1 records the log-prob {worst:.3g}: its token has probability 1"
            )
    if trial.scores is not None:
        for prompt, completions in zip(trial.prompts, greedy, strict=True):
            ids = completions[0].token_ids
            trial.close(
                completions[0].logprobs, trial.scores(prompt, ids), "temperature 0 records temperature 1"
            )


def _check_scores(trial: _Trial) -> None:
    """Recorded log-probs are the scorer's."""
    if trial.scores is None:
        return
    sampled = trial.sample(trial.prompts, Sampling(max_completion_length=BUDGET), seeds_of(trial.prompts, 4))
    for prompt, completions in zip(trial.prompts, sampled, strict=True):
        for completion in completions:
            expected = trial.scores(prompt, completion.token_ids)
            trial.close(completion.logprobs, expected, "recorded log-probs against the scorer's")


def _check_distributions(trial: _Trial) -> None:
    """First tokens: drawn as often as recorded, and recorded as the options define."""
    prompt = trial.prompts[0]
    for options in ({}, {"temperature": 1.7}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}):
        sampling, name = Sampling(max_completion_length=1, **options), f"with {options or 'no option'}"  # type: ignore[arg-type]
        counts: Counter[int] = Counter()
        recorded: dict[int, float] = {}
        for salt in range(DRAWS // DRAWS_AT_ONCE):
            for completion in trial.sample([prompt], sampling, seeds_of([prompt], DRAWS_AT_ONCE, salt=salt))[
                0
            ]:
                token, logprob = completion.token_ids[0], completion.logprobs[0]
                counts[token] += 1
                trial.close(
                    [recorded.setdefault(token, logprob)], [logprob], f"{name}, two draws of one token"
                )
        _check_frequencies(counts, recorded, name)
        if "top_k" in options:
            _ensure(len(counts) <= sampling.top_k, f"{name}, {len(counts)} different tokens were drawn")
        if trial.scores is not None:
            scores = {token: trial.scores(prompt, (token,))[0] for token in counts}
            _check_truncation(sampling, recorded, scores, trial.tolerance, name)


def _check_frequencies(counts: Counter[int], recorded: dict[int, float], name: str) -> None:
    """Recorded probabilities sum to at most 1, miss no more than Good and Turing expect, and fit the
    counts.
    """
    mass = sum(math.exp(logprob) for logprob in recorded.values())
    _ensure(mass <= 1.001, f"{name}, recorded probabilities sum to {mass:.4f}")
    once = sum(count == 1 for count in counts.values()) / DRAWS
    _ensure(
        1 - mass <= once + 0.12,
        f"{name}, recorded probabilities of all tokens drawn sum to {mass:.3f} only: they are of another "
        "distribution",
    )
    cells = [(count, DRAWS * math.exp(recorded[token])) for token, count in counts.items()]
    usual = [(count, expected) for count, expected in cells if expected >= 5]
    rest = (DRAWS - sum(c for c, _ in usual), DRAWS - sum(e for _, e in usual))
    if rest[1] >= 5:
        usual.append(rest)
    chi_square = sum((count - expected) ** 2 / expected for count, expected in usual)
    freedom = max(1, len(usual) - 1)
    _ensure(
        chi_square <= freedom + 5 * math.sqrt(2 * freedom),
        f"{name}, tokens were not drawn as often as recorded: chi-square {chi_square:.1f} of {freedom} cells",
    )


def _check_truncation(
    sampling: Sampling, recorded: dict[int, float], scores: dict[int, float], tolerance: float, name: str
) -> None:
    """Recorded log-probs are score / temperature minus one constant: the log of the mass that was kept."""
    shifts = [scores[token] / sampling.temperature - recorded[token] for token in recorded]
    spread = max(shifts) - min(shifts)
    _ensure(
        spread <= 4 * tolerance,
        f"{name}, recorded log-probs are off the scorer's by shifts {spread:.3g} apart",
    )
    kept, rarest = math.exp(shifts[0]), min(math.exp(scores[token]) for token in scores)
    slack = 4 * tolerance
    if sampling.top_p < 1:
        fits = sampling.top_p - slack <= kept < sampling.top_p + rarest + slack
        _ensure(
            fits, f"{name}, recorded log-probs are not of the truncated distribution: its mass was {kept:.3f}"
        )
    elif sampling.top_k == len(recorded):
        mass = sum(math.exp(score) for score in scores.values())
        _ensure(
            abs(kept - mass) <= slack, f"{name}, log-probs are of mass {kept:.3f}, and {mass:.3f} was kept"
        )
    elif sampling.min_p > 0:
        best = max(math.exp(score) for score in scores.values())
        _ensure(
            rarest >= sampling.min_p * best * (1 - slack),
            f"{name}, a token of {rarest / best:.3f} of the best came",
        )
    elif sampling.temperature == 1.0:
        _ensure(abs(shifts[0]) <= slack, f"{name}, recorded log-probs are {shifts[0]:.3g} off the scorer's")


def _check_version(trial: _Trial, policy: Any) -> None:
    for version in (3, 4):
        trial.engine.load_weights(policy, version=version)
        sampled = trial.sample(trial.prompts, Sampling(max_completion_length=2), seeds_of(trial.prompts, 2))
        carried = {completion.policy_version for completions in sampled for completion in completions}
        _ensure(
            carried == {version}, f"after load_weights(version={version}) completions carry {sorted(carried)}"
        )


def _pairs(
    a: Sequence[Sequence[Completion]], b: Sequence[Sequence[Completion]]
) -> list[tuple[Completion, Completion]]:
    return [pair for x, y in zip(a, b, strict=True) for pair in zip(x, y, strict=True)]


def _ensure(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
