"""The command lines of docs/data.md are ones that the command takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from razona.cli import COMMANDS
from razona.config.load import load_config
from razona.data import parse_gold
from razona.tasks import gsm8k, with_task

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
LINES = re.findall(r"^razona .*$", PAGE, re.MULTILINE)


def test_there_are_some() -> None:
    assert len(LINES) == 6 and {line.split()[1] for line in LINES} == {"grpo", "eval", "select"}


@pytest.mark.parametrize("line", LINES)
def test_the_command_takes_it(line: str) -> None:
    _, command, *flags = shlex.split(line)
    config = with_task(load_config(COMMANDS[command][1], None, flags))
    assert config.data.path
    if config.data.gold:
        parse_gold(config.data.gold)


def test_what_it_says_of_gsm8k() -> None:
    for value in (gsm8k.HUB_ID, gsm8k.SYSTEM, gsm8k.GOLD, gsm8k.PROMPT_COLUMN, *gsm8k.REWARDS):
        assert f"`{value}`" in PAGE, value
