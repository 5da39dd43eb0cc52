"""The ``razona`` command: reads options, starts the part that does the work, says how it ended.

Exit codes: 0 done, 1 the reader of stdout went away, 2 refused (a message on stderr); ended by a signal, as a
shell has it, 130 SIGINT (Ctrl-C), 143 SIGTERM, 129 SIGHUP.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from razona import __version__
from razona.config import (
    DemoConfig,
    EvaluateConfig,
    GenerateConfig,
    GRPOConfig,
    MergeConfig,
    PushConfig,
    SelectConfig,
    SFTConfig,
)
from razona.config.check import validate
from razona.config.load import load_config
from razona.errors import ConfigError, RazonaError, nearest

COMMANDS: dict[str, tuple[str, type, str]] = {
    "grpo": (
        "razona.train.grpo",
        GRPOConfig,
        "train with GRPO and its family, on prompts and rewards",
    ),
    "sft": ("razona.train.sft", SFTConfig, "train on demonstrations"),
    "generate": ("razona.commands.generate", GenerateConfig, "sample completions"),
    "eval": ("razona.commands.evaluate", EvaluateConfig, "score a model on a data set, with error bars"),
    "select": ("razona.commands.select", SelectConfig, "keep the prompts that a model gets right sometimes"),
    "merge": (
        "razona.commands.merge",
        MergeConfig,
        "make one model of a LoRA adapter and its base: razona merge RUN",
    ),
    "push": (
        "razona.commands.push",
        PushConfig,
        "upload a run's model with a card: razona push RUN OWNER/NAME",
    ),
    "demo": ("razona.commands.demo", DemoConfig, "train a real 135M model on this machine, in minutes"),
}
"""Command -> (module whose run(config, ...) does it, its options, what it does)."""

DRY_RUNS = ("grpo", "sft", "push")
WITHOUT_NAMES = {"merge": ("--adapter",), "push": ("--folder", "--repo")}
"""What a command cannot do without may be given first, without its name."""

HELP = f"""usage: razona COMMAND [run.toml] [options]

{{commands}}
  {"explain":<10}the numbers behind a step: razona explain advantage 3 1 0 3

Every command takes --json (progress on stderr, the last line of stdout one JSON object) and --traceback.
grpo, sft and push take --dry-run: everything up to the first step or upload, and nothing written.
An option is spelled alike in Python, in TOML and as a flag: sampling.group_size is --sampling.group-size.
razona COMMAND --help lists those that people use, --help-all every one.

Start with: razona demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    as_json, dry_run, traceback = (_take(args, flag) for flag in ("--json", "--dry-run", "--traceback"))
    traceback = traceback or os.environ.get("RAZONA_TRACEBACK") == "1"
    try:
        return _dispatch(args, as_json=as_json, dry_run=dry_run)
    except RazonaError as error:
        if traceback:
            raise
        print(f"razona: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # razona ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # no such folder, no right to write, disk full
        if traceback:
            raise
        print(f"razona: {_of_a_file(error)}{_notes(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        name = getattr(error, "name", "SIGINT")  # see razona.run.signals.Signalled
        print(f"razona: interrupted by {name}.{_notes(error)}", file=sys.stderr)
        return _exit_code(name)


def _dispatch(args: list[str], *, as_json: bool, dry_run: bool) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        lines = [f"  {name:<10}{text}" for name, (_, _, text) in COMMANDS.items()]
        print(HELP.format(commands="\n".join(lines)), end="")
        return 0
    if args[0] == "--version":
        print(f"razona {__version__}")
        return 0
    command, *rest = args
    if dry_run and command not in DRY_RUNS:
        raise ConfigError(
            f"--dry-run belongs to {', '.join(DRY_RUNS)}; razona {command} has none. Leave it out."
        )
    if command == "explain":
        return _explain(rest, as_json=as_json)
    if command not in COMMANDS:
        names = [*COMMANDS, "explain"]
        raise ConfigError(
            f"unknown command '{command}'.{nearest(command, names)} Commands: {', '.join(names)}."
        )
    names = list(WITHOUT_NAMES.get(command, ()))
    given = list(itertools.takewhile(lambda word: not word.startswith("-"), rest[: len(names)]))
    rest[: len(given)] = [word for pair in zip(names, given, strict=False) for word in pair]
    return _run(command, rest, as_json=as_json, dry_run=dry_run)


def _run(command: str, args: list[str], *, as_json: bool, dry_run: bool) -> int:
    """Load the options, then the module (and with it torch), and run it."""
    module, cls, _ = COMMANDS[command]
    toml_path = args.pop(0) if args and not args[0].startswith("-") else None
    config: Any = load_config(cls, toml_path, args, prog=f"razona {command} [run.toml]")
    _require_inputs(command, config)
    from razona.run.console import Console  # rich takes its time: --help has ended before

    options = {"dry_run": dry_run} if command in DRY_RUNS else {}
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        console = Console(as_json)
        result = importlib.import_module(module).run(config, console=console, **options)
    console.result(_finite(result))
    return _exit_code(result.get("signal") or "SIGINT") if result.get("interrupted") else 0


def _require_inputs(command: str, config: Any) -> None:
    """Raise ConfigError for what the command cannot do without; Python callers may pass objects instead."""
    from razona.tasks import with_task

    config = with_task(config) if hasattr(config, "data") else config
    if command == "generate" and not config.prompts and not config.data.path:
        raise ConfigError('razona generate has no prompts. Give --prompt "TEXT" (repeatable) or --data FILE.')
    if command in ("grpo", "sft", "eval", "select") and not config.data.path:
        raise ConfigError(
            f"razona {command} has no data: data.path is empty. "
            "Give --data FILE (.jsonl, .json, .csv, .parquet) or a hub id."
        )
    if command in ("grpo", "eval") and not config.rewards:
        raise ConfigError(
            f"razona {command} has no reward function: rewards is empty. Give --reward NAME (repeatable): "
            "format, exact_answer, length, or path/to/file.py:function."
        )
    if command == "merge" and not config.adapter:
        raise ConfigError("razona merge has no adapter. Say which: razona merge runs/first.")
    if command == "push" and not (config.folder and config.repo):
        raise ConfigError(
            f"razona push has no {'repository' if config.folder else 'run'}. Say what goes where: "
            "razona push runs/first OWNER/NAME."
        )
    validate(config, eval_rows=False)


def _explain(args: list[str], *, as_json: bool) -> int:
    from razona.commands import explain

    if not args or "-h" in args or "--help" in args:
        print("usage: razona explain advantage REWARD REWARD ... [--eps 1e-4] [--others REWARD ...] [--json]")
        return 0
    text, result = explain.run(args)
    print(text, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(result))
    return 0


def _of_a_file(error: OSError) -> str:
    """An error of the system in words: the path, what is wrong, where to look."""
    if error.filename is None:
        return f"the system refused: {error}. --traceback says where."
    return (
        f"{error.filename}: {error.strerror}. Give a path that exists or can be made, and that you may use."
    )


def _notes(error: BaseException) -> str:
    """What was added to the error on its way: where the weights are."""
    return "".join(f" {note}" for note in getattr(error, "__notes__", ()))


def _exit_code(name: str) -> int:
    """Of a program that a signal ended."""
    return 128 + signal.Signals[name]


def _finite(value: Any) -> Any:
    """``value`` with nan and inf as null: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _take(args: list[str], flag: str) -> bool:
    """Whether ``flag`` is among ``args``; it is removed."""
    found = flag in args
    args[:] = [arg for arg in args if arg != flag]
    return found


if __name__ == "__main__":
    sys.exit(main())
