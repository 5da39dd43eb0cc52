"""The order in which a run walks through its prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from razona.errors import CheckpointError, DataError

T = TypeVar("T")


class PromptSource(Generic[T]):
    """Hands out prompts (or demonstrations), epoch after epoch; each epoch visits every one exactly once.

    The order of an epoch is a hash of (seed, epoch, position), the same on every machine and Python. With
    ``shuffle=False`` every epoch has the order given.
    """

    def __init__(self, prompts: Sequence[T], *, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise DataError("There are no prompts to take from: the data set is empty.")
        self.prompts = tuple(prompts)
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0  # prompts of this epoch already handed out
        self._order = self._order_of(0)

    def take(self, n: int) -> list[T]:
        """The next ``n`` prompts. A take may span the border of epochs, and then, or when ``n`` exceeds the
        number of prompts, it can hold the same prompt more than once."""
        assert n >= 0
        taken: list[T] = []
        while len(taken) < n:
            if self.position == len(self.prompts):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            more = self._order[self.position : self.position + n - len(taken)]
            taken += [self.prompts[index] for index in more]
            self.position += len(more)
        return taken

    def warning(self, n: int) -> str | None:
        """What to print when steps take ``n``: None unless there are fewer prompts than that."""
        have = len(self.prompts)
        if n <= have:
            return None
        least, most = n // have, -(-n // have)
        times = str(least) if least == most else f"{least} to {most}"
        return (
            f"The data set has {have} usable prompt{'s' * (have != 1)} and a step takes {n}: every step sees "
            f"each of them {times} times. That works, but it learns these prompts by heart; "
            f"give more rows or take at most {have} per step."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, "num_prompts": len(self.prompts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["num_prompts"] != len(self.prompts):
            raise CheckpointError(
                f"The checkpoint walked through {state['num_prompts']} prompts and the data set now gives "
                f"{len(self.prompts)}. Resume with the data the run began with, or start a new run."
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        indices = range(len(self.prompts))
        if not self.shuffle:
            return list(indices)

        def key(index: int) -> bytes:
            return hashlib.blake2b(f"order/{self.seed}/{epoch}/{index}".encode(), digest_size=16).digest()

        return sorted(indices, key=key)


def first_of(prompts: Sequence[T], count: int, *, seed: int, shuffle: bool) -> list[T]:
    """``count`` prompts, each once (0: all of them), in the order of a source's first epoch."""
    return PromptSource(prompts, seed=seed, shuffle=shuffle).take(min(count or len(prompts), len(prompts)))
