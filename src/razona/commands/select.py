"""`razona select`: the rows of a data set whose prompts a model answers right neither always nor never.

What is measured is appended to ``OUTPUT.rates.jsonl`` chunk by chunk: a run that was killed goes on from
there, and another range is drawn from it without sampling again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from razona.build.data import fitting_prompts, load_table
from razona.build.model import load_model, make_engine, make_policy
from razona.config import OptimizerConfig
from razona.config.check import validate
from razona.config.commands import SelectConfig
from razona.config.names import other_version
from razona.data import Rows, first_of, output_file
from razona.errors import CheckpointError, ConfigError, DataError
from razona.rewards import bind
from razona.rollout.difficulty import Band, PassRate, Tally, measure, wilson
from razona.run.console import Console, prompt_text, shorten
from razona.run.folder import config_differences, json_line, truncate_jsonl
from razona.tasks import with_task
from razona.types import Engine, Prompt

STEP = -2  # in place of a step in the seeds
HEAD = b'{"select": {'
COLUMNS = ("pass_rate", "pass_rate_interval")


class Rates:
    """The file of what is measured: a line that says with what, then one per prompt."""

    def __init__(self, path: Path, config: SelectConfig, fingerprint: dict[str, str]) -> None:
        """Reads what is there already. CheckpointError when it was measured with another setting."""
        self.path = path
        self.found: dict[int, PassRate] = {}
        written = path.read_bytes() if path.exists() else b""
        lines = written.split(b"\n")[:-1]  # a kill may have left half a line
        if not lines and HEAD.startswith(written[: len(HEAD)]):
            path.write_bytes(json_line({"select": asdict(config), **fingerprint}))
            return
        try:
            header, *records = map(json.loads, lines)
            before = header.pop("select")
            rates = [PassRate(r["row"], r["passes"], r["scored"], r["cut"]) for r in records]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is not what razona select writes there ({type(error).__name__}: {error}). Move it "
                "away, or give another --out."
            ) from error
        if other := other_version(before, config):
            raise CheckpointError(
                f"{path} was measured by another version of razona: in its first line, {other}. Move "
                "it away to measure anew, or give another --out."
            )
        changed = [
            f"{k}: it was {header.get(k)!r} and is {v!r}"
            for k, v in fingerprint.items()
            if header.get(k) != v
        ]
        changed += config_differences(before, config)
        if changed:
            raise CheckpointError(
                f"{path} was measured with another setting, and cannot be gone on with. "
                f"{'; '.join(changed)}. Put it back, move the file away to measure anew, or give another "
                "--out."
            )
        truncate_jsonl(path, sum(len(line) + 1 for line in lines))
        self.found = {rate.prompt_id: rate for rate in rates}

    def add(self, rates: Sequence[PassRate]) -> None:
        """Appends, and makes sure that it is on the disk."""
        with self.path.open("ab") as file:
            for rate in rates:
                record = {"row": rate.prompt_id, "passes": rate.passes, "scored": rate.count, "cut": rate.cut}
                file.write(json_line(record | figures(rate)))
            file.flush()
            os.fsync(file.fileno())
        self.found |= {rate.prompt_id: rate for rate in rates}


def run(config: SelectConfig, *, console: Console, rows: Any = None) -> dict[str, Any]:
    """Measures the pass rate of every prompt and writes the rows within the range to ``config.output``, in
    their order, with all their columns and the rate. ``rows`` stand in for ``config.data.path``.

    Raises DataError when no row is in the range; what was measured stays.
    """
    config = with_task(config)
    validate(config)
    band = Band(*config.pass_rates)
    output = output_file(config.output)
    if output is None:
        raise ConfigError("output is empty: there is nowhere to write. Give --out FILE.jsonl.")
    raw = load_table(config.data.path if rows is None else rows, replace(config.data, gold=""), console)
    check_writable(raw)
    table = load_table(raw, config.data, console)
    (reward,) = bind([config.pass_reward], columns=table.renamed(config.data.rename).columns)
    loaded = load_model(config.model, console)
    fitting = fitting_prompts(table, loaded, config.data, config.sampling, console)
    prompts = first_of(fitting, config.num_prompts, seed=config.seed, shuffle=config.data.shuffle)
    for notice in reward.notices:
        console.note(notice)
    fingerprint = {"data_fingerprint": raw.fingerprint, "weights": weights_of(loaded.model)}
    rates = Rates(Path(f"{output}.rates.jsonl"), config, fingerprint)
    resumed = sum(prompt.id in rates.found for prompt in prompts)
    console.print(
        f"{config.model.name} answers {len(prompts)} prompts {config.sampling.group_size} times each, at "
        f"temperature {config.sampling.temperature:g}; it passes when {reward.name} is above "
        f"{config.pass_above:g}; kept is a pass rate in {band}"
    )
    if resumed:
        console.note(f"going on from {rates.path}: {resumed} of {len(prompts)} prompts are measured already")
    if resumed < len(prompts):
        policy = make_policy(loaded, config.model, OptimizerConfig(), total_updates=1)
        engine = make_engine(policy, loaded, console, config.sampling.engine)
        fill(rates, engine, prompts, reward, config, console)
    return finish(raw, prompts, rates, band, output, config, console) | {"resumed": resumed}


def fill(
    rates: Rates,
    engine: Engine,
    prompts: Sequence[Prompt],
    reward: Any,
    config: SelectConfig,
    console: Console,
) -> None:
    """Measures what is missing, chunk by chunk."""
    missing = [prompt for prompt in prompts if prompt.id not in rates.found]
    size = config.prompts_per_chunk
    try:
        with console.progress("select", len(prompts), len(prompts) - len(missing)) as advance:
            for first in range(0, len(missing), size):
                found = measure(
                    engine,
                    missing[first : first + size],
                    reward,
                    sampling=config.sampling,
                    rule=config,
                    seed=config.seed,
                    step=STEP,
                    reward_timeout=config.reward_timeout,
                )
                rates.add(found)
                advance(len(found))
    except KeyboardInterrupt:
        console.note(f"what is measured is in {rates.path}: the same command goes on from there.")
        raise


def finish(
    raw: Rows,
    prompts: Sequence[Prompt],
    rates: Rates,
    band: Band,
    output: Path,
    config: SelectConfig,
    console: Console,
) -> dict[str, Any]:
    """Says what was found and writes the rows that are kept."""
    samples = config.sampling.group_size
    found = sorted((rates.found[prompt.id] for prompt in prompts), key=lambda rate: rate.prompt_id)
    tally = Tally.of(found, band, samples=samples)
    console.print(tally.describe(band))
    low, high = wilson(samples // 2, samples)
    console.print(
        f"{samples} samples are a coarse measure: the 95 % interval (Wilson) of {samples // 2} passes is "
        f"{low:.2f}..{high:.2f}; that of each prompt is in {rates.path}"
    )
    if not tally.kept:
        raise DataError(
            f"No prompt of {raw.name} is of middle difficulty: {tally.describe(band)}. {tally.cure()} "
            "Another range, such as --by pass-rate 0.1..0.9, is drawn from what is measured, without "
            "sampling again."
        )
    kept = [rate for rate in found if band.holds(rate)]
    for name in COLUMNS:
        if name in raw.columns:
            console.note(f"{raw.name} has a column {name!r} already; its values are replaced.")
    inputs = {prompt.id: prompt.input for prompt in prompts}
    for rate in kept[:3]:
        low, high = wilson(rate.passes, rate.count)
        text = shorten(prompt_text(inputs[rate.prompt_id]), 200)
        console.print(f"  {rate.rate:.2f} ({low:.2f}..{high:.2f})  row {rate.prompt_id}: {text!r}")
    temporary = output.with_name(f"{output.name}.new")
    temporary.write_bytes(b"".join(json_line(raw[rate.prompt_id] | figures(rate)) for rate in kept))
    os.replace(temporary, output)
    console.print(f"{len(kept)} rows are in {output}")
    return {
        "model": config.model.name,
        "prompts": len(found),
        "samples": samples,
        **asdict(tally),
        "output": str(output),
        "rates": str(rates.path),
    }


def figures(rate: PassRate) -> dict[str, Any]:
    """The columns that a row gets."""
    return dict(zip(COLUMNS, (rate.rate, wilson(rate.passes, rate.count)), strict=True))


def check_writable(rows: Rows) -> None:
    """DataError when a row cannot be written as JSON: known before anything is sampled."""
    for index, row in enumerate(rows):
        for name, value in row.items():
            try:
                json_line({name: value})
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{rows.where(index)}: its column {name!r} holds a {type(value).__name__}, which the "
                    "output, JSON lines, has no form for. Leave the column out of the data, or make it text."
                ) from error


def weights_of(model: torch.nn.Module) -> str:
    """A hash of names, shapes and some 256 numbers of every parameter: another model, or the same one trained
    further, has another."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, flat.numel() // 256)].float().cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()
