"""The SFT loop: demonstrations -> loss on what the assistant wrote -> update. Read `train` downward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from razona.batch import collate_demonstrations, needed
from razona.config import SFTConfig
from razona.config.check import validate
from razona.console import Console
from razona.data import Demonstration, PromptSource, build_demonstrations, load_rows
from razona.log import Phases, RunFolder
from razona.losses.supervised import negative_log_likelihood
from razona.losses.weights import masked_sum, per_token
from razona.models import LoadedModel
from razona.models.quant import refuse_frozen
from razona.policy import Policy, finite
from razona.progress import (
    Interrupt,
    OnStep,
    Progress,
    finish,
    keep_going,
    keeping_the_weights,
    open_run,
    restore,
    save_run,
)
from razona.setup import load_model, make_policy, max_context, refuse_gold


@dataclass(frozen=True)
class Parts:
    """What a run is made of; all of it but the configuration is what a checkpoint holds."""

    policy: Policy
    source: PromptSource[Demonstration]
    log: RunFolder
    progress: Progress
    on_step: OnStep = keep_going

    @property
    def state(self) -> dict[str, Any]:
        return {"policy": self.policy, "source": self.source, "log": self.log, "progress": self.progress}


def train(config: SFTConfig, parts: Parts, console: Console) -> dict[str, Any]:
    """Trains from ``parts.progress.step`` to ``config.run.num_steps``. Returns the last step's metrics."""
    policy, progress = parts.policy, parts.progress
    metrics: dict[str, float] = {}
    phases = Phases()
    with (
        keeping_the_weights(parts.log, progress, policy),
        Interrupt(console) as interrupt,
        console.progress("SFT", config.run.num_steps, progress.step) as advance,
    ):
        for step in range(progress.step, config.run.num_steps):
            rows = parts.source.take(config.rows_per_step)
            with phases("train"):
                metrics = update(policy, rows, budget=config.tokens_per_microbatch)
            metrics |= {"lr": policy.learning_rate(policy.updates - 1)}
            progress.step = step + 1
            parts.log.log(step + 1, metrics)
            seconds = phases.pop()
            parts.log.log_timings(step + 1, seconds)  # before the checkpoint, which says where the file ends
            # Asked once: what stops here is saved here.
            last = step + 1 == config.run.num_steps
            stopping = parts.on_step(step + 1, metrics, ()) or last or interrupt.wanted
            if stopping or (config.run.save_every and (step + 1) % config.run.save_every == 0):
                with phases("checkpoint"):
                    save_run(parts.log, parts.state, progress, keep=config.run.keep_checkpoints)
            console.metrics(step + 1, config.run.num_steps, metrics | {"seconds": sum(seconds.values())})
            advance()
            if stopping:
                break
    return metrics | {"step": progress.step, "interrupted": progress.step < config.run.num_steps}


def update(policy: Policy, rows: Sequence[Demonstration], *, budget: int) -> dict[str, float]:
    """One optimizer update on the mean log-loss of the trained tokens of ``rows``, whatever the
    micro-batches. NotFinite, and no update, when loss or gradient are not finite.
    """
    batch = collate_demonstrations([(row.token_ids, row.loss_mask) for row in rows]).to(policy.device)
    total = 0.0
    for micro in batch.weighted(per_token).split(budget):
        logprobs = policy.logprobs(micro, temperature=1.0)  # [b, T]
        loss = masked_sum(negative_log_likelihood(logprobs, micro.loss_mask), needed(micro.weights))
        loss.backward()
        total += loss.item()
    finite("loss", total)
    norm = finite("gradient norm", policy.update())
    return {"loss": total, "grad_norm": norm, "trained_tokens": float(batch.num_tokens)}


def run(
    config: SFTConfig,
    *,
    console: Console | None = None,
    dry_run: bool = False,
    rows: Any = None,
    model: LoadedModel | None = None,
    on_step: OnStep = keep_going,
) -> dict[str, Any]:
    """Builds the parts that ``config`` asks for and trains: `razona sft`, and the one call from Python.

    ``rows`` stand in for ``config.data.path`` (a list of dicts, a `datasets.Dataset`), ``model`` (see
    `razona.models.hand_in`) for ``config.model.name``. ``dry_run`` stops before anything is written;
    ``on_step`` listens, and may stop the run.
    """
    validate(config)
    refuse_gold(config.data)
    console = console or Console()
    table = load_rows(config.data.path if rows is None else rows, split=config.data.split)
    loaded = load_model(config.model, console, lora=config.lora, seed=config.run.seed, given=model)
    refuse_frozen(loaded.name, loaded.model)
    context = max_context(loaded.model)
    found = build_demonstrations(
        table,
        loaded.tokenizer,
        config.data,
        max_length=config.max_length if context is None else min(config.max_length, context),
        stop_token_ids=loaded.stop_token_ids,
    )
    for notice in found.notices:
        console.note(notice)
    source = PromptSource(found.demonstrations, seed=config.run.seed, shuffle=config.data.shuffle)
    if warning := source.warning(config.rows_per_step):
        console.note(warning)
    policy = make_policy(loaded, config.model, config.optimizer, total_updates=config.run.num_steps)
    trained = sum(sum(d.loss_mask) for d in found.demonstrations)
    if policy.adapter is not None:
        console.print(str(policy.adapter))
    console.print(
        f"SFT on {len(found.demonstrations)} demonstrations with {trained} trained tokens (the answers and "
        f"their stop tokens); {config.rows_per_step} rows per step, mean over the trained tokens of a step"
    )
    if dry_run:
        console.print("dry run: everything fits; nothing was trained or written.")
        return {"dry_run": True, "demonstrations": len(found.demonstrations)}

    log = open_run(config, console, model=loaded.name, data_fingerprint=table.fingerprint)
    parts = Parts(policy, source, log, Progress(), on_step)
    restore(log, parts.state, console)
    try:
        result = train(config, parts, console)
        policy.save(log.path / "model")
    finally:
        policy.release()
    return finish(log, parts.progress, result, console)
