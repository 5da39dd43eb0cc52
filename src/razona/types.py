"""The values that travel through a run, and the protocols between its parts. Standard library only.

Shape letters used in every docstring of razona: P prompts, G completions of a prompt, R reward functions,
B = P * G sequences, T completion tokens, N tokens in a row, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

TokenIds = tuple[int, ...]
Message = dict[str, str]  # {"role": ..., "content": ...}
PromptInput = str | list[Message]
EngineName = Literal["auto", "native", "hf"]
FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready to be sampled from.

    ``id`` is the row of the data set it came from, ``input`` what a reward function sees (a string, or
    messages with the system prompt included), ``token_ids`` what the model sees, ``columns`` every column of
    the row by its exact name.
    """

    id: int
    input: PromptInput
    token_ids: TokenIds
    columns: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer. ``token_ids`` includes the stop token when there is one; ``text`` does not.

    ``logprobs[t]`` is the log-probability of ``token_ids[t]`` under the distribution it was sampled from:
    after temperature and after top-k, top-p and min-p. Greedy sampling (temperature 0) records those of
    temperature 1.
    """

    token_ids: TokenIds
    logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    policy_version: int


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its completions: group identity is this type, never a position in a list.

    ``kv_length`` is the padded key/value length its tokens were sampled with (0: the engine makes no
    promise); a trainer pass that pads to the same length reproduces the sampler's bits on a CPU.
    ``activations`` is what the sampler kept for that pass, if anything (`razona.models.cpu.reuse`).
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    kv_length: int = 0
    activations: object = field(default=None, compare=False, repr=False)


def ranged(default: Any, allowed: str, holds: Callable[[Any], bool]) -> Any:
    """A dataclass field with the values it may have: ``allowed`` names them where ``holds(value)`` is false,
    which `razona.config.check.validate` asks. None, where the type allows it, is not asked about.
    """
    return field(default=default, metadata={"range": (allowed, holds)})


def at_least(low: int, *, default: Any, note: str = "") -> Any:
    """`ranged` from ``low`` on; ``note`` says what the lowest value means."""
    return ranged(default, f"at least {low}" + (f" ({note})" if note else ""), lambda value: value >= low)


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    group_size: int = at_least(1, default=8)
    """Completions per prompt (G); TRL calls it num_generations."""
    max_completion_length: int = at_least(1, default=256)
    """Tokens a completion may have, its stop token included."""
    temperature: float = at_least(0, default=1.0)
    """Logits are divided by it, in sampler, trainer and reference alike. 0 is greedy, for evaluation only."""
    top_p: float = ranged(1.0, "above 0 and at most 1 (1 keeps all tokens)", lambda v: 0 < v <= 1)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = at_least(0, default=0, note="0 keeps all tokens")
    """Keep this many most likely tokens; 0 keeps all."""
    min_p: float = ranged(0.0, "at least 0 and below 1 (0 keeps all tokens)", lambda v: 0 <= v < 1)
    """Drop tokens less likely than this share of the most likely one."""
    stop_token_ids: tuple[int, ...] = ranged((), "token ids, at least 0", lambda v: all(i >= 0 for i in v))
    """Further ids that end a completion, beside those of the model."""
    engine: EngineName = "auto"
    """What samples: native, the trainer's own forward pass, with prompts shared; hf, transformers' generate,
    slower, for every model; auto: native where the model can share prompts."""


class RewardFn(Protocol):
    """Called by keyword with prompts, completions, completion_ids and the data set's columns by exact name.

    May be a function, a callable object or a coroutine function, with or without ``**kwargs``. Returns one
    number per completion, or None where it cannot score.
    """

    def __call__(
        self, *, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> Any: ...


@runtime_checkable
class Engine(Protocol):
    """Samples completions. ``razona.engines.testing.check_engine`` is the contract, in executable form."""

    @property
    def description(self) -> str:
        """What samples, in a few plain words, for the header of a run."""
        ...

    @property
    def exactness(self) -> object:
        """How the log-probs it records compare with the trainer's own, in a plain sentence; no more than what
        holds on the machine at hand.
        """
        ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, *, seeds: Sequence[Sequence[int]]
    ) -> list[Group]:
        """One group per prompt, in order; ``seeds[p][g]`` alone decides the randomness of completion g of
        prompt p.
        """
        ...

    def load_weights(self, policy: Any, *, version: int) -> None:
        """Sample from this policy's present weights from now on; completions carry ``version``."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """A named part of a run's state. Values are tensors, numbers, strings, None, and lists and dicts of
    them.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Logger(Protocol):
    """Takes what a step measured."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


def seed_for(seed: int, step: int, prompt_id: int, sample_index: int) -> int:
    """The sampling seed of one completion: a 63-bit hash, so that results depend neither on batch neighbours
    nor on generator state."""
    text = f"{seed}/{step}/{prompt_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
