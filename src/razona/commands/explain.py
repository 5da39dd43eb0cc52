"""The numbers behind a step, by hand: plain Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from razona.errors import ConfigError

EQUAL = 1e-9  # as in razona.advantages: rewards of a group closer than this are equal

CONVENTIONS = {
    "population": "(r - mean) / (std + eps), std over G      GRPO paper, razona",
    "sample": "(r - mean) / (std + eps), std over G - 1  TRL, verl",
    "batch": "(r - mean) / (std + eps), std of a step  objective.std=batch",
    "none": "r - mean                                 Dr. GRPO",
    "leave_one_out": "r - mean of the others                   RLOO",
}


def advantages(
    rewards: Sequence[float], *, eps: float = 1e-4, others: Sequence[float] = ()
) -> dict[str, list[float]]:
    """Advantages of one group under every convention, each a list of G numbers. ``others`` are the rewards of
    the other groups of the step, which only "batch" looks at; without any it is "population".

    >>> [round(a, 2) for a in advantages([3, 1, 0, 3])["population"]]
    [0.96, -0.58, -1.35, 0.96]
    """
    count, mean = len(rewards), math.fsum(rewards) / len(rewards)
    if max(rewards) - min(rewards) <= EQUAL:
        return {name: [0.0] * count for name in CONVENTIONS}
    centred = [reward - mean for reward in rewards]
    squares = math.fsum(value * value for value in centred)
    population, sample = math.sqrt(squares / count), math.sqrt(squares / (count - 1))
    batch = _deviation([*rewards, *others])
    return {
        "population": [value / (population + eps) for value in centred],
        "sample": [value / (sample + eps) for value in centred],
        "batch": [value / (batch + eps) for value in centred],
        "none": centred,
        "leave_one_out": [value * count / (count - 1) for value in centred],
    }


def run(args: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """``advantage 3 1 0 3 [--eps X] [--others 0 1]``: the table as text, and as a dict that JSON holds."""
    if not args or args[0] != "advantage":
        given = f"'{args[0]}'" if args else "nothing"
        raise ConfigError(
            f"razona explain can explain 'advantage', given was {given}. "
            "Try: razona explain advantage 3 1 0 3"
        )
    rewards, others, eps = _parse(args[1:])
    table = advantages(rewards, eps=eps, others=others)
    mean, spread = math.fsum(rewards) / len(rewards), _deviation(rewards)
    everyone = f", {_deviation([*rewards, *others]):.4g} with the {len(others)} others" if others else ""
    lines = [
        f"{'reward':<14}" + "".join(f"{reward:>8g}" for reward in rewards),
        f"mean {mean:g}, standard deviation {spread:.4g} over G{everyone}, eps {eps:g}",
        "",
        *(
            f"{name:<14}" + "".join(f"{a:>+8.2f}" for a in table[name]) + f"   {CONVENTIONS[name]}"
            for name in table
        ),
    ]
    if max(rewards) - min(rewards) <= EQUAL:
        lines += [
            "",
            "Every completion got the same reward: this prompt teaches nothing in this step.",
        ]
    if not others:
        lines += ["", "batch: --others 0 0 1 0 gives the rewards of the step's other groups; none are given."]
    return "\n".join(lines), {
        "rewards": rewards,
        "others": others,
        "mean": mean,
        "std": spread,
        "eps": eps,
        "advantages": table,
    }


def _deviation(rewards: Sequence[float]) -> float:
    """The population's."""
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))


def _parse(args: Sequence[str]) -> tuple[list[float], list[float], float]:
    """Rewards, those of other groups (all after --others) and eps. Raises ConfigError for what is no finite
    number, and for fewer than two rewards.
    """
    values: list[float] = []
    others: list[float] = []
    eps, rest, target = 1e-4, list(args), values
    if sum(arg.startswith("--eps") for arg in args) > 1:
        raise ConfigError("--eps is given twice. Give it once.")
    while rest:
        arg = rest.pop(0)
        if arg.startswith("--eps"):
            text = arg[6:] if arg.startswith("--eps=") else (rest.pop(0) if rest else "")
            eps = _number(text, "--eps")
            if eps < 0:
                raise ConfigError(
                    f"--eps {text}: a negative eps could divide by zero. Give 0 or more, such as 1e-4."
                )
        elif arg == "--others":
            target = others
        else:
            target.append(_number(arg, "reward"))
    if len(values) < 2:
        raise ConfigError(
            f"A group needs at least two rewards to be compared, given were {len(values)}. "
            "Try: razona explain advantage 3 1 0 3"
        )
    return values, others, eps


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(
            f"{what} '{text}' is not a finite number. Write rewards like 3 1 0.5, with a decimal point."
        )
    return value
