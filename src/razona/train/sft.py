"""The SFT loop: demonstrations -> loss on what the assistant wrote -> update. Read `train` downward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from razona.batch import collate_demonstrations, needed
from razona.build.data import overlap_notice, refuse_gold
from razona.build.model import load_model, make_policy, max_context
from razona.build.precision import with_precision
from razona.config import SFTConfig
from razona.config.check import validate
from razona.data import Demonstration, DemonstrationSet, PromptSource, Rows, build_demonstrations, load_rows
from razona.errors import finite
from razona.losses.supervised import negative_log_likelihood
from razona.losses.weights import masked_sum, per_token
from razona.models import LoadedModel
from razona.models.quant import refuse_frozen
from razona.policy import Policy
from razona.rollout.evaluate import LossEvaluator
from razona.run.console import Console
from razona.run.folder import RunFolder
from razona.run.steps import RESUME_HINT, Evaluate, OnStep, Steps, keep_going, running
from razona.types import Stateful


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    policy: Policy
    source: PromptSource[Demonstration]
    evaluator: LossEvaluator | None
    log: RunFolder
    on_step: OnStep = keep_going

    @property
    def state(self) -> dict[str, Stateful]:
        """What a checkpoint holds."""
        return {"policy": self.policy, "source": self.source}

    @property
    def evaluate(self) -> Evaluate | None:
        evaluator = self.evaluator
        return None if evaluator is None else lambda: (evaluator(self.policy), ())


def train(config: SFTConfig, parts: Parts, console: Console) -> dict[str, Any]:
    """Trains up to ``config.run.num_steps``. Returns the last step's metrics, and how the run ended."""
    policy = parts.policy
    with Steps(
        "SFT", config.run, config.eval, parts.log, parts.state, parts.evaluate, parts.on_step, console
    ) as steps:
        for _ in steps:
            rows = parts.source.take(config.rows_per_step)
            with steps.phase("train"):
                metrics = update(policy, rows, budget=config.tokens_per_microbatch)
            steps.end(metrics | {"lr": policy.learning_rate(policy.updates - 1)})
    return steps.result


def update(policy: Policy, rows: Sequence[Demonstration], *, budget: int) -> dict[str, float]:
    """One optimizer update on the mean log-loss of the trained tokens of ``rows``, whatever the
    micro-batches. NotFinite, and no update, when loss or gradient are not finite.
    """
    batch = collate_demonstrations([(row.token_ids, row.loss_mask) for row in rows]).to(policy.device)
    total, totals = 0.0, torch.zeros(2, device=policy.device)
    for micro in batch.weighted(per_token).split(budget):
        token_stats = torch.zeros(2, *micro.loss_mask.shape, device=policy.device)
        logprobs = policy.logprobs(micro, temperature=1.0, token_stats=token_stats)  # [b, T]
        loss = masked_sum(negative_log_likelihood(logprobs, micro.loss_mask), needed(micro.weights))
        loss.backward()
        total += loss.item()
        totals += token_stats.sum((1, 2))
    finite("loss", total)
    norm = finite("gradient norm", policy.update())
    accuracy, entropy = (totals / batch.num_tokens).tolist()
    return {
        "loss": total,
        "grad_norm": norm,
        "token_accuracy": accuracy,
        "entropy": entropy,
        "tokens": float(sum(len(row.token_ids) for row in rows)),
        "trained_tokens": float(batch.num_tokens),
    }


def run(
    config: SFTConfig,
    *,
    console: Console | None = None,
    dry_run: bool = False,
    rows: Any = None,
    eval_rows: Any = None,
    model: LoadedModel | None = None,
    on_step: OnStep = keep_going,
    resume_hint: str = RESUME_HINT,
) -> dict[str, Any]:
    """Builds the parts that ``config`` asks for and trains: `razona sft`, and the one call from Python.

    ``rows`` and ``eval_rows`` stand in for the paths (a list of dicts, a `datasets.Dataset`), ``model`` (see
    `razona.models.from_model`) for ``config.model.name``. ``dry_run`` stops before anything is written;
    ``on_step`` listens, and may stop the run; ``resume_hint`` is what to say when the run was interrupted.
    """
    config, numbers = with_precision(config)
    validate(config, eval_rows=eval_rows is not None)
    refuse_gold(config.data)
    console = console or Console()
    table = load_rows(config.data.path if rows is None else rows, split=config.data.split)
    loaded = load_model(config.model, console, lora=config.lora, seed=config.run.seed, given=model)
    refuse_frozen(loaded.name, loaded.model)
    found = fitting_demonstrations(table, loaded, config, console)
    held_out = eval_rows if eval_rows is not None else config.eval.data or None
    held_out = None if held_out is None else load_rows(held_out, split=config.data.split)
    evaluator = make_evaluator(config, loaded, held_out, console, found.demonstrations)
    source = PromptSource(found.demonstrations, seed=config.run.seed, shuffle=config.data.shuffle)
    if warning := source.warning(config.rows_per_step):
        console.note(warning)
    with make_policy(loaded, config.model, config.optimizer, total_updates=config.run.num_steps) as policy:
        header = describe(config, policy, found, evaluator, numbers)
        console.print(header)
        if dry_run:
            console.print("dry run: everything fits; nothing was trained or written.")
            return {"dry_run": True, "demonstrations": len(found.demonstrations)}

        data = "+".join(rows.fingerprint for rows in (table, held_out) if rows is not None)
        fingerprint = {"model": loaded.name, "data_fingerprint": data}
        with running(config, console, header=header, fingerprint=fingerprint, resume_hint=resume_hint) as log:
            return train(config, Parts(policy, source, evaluator, log, on_step), console)


def fitting_demonstrations(
    rows: Rows, loaded: LoadedModel, config: SFTConfig, console: Console
) -> DemonstrationSet:
    """The rows that fit the model; what was dropped is printed."""
    context = max_context(loaded.model)
    found = build_demonstrations(
        rows,
        loaded.tokenizer,
        config.data,
        max_length=config.max_length if context is None else min(config.max_length, context),
        stop_token_ids=loaded.stop_token_ids,
    )
    for notice in found.notices:
        console.note(notice)
    return found


def make_evaluator(
    config: SFTConfig,
    loaded: LoadedModel,
    rows: Rows | None,
    console: Console,
    training: Sequence[Demonstration] = (),
) -> LossEvaluator | None:
    """What measures the loss of held-out ``rows``. Says which of them are ``training`` rows too."""
    if rows is None:
        return None
    held_out = fitting_demonstrations(rows, loaded, config, console).demonstrations
    if overlap := overlap_notice(training, held_out):
        console.note(overlap)
    return LossEvaluator(held_out, budget=config.tokens_per_microbatch)


def describe(
    config: SFTConfig,
    policy: Policy,
    found: DemonstrationSet,
    evaluator: LossEvaluator | None,
    numbers: str,
) -> str:
    """The header of the run: what is trained on what, in which ``numbers``, and what is held out."""
    trained = sum(sum(d.loss_mask) for d in found.demonstrations)
    lines = [str(policy.adapter)] if policy.adapter is not None else []
    lines.append(
        f"SFT on {len(found.demonstrations)} demonstrations with {trained} trained tokens ({found.trained}); "
        f"{config.rows_per_step} rows per step, mean over the trained tokens of a step"
    )
    lines.append(f"numbers: {numbers}")
    if evaluator is not None:
        when = f"every {config.eval.every} steps and " if config.eval.every else ""
        lines.append(
            f"held out: {len(evaluator.demonstrations)} rows, their loss measured {when}after the last step; "
            f"best by {config.eval.best_metric}"
        )
    return "\n".join(lines)
