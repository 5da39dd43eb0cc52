"""The commands of docs/data.md are ones that razona takes, the code of docs/objectives.md runs, links lead
somewhere, docs/algorithms and the tests name each other, docs/troubleshooting.md quotes the source.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import lines, model_folder

from razona.cli import COMMANDS
from razona.config.load import load_config
from razona.config.options import SHORT_FLAGS, SINGULAR
from razona.data import parse_gold
from razona.tasks import gsm8k, with_task

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/data.md").read_text(encoding="utf-8")
PAGES = sorted([ROOT / "README.md", *ROOT.glob("CONTRIBUTING.md"), *ROOT.glob("docs/**/*.md")])
TROUBLE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
LINES = re.findall(r"^razona .*$", PAGE, re.MULTILINE)


def test_there_are_some() -> None:
    assert len(LINES) == 7 and {line.split()[1] for line in LINES} == {"grpo", "eval", "select"}


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


def test_the_formula_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/objectives.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    name = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
    assert name in code and "num_steps=20" in code
    code = code.replace(name, repr(str(model_folder(tmp_path / "tiny")))).replace("steps=20", "steps=2")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    printed = capsys.readouterr().out
    assert "by mine" in printed and "advantage: custom: above_the_median" in printed
    assert "the loss is custom: soft_clip" in printed
    assert all(step["grad_norm"] > 0 for step in lines(tmp_path / "runs/razona/metrics.jsonl"))

    rewards = torch.tensor([[1.0, 2.0, 5.0], [torch.nan, 0.0, 3.0]])[..., None]
    found = names["above_the_median"](rewards, reward_weights=(1.0,), loss_mask=None)
    assert found[:, 0].tolist() == [-1.0, 0.0, 3.0, 0.0, 0.0, 3.0]
    logprobs = torch.tensor([[-1.0, -2.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    names["soft_clip"](logprobs, logprobs.detach(), torch.tensor([[3.0]]), mask).sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-3.0, -3.0, 0.0]]


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_algorithms_and_their_tests_name_each_other() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py"))
    for page in (ROOT / "docs/algorithms").glob("*.md"):
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in tests, f"{page.name} names {name}"
    cited = re.findall(r"docs/algorithms/([\w-]+\.md)#([\w-]+)", tests)
    assert len(cited) >= 5
    for name, anchor in cited:
        assert anchor in anchors(ROOT / "docs/algorithms" / name), f"a test cites {name}#{anchor}"


def test_troubleshooting_quotes_what_razona_prints() -> None:
    quotes = re.findall(r"^```\n(.*?)^```$", TROUBLE, re.DOTALL | re.MULTILINE)
    printed = "\n".join(
        str(node.value)
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert len(quotes) >= 9
    for line in "".join(quotes).splitlines():
        for part in line.removeprefix("note: ").split("…"):
            assert part in printed, part


def options_of(config: Any, prefix: str = "") -> set[str]:
    names = set()
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), prefix + field.name.replace("_", "-")
        names |= options_of(value, f"{name}.") if dataclasses.is_dataclass(value) else {f"--{name}"}
    return names


def test_the_options_that_are_named_exist() -> None:
    known = {"--json", "--dry-run", "--help", "--help-all", "--traceback", *SHORT_FLAGS, *SINGULAR}
    known |= {"--no-deps"}  # pip's
    for _, config, _ in COMMANDS.values():
        known |= options_of(config())
    for page in (ROOT / "README.md", ROOT / "docs/troubleshooting.md"):
        for option in re.findall(r"(?<![\w-])--[a-z][a-z\d.-]*[a-z\d]", page.read_text(encoding="utf-8")):
            assert option in known, f"{page.name}: {option}"
