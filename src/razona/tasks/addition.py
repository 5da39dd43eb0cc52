"""Two-digit addition, thought aloud: prompts, a verifier, a few demonstrations. Made here, from a seed.

An answer looks like ``<think>34 + 52 = 86</think> 86``. The demonstrations hold only sums whose units do not
carry: how to carry is left for reinforcement learning to find.
"""

from __future__ import annotations

import random
from typing import Any

SYSTEM = "Think inside <think>...</think>, then write only the number."


def question(a: int, b: int) -> list[dict[str, str]]:
    """The prompt, as messages."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {a} + {b}?"}]


def demonstration(a: int, b: int) -> str:
    """A worked answer."""
    return f"<think>{a} + {b} = {a + b}</think> {a + b}"


def carries(a: int, b: int) -> bool:
    """Whether the units add up to ten or more."""
    return a % 10 + b % 10 >= 10


def rows(pairs: list[tuple[int, int]], *, demonstrated: bool = False) -> list[dict[str, Any]]:
    """Data set rows: prompt and answer; with ``demonstrated`` also the completion to imitate."""
    return [
        {"prompt": question(a, b), "answer": str(a + b)}
        | ({"completion": demonstration(a, b)} if demonstrated else {})
        for a, b in pairs
    ]


def split(seed: int, *, demonstrations: int, held_out: int) -> tuple[list[tuple[int, int]], ...]:
    """Number pairs (demonstrated, held out, for GRPO), disjoint: a + b and b + a count as one pair.

    Those demonstrated do not carry; the others are as they come, about half of them do.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    chance = random.Random(seed)
    chance.shuffle(pairs)
    pairs = [pair if chance.random() < 0.5 else pair[::-1] for pair in pairs]
    held_out_pairs, others = pairs[:held_out], pairs[held_out:]
    demonstrated = [pair for pair in others if not carries(*pair)][:demonstrations]
    return demonstrated, held_out_pairs, [pair for pair in others if pair not in set(demonstrated)]


def constant_accuracy(pairs: list[tuple[int, int]]) -> float:
    """Share of pairs with the most common sum: what the best constant answer scores."""
    sums = [a + b for a, b in pairs]
    return max(sums.count(total) for total in set(sums)) / len(sums)
