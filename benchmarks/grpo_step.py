"""Seconds and memory of one GRPO step: razona beside TRL, on the same machine, in the same minutes.

    python benchmarks/grpo_step.py --trl-python .venv-bench/bin/python
    python benchmarks/grpo_step.py --case G=8x128 --repeats 5 --json
    python benchmarks/grpo_step.py --lora 16      # both train a LoRA of that rank on all linear layers

Every measurement is a process of its own (peak memory is the process's), the parties take turns, and figures
are medians over all measured steps. All parties get the same prompts, lengths, threads and GOMP_SPINCOUNT. A
step is generation, reward, forward and backward, optimizer. The limit is that of `limit.py`, from speeds
measured between the processes. Progress goes to stderr; with --json the last line of stdout is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cases import CASES, Case
from child import PHASES
from limit import Limit, Machine, Work, limit, shape_of

HERE = Path(__file__).resolve().parent
SAVE_MODEL = """
import sys, torch
from razona import models
from razona.config import BUNDLED_MODEL
loaded = models.load(BUNDLED_MODEL, dtype=torch.bfloat16)
models.save(loaded.model, loaded.tokenizer, sys.argv[1])
"""


@dataclass(frozen=True)
class Party:
    """A contestant: the command that runs one of its processes."""

    name: str
    command: tuple[str, ...]


def parties(trl_python: str) -> list[Party]:
    trl = (trl_python, str(HERE / "trl_step.py"))
    return [
        Party("razona", (sys.executable, str(HERE / "razona_step.py"))),
        Party("trl_default", trl),
        Party("trl_bf16", (*trl, "--pure-bf16")),
    ]


def last_json(command: Sequence[str], threads: int) -> dict[str, Any]:
    """Run a process and read the JSON object in its last line. RuntimeError with its stderr when it fails."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "3000",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measure_machine(threads: int) -> Machine:
    return Machine(**last_json([sys.executable, str(HERE / "limit.py"), str(threads)], threads))


def measure_case(
    name: str, contestants: Sequence[Party], model: str, options: argparse.Namespace
) -> tuple[dict[str, list[dict[str, Any]]], list[Machine]]:
    """The processes' reports by party, and the machine's speeds as measured in between."""
    runs: dict[str, list[dict[str, Any]]] = {party.name: [] for party in contestants}
    machines = []
    for repeat in range(options.repeats):
        for party in contestants:
            work = ("--model", model, "--case", name, "--steps", str(options.steps))
            work += ("--lora", str(options.lora))
            run = last_json([*party.command, *work, "--threads", str(options.threads)], options.threads)
            runs[party.name].append(run)
            seconds = median(step["step"] for step in run["steps"])
            say(f"{name}  {repeat + 1}/{options.repeats}  {party.name:12} {seconds:7.2f} s a step")
        machines.append(measure_machine(options.threads))
        check_same_work(name, CASES[name], runs)
    return runs, machines


def check_same_work(name: str, case: Case, runs: dict[str, list[dict[str, Any]]]) -> list[Work]:
    """The tokens of one step, or RuntimeError when the parties did not do the same."""
    done = {(tuple(r["prompt_tokens"]), tuple(r["completion_tokens"])) for rs in runs.values() for r in rs}
    if len(done) != 1:
        raise RuntimeError(f"{name}: the parties had different prompts or lengths: {sorted(done)}")
    prompts, completions = done.pop()
    if completions != (case.length,) * (len(case.questions) * case.group_size):
        raise RuntimeError(
            f"{name}: completions should all have {case.length} tokens, they have {completions}"
        )
    return [Work(tokens, (case.length,) * case.group_size) for tokens in prompts]


def summarise(runs: dict[str, list[dict[str, Any]]], bound: Limit) -> dict[str, Any]:
    """Medians by party, and razona against the others and against the limit."""
    seconds = {
        name: {part: median(step[part] for r in rs for step in r["steps"]) for part in ("step", *PHASES)}
        for name, rs in runs.items()
    }
    memory = {name: median(r["peak_rss"] for r in rs) / 1e9 for name, rs in runs.items()}
    step = seconds["razona"]["step"]
    return {
        "speedup_vs_trl_default": seconds["trl_default"]["step"] / step,
        "speedup_vs_trl_bf16": seconds["trl_bf16"]["step"] / step,
        "memory_vs_trl_default": memory["razona"] / memory["trl_default"],
        "fraction_of_limit": bound.total / step,
        "seconds": seconds,
        "peak_rss_gb": memory,
        "limit_seconds": {**asdict(bound), "step": bound.total},
    }


def table(name: str, result: dict[str, Any]) -> str:
    """A case as text: one line a party, the limit last."""
    lines = [f"\n{name:14}{'step s':>9}" + "".join(f"{part:>11}" for part in PHASES) + f"{'peak GB':>10}"]
    for party, seconds in result["seconds"].items():
        parts = "".join(f"{seconds[part]:11.2f}" for part in PHASES)
        lines.append(f"  {party:12}{seconds['step']:9.2f}{parts}{result['peak_rss_gb'][party]:10.2f}")
    bound = result["limit_seconds"]
    phases = (bound["prefill"] + bound["decode"], 0.0, bound["train"], bound["optimizer"])
    lines.append(f"  {'limit':12}{bound['step']:9.2f}" + "".join(f"{part:11.2f}" for part in phases))
    lines.append(
        f"  razona: {result['speedup_vs_trl_default']:.2f} times as fast as TRL at its defaults, "
        f"{result['speedup_vs_trl_bf16']:.2f} times as fast as TRL in pure bf16 without checkpointing,\n"
        f"  {result['memory_vs_trl_default']:.2f} of the memory of TRL's defaults, "
        f"{result['fraction_of_limit']:.0%} of the limit"
    )
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Seconds and memory of one GRPO step, razona beside TRL.")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES), help="default: all")
    parser.add_argument("--repeats", type=int, default=3, help="processes per party and case")
    parser.add_argument(
        "--steps", type=int, default=2, help="measured steps per process, after one to warm up"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lora", type=int, default=0, help="rank of a LoRA that is trained; 0: every weight")
    parser.add_argument("--model", help="a model folder; default: the bundled model, saved for the run")
    parser.add_argument("--trl-python", default=str(HERE.parent / ".venv-bench" / "bin" / "python"))
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args(arguments)
    if not Path(options.trl_python).exists():
        parser.error(
            f"no interpreter at {options.trl_python}: `make bench` prepares one, or give --trl-python"
        )
    if options.repeats < 1 or options.steps < 1:
        parser.error("--repeats and --steps must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    measured: dict[str, dict[str, list[dict[str, Any]]]] = {}
    machines = [measure_machine(options.threads)]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or folder
        if not options.model:
            subprocess.run([sys.executable, "-c", SAVE_MODEL, folder], check=True, stdout=sys.stderr)
        shape = shape_of(json.loads((Path(model) / "config.json").read_text()), lora=options.lora)
        for name in options.case:
            measured[name], speeds = measure_case(name, parties(options.trl_python), model, options)
            machines += speeds
    # What the machine can do is the best it has shown: anything less was a neighbour's doing.
    machine = Machine(max(m.flops for m in machines), max(m.bandwidth for m in machines))
    results = {}
    for name, runs in measured.items():
        results[name] = summarise(runs, limit(shape, check_same_work(name, CASES[name], runs), machine))
        print(table(name, results[name]), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        settings = {name: getattr(options, name) for name in ("repeats", "steps", "threads", "lora")}
        print(json.dumps({"cases": results, "machine": asdict(machine), **settings}))


if __name__ == "__main__":
    main()
