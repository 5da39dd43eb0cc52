"""Two-digit addition, thought aloud: prompts, a verifier, a few demonstrations. Made here, from a seed.

An answer looks like ``<think>7 + 5 = 12, 4 + 3 = 7</think> 82``.
"""

from __future__ import annotations

import random
from typing import Any

SYSTEM = "Think inside <think>...</think>, then write only the number."


def question(a: int, b: int) -> list[dict[str, str]]:
    """The prompt, as messages."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {a} + {b}?"}]


def demonstration(a: int, b: int) -> str:
    """A worked answer: the sums of the two columns, units first. The carry is left to the reader."""
    units = f"{a % 10} + {b % 10} = {a % 10 + b % 10}"
    tens = f"{a // 10} + {b // 10} = {a // 10 + b // 10}"
    return f"<think>{units}, {tens}</think> {a + b}"


def rows(pairs: list[tuple[int, int]], *, demonstrated: bool = False) -> list[dict[str, Any]]:
    """Data set rows: prompt and answer; with ``demonstrated`` also the completion to imitate."""
    return [
        {"prompt": question(a, b), "answer": str(a + b)}
        | ({"completion": demonstration(a, b)} if demonstrated else {})
        for a, b in pairs
    ]


def split(seed: int, *, demonstrations: int, held_out: int) -> tuple[list[tuple[int, int]], ...]:
    """Number pairs (demonstrated, held out, for GRPO), disjoint: a + b and b + a count as one pair."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    chance = random.Random(seed)
    chance.shuffle(pairs)
    pairs = [pair if chance.random() < 0.5 else pair[::-1] for pair in pairs]
    first, second = demonstrations, demonstrations + held_out
    return pairs[:first], pairs[first:second], pairs[second:]


def constant_accuracy(pairs: list[tuple[int, int]]) -> float:
    """Share of pairs with the most common sum: what the best constant answer scores."""
    sums = [a + b for a, b in pairs]
    return max(sums.count(total) for total in set(sums)) / len(sums)
