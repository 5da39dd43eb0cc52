"""What razona raises. Every message says what was given, why it cannot work and what to do.

RazonaError
├── ConfigError       an option, or two that exclude each other      (also a ValueError)
├── DataError         a data set, a file, a row                      (also a ValueError)
├── ModelError        a model that cannot be found, loaded, trained  (also a ValueError)
├── DifficultyError   prompts that teach nothing                     (also a ValueError)
├── RewardError       a reward function: signature, result, failure  (also a ValueError)
├── CheckpointError   a checkpoint that does not fit or is not whole (also a ValueError)
└── HubError          the hub refuses an upload, or gives no answer  (also a ValueError)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class RazonaError(Exception):
    """Root of the tree: catch this to catch everything razona refuses on purpose."""


class ConfigError(RazonaError, ValueError):
    """An option has a value that cannot work, or two options exclude each other."""


class DataError(RazonaError, ValueError):
    """A data set cannot be read or used."""


class ModelError(RazonaError, ValueError):
    """A model cannot be found, loaded, trained or saved."""


class DifficultyError(RazonaError, ValueError):
    """The prompts are all too easy or too hard for the model."""


class RewardError(RazonaError, ValueError):
    """A reward function does not fit the data, failed, or returned something unusable."""


class CheckpointError(RazonaError, ValueError):
    """A checkpoint is not whole, or does not belong to this run."""


class HubError(RazonaError, ValueError):
    """The hub refuses an upload, or gives no answer."""


class NotFinite(ModelError):
    """A loss or a gradient is nan or infinite. The weights are as they were before it."""


def finite(what: str, value: float) -> float:
    """``value``; NotFinite when it is nan or infinite."""
    if not math.isfinite(value):
        raise NotFinite(f"the {what} is {value}, so nothing was updated")
    return value


def nearest(name: str, names: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` when one of ``names`` is close to ``name``, else an empty string.

    >>> nearest("respuesta", ["prompt", "respuesta_correcta"])
    " Did you mean 'respuesta_correcta'?"
    """
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
