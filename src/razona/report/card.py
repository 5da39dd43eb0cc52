"""The model card of a run: README.md for the hub, made from what the run folder holds and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from razona import __version__
from razona.config import BUNDLED_MODEL, GRPOConfig, SFTConfig
from razona.models.lora import CONFIG as ADAPTER_CONFIG

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")
MAX_ROWS = 12  # of the held-out table
NOT_SHOWN = (
    "model.name", "model.device", "data.path", "data.system", "eval.data", "lora.adapter", "rewards",
    "eval.rewards",
)  # fmt: skip
"""Options that are said elsewhere in the card, or are paths of the machine it was made on."""
ALWAYS_SHOWN = (
    "model.precision", "optimizer.learning_rate", "optimizer.schedule", "run.num_steps", "run.seed",
    "prompts_per_step", "sampling.group_size", "sampling.max_completion_length", "sampling.temperature",
    "rows_per_step", "max_length",
)  # fmt: skip
LAST_FIGURES = (
    "reward", "frac_zero_std", "completion_length", "truncated", "kl", "loss", "token_accuracy", "entropy",
)  # fmt: skip


def model_card(
    model: Path,
    run: Path | None,
    repo: str,
    *,
    best: bool = False,
    license: str = "",
    tags: Sequence[str] = (),
    dataset: str = "",
    name: str = "",
) -> str:
    """The text of README.md for ``repo``, which gets the folder ``model``: the last of ``run`` or, with
    ``best``, that of its best step. Without a run the card says only what the model is (``name``: the one it
    was loaded by) and how to load it.
    """
    stored = read_config(run) if run is not None else {}
    steps = read_steps(run) if run is not None else []
    base = base_of_model(model, stored or {"model": name})
    is_adapter = (model / ADAPTER_CONFIG).is_file()
    data = [dataset] if dataset else _hub_data(stored)
    front = _front_matter(
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        license=license or ("apache-2.0" if base == BUNDLED_MODEL else None),
        datasets=data or None,
        tags=[*dict.fromkeys(["razona", *_methods(stored), *(["lora"] if is_adapter else []), *tags])],
    )
    parts = [
        f"# {repo.rpartition('/')[2]}",
        _what(base, is_adapter, stored, steps, best=best),
        _method(stored),
        _data(stored),
        _held_out(stored, steps, best=best),
        _last_step(steps),
        _hyperparameters(stored),
        _loading(model, repo, stored, is_adapter),
    ]
    return front + "\n" + "\n\n".join(part for part in parts if part) + "\n"


def is_run(folder: Path) -> bool:
    """Whether ``folder`` is that of a run, by its config.json."""
    path = folder / "config.json"
    return path.is_file() and "razona" in json.loads(path.read_text(encoding="utf-8"))


def read_config(run: Path) -> dict[str, Any]:
    """The run's config.json."""
    stored: dict[str, Any] = json.loads((run / "config.json").read_text(encoding="utf-8"))
    return stored


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; what is not a number is None."""
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def best_step(stored: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> int | None:
    """The step whose held-out figure was the best, as the run chose it; None where nothing was held out."""
    name = _best_metric(stored)
    evaluated = [(step[name], step["step"]) for step in steps if step.get(name) is not None]
    if not evaluated:
        return None
    value = (min if name == "eval/loss" else max)(value for value, _ in evaluated)
    return next(step for found, step in evaluated if found == value)


def base_of_model(model: Path, stored: Mapping[str, Any]) -> str | None:
    """The hub id that the training began from, through earlier runs on this machine; None where that is not
    known.
    """
    name = str(stored.get("model", ""))
    if (model / ADAPTER_CONFIG).is_file():
        adapter = json.loads((model / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        name = str(adapter.get("base_model_name_or_path") or name)
    folder = Path(name).expanduser()
    if name and folder.exists():
        return base_of_model(folder, read_config(folder.parent)) if is_run(folder.parent) else None
    return name if HUB_ID.fullmatch(name) else None


def _front_matter(**fields: Any) -> str:
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**fields).to_yaml()}\n---\n"


def _methods(stored: Mapping[str, Any]) -> list[str]:
    """As tags: the loop, and the objective where it is another of the family."""
    if not stored:
        return []
    if "objective" not in stored:
        return ["sft"]
    return ["grpo", re.sub(r"[^a-z0-9]+", "-", str(stored["objective"]["name"]).lower()).strip("-")]


def _what(
    base: str | None,
    is_adapter: bool,
    stored: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    *,
    best: bool,
) -> str:
    kind = "A LoRA adapter" if is_adapter else "A model"
    on = f"[{base}](https://huggingface.co/{base})" if base else "a model that is not on the hub"
    if not stored:
        return f"{kind} based on {on}." if base else f"{kind}, uploaded with razona {__version__}."
    loop = "SFT" if "objective" not in stored else stored["objective"]["name"]
    text = f"{kind}, trained from {on} with {loop} by razona {stored['razona']}."
    done, planned = len(steps), stored["config"]["run"]["num_steps"]
    if best:
        text += f" It is the model of step {best_step(stored, steps)}, the best held-out one of {done} steps."
    elif done < planned:
        text += f" The run was stopped after step {done} of {planned}."
    return text


def _method(stored: Mapping[str, Any]) -> str:
    """From the run's own header."""
    lines = stored.get("header")
    return "## What was trained, and how\n\n```text\n" + "\n".join(lines) + "\n```" if lines else ""


def _data(stored: Mapping[str, Any]) -> str:
    if not stored:
        return ""
    config = stored["config"]
    train, _, held_out = str(stored.get("data_fingerprint", "")).partition("+")
    lines = [f"- training: {_data_name(config['data']['path'], config)}, fingerprint `{train}`"]
    if held_out:
        lines.append(f"- held out: {_data_name(config['eval']['data'], config)}, fingerprint `{held_out}`")
    if config["data"]["system"]:
        lines.append(
            f"- every prompt has the system prompt {json.dumps(config['data']['system'], ensure_ascii=False)}"
        )
    return "## Data\n\n" + "\n".join(lines)


def _data_name(path: str, config: Mapping[str, Any]) -> str:
    """A hub id with its split, or the name of a file without the folders of the machine it lay on."""
    if not path:
        return "rows given from Python"
    if _is_hub_data(path):
        return f"[{path}](https://huggingface.co/datasets/{path}), split `{config['data']['split']}`"
    return f"the file `{Path(path).name}`"


def _hub_data(stored: Mapping[str, Any]) -> list[str]:
    path = stored["config"]["data"]["path"] if stored else ""
    return [path] if _is_hub_data(path) else []


def _is_hub_data(path: str) -> bool:
    is_file = path.endswith(DATA_FILES) or Path(path).expanduser().exists()
    return bool(HUB_ID.fullmatch(path)) and not is_file


def _best_metric(stored: Mapping[str, Any]) -> str:
    return (stored["config"]["eval"]["best_metric"] if stored else "") or "eval/reward"


def _held_out(stored: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], *, best: bool) -> str:
    """Every evaluation, or as many as a table can hold, the best and the last among them."""
    evaluated = [step for step in steps if any(name.startswith("eval/") for name in step)]
    if not evaluated:
        return "## Held-out figures\n\nNothing was held out." if stored else ""
    top = best_step(stored, steps)
    names = [name for name in evaluated[-1] if name.startswith("eval/") and not name.endswith("/error")]
    shown = evaluated
    if len(evaluated) > MAX_ROWS:
        places = {round(i * (len(evaluated) - 1) / (MAX_ROWS - 1)) for i in range(MAX_ROWS)}
        shown = [s for i, s in enumerate(evaluated) if i in places or s["step"] == top]
    uploaded = top if best else evaluated[-1]["step"]
    lines = ["| step | " + " | ".join(names) + " | |", "|---" * (len(names) + 2) + "|"]
    for step in shown:
        said = ["best"] * (step["step"] == top) + ["this model"] * (step["step"] == uploaded)
        figures = [_figure(step.get(name), step.get(f"{name}/error")) for name in names]
        lines.append(f"| {step['step']} | " + " | ".join(figures) + f" | {', '.join(said)} |")
    rows = "rows" if "eval/loss" in evaluated[-1] else "prompts"
    left_out = "" if shown is evaluated else f" {len(shown)} of {len(evaluated)} evaluations are shown."
    return (
        f"## Held-out figures\n\nMeans with standard errors over held-out {rows}; the best by "
        f"`{_best_metric(stored)}`.{left_out}\n\n" + "\n".join(lines)
    )


def _figure(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "not a number"
    return f"{value:.4g}" + (f" ± {error:.2g}" if error is not None else "")


def _last_step(steps: Sequence[Mapping[str, Any]]) -> str:
    if not steps:
        return ""
    last = steps[-1]
    figures = [f"{name} {_figure(last[name])}" for name in LAST_FIGURES if name in last]
    return f"In the last training step, {last['step']}: {', '.join(figures)}."


def _hyperparameters(stored: Mapping[str, Any]) -> str:
    """The usual options, and every other one that was not left at its default."""
    if not stored:
        return ""
    default = GRPOConfig() if "objective" in stored else SFTConfig()
    hidden = {
        f"run.{field.name}" for field in dataclasses.fields(default.run) if field.metadata.get("resume")
    }
    hidden = (hidden | set(NOT_SHOWN)) - set(ALWAYS_SHOWN)
    usual = dict(_flat(dataclasses.asdict(default)))
    rows = [
        f"| `{name}` | `{str(value).replace('|', chr(92) + '|')}` |"
        for name, value in _flat(stored["config"])
        if name not in hidden and (name in ALWAYS_SHOWN or _differs(value, usual.get(name)))
    ]
    return "## Hyperparameters\n\n| option | value |\n|---|---|\n" + "\n".join(rows)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _differs(value: Any, usual: Any) -> bool:
    """JSON has lists for tuples, and strings for what is infinite."""
    usual = list(usual) if isinstance(usual, tuple) else usual
    return bool(value != (str(usual) if isinstance(usual, float) and math.isinf(usual) else usual))


def _loading(model: Path, repo: str, stored: Mapping[str, Any], is_adapter: bool) -> str:
    path = model / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() and not is_adapter else {}
    sees = str((config.get("architectures") or [""])[0]).endswith("ForConditionalGeneration")
    processor = "AutoProcessor" if sees else "AutoTokenizer"
    cls = (
        "AutoPeftModelForCausalLM"
        if is_adapter
        else f"AutoModelFor{'ImageTextToText' if sees else 'CausalLM'}"
    )
    imports = (
        f"from peft import {cls}\nfrom transformers import {processor}"
        if is_adapter
        else f"from transformers import {cls}, {processor}"
    )
    return f"""## How to load it

```python
{imports}

model = {cls}.from_pretrained("{repo}")
{"processor" if sees else "tokenizer"} = {processor}.from_pretrained("{repo}")
```

or `razona generate --model {repo} --prompt "..."`."""
