"""What a trainer reads from the folder of a run: its log, its best model, whether it can be resumed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from razona.errors import CheckpointError
from razona.models.lora import WEIGHTS as ADAPTER_WEIGHTS
from razona.run.checkpoint import newest_checkpoint

Step = tuple[int, Mapping[str, float], Sequence[Mapping[str, Any]]]
"""Number, metrics and rollouts of a step."""


def logged_steps(run: Path, *, before: int) -> Iterator[Step]:
    """The steps before ``before`` as the files of the run have them."""
    if before == 1:
        return
    by_step: dict[int, list[dict[str, Any]]] = {}
    if (run / "rollouts.jsonl").exists():
        for record in _lines(run / "rollouts.jsonl"):
            by_step.setdefault(record["step"], []).append(record)
    for line in _lines(run / "metrics.jsonl"):
        if (number := line.pop("step")) < before:
            yield number, line, by_step.get(number, ())


def load_best(model: Any, folder: Path) -> None:
    """The weights of the best step, into ``model`` as it stands; nothing where no step was the best."""
    if not folder.is_dir():
        return
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        adapter = load_file(folder / ADAPTER_WEIGHTS, device=str(model.device))
        set_peft_model_state_dict(model, adapter, adapter_name=model.active_adapter)
    else:
        best = type(model).from_pretrained(folder, dtype="auto")
        model.load_state_dict(best.state_dict())


def resumes(resume_from_checkpoint: bool | str | os.PathLike[str] | None, run: Path) -> bool:
    """Whether to resume; a path must be that of the newest checkpoint of ``run``, or above it. Raises
    CheckpointError.
    """
    if not resume_from_checkpoint:
        return False
    run = run.absolute()
    newest, _ = newest_checkpoint(run / "checkpoints")
    if newest is None:
        raise CheckpointError(
            f"resume_from_checkpoint={resume_from_checkpoint!r}: {run} holds no checkpoint. Leave it "
            "out to start anew, or set output_dir to that of the run to resume."
        )
    if resume_from_checkpoint is not True:
        path = Path(resume_from_checkpoint).absolute()
        if path not in (newest, *newest.parents[:3]):
            raise CheckpointError(
                f"resume_from_checkpoint={str(resume_from_checkpoint)!r} is not the newest checkpoint, "
                f"{newest}. A run is resumed from its newest one: pass True, or delete the later ones."
            )
    return True


def _lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file of a run; null is nan, as it was before it was written."""

    def number(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: math.nan if value is None else value for key, value in pairs}

    return [
        json.loads(line, object_pairs_hook=number) for line in path.read_text(encoding="utf-8").splitlines()
    ]
