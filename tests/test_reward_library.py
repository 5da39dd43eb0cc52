"""Reward functions by name, and those that come along."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st
from test_rewards import CASES, groups_of, run

from razona.errors import RewardError
from razona.rewards import (
    bind,
    completion_text,
    exact_answer,
    extract_answer,
    length,
    resolve,
    soft_overlong,
    think_format,
)


@pytest.mark.parametrize("messages", [False, True])
def test_ours_do_not_pay_for_empty_thoughts(messages):
    groups = groups_of(*CASES, messages=messages, answer="72")
    assert run(think_format(), groups) == [1.0, 0.0, 0.0, 1.0]
    assert run(exact_answer(score=2.0), groups) == [2.0, 2.0, 0.0, 0.0]


def test_resolve(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        code = (
            f"from beside_{folder.name} import VALUE\ndef judge(completions): return [VALUE]\nsetting = 3\n"
        )
        (folder / f"{folder.name}_mine.py").write_text(code + "setting = 3\n")
        (folder / f"beside_{folder.name}.py").write_text("VALUE = 0.5\n")
    (here / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p not in ("", ".")])  # as in a console script
    for spec in (f"{there}/there_mine.py:judge", "here_mine:judge", "here_mine.py:judge"):
        assert run(resolve(spec), groups_of("a")) == [0.5]
    assert resolve("here_mine.py:judge") is resolve(f"{here}/here_mine.py:judge")
    for name in ("format", "exact_answer", "length"):
        assert bind([name], columns=("answer",))[0].name == name
    for spec, message in {
        "exact_answr": "no built-in reward 'exact_answr'. Did you mean 'exact_answer'.*file.py:function",
        "here_mine.py": "no built-in reward 'here_mine.py'",
        "here_mine.py:juge": "mine.py has no function 'juge'. Did you mean 'judge'\\? It has: judge",
        "here_mine.py:setting": "has no function but a value 'setting'",
        "here_mien.py:judge": "There is no file here_mien.py .* Did you mean 'here_mine.py'",
        "broken.py:judge": "broken.py cannot be run: ZeroDivisionError",
        "no.such.module:judge": "'no.such.module' cannot be imported: ModuleNotFoundError",
    }.items():
        with pytest.raises(RewardError, match=message):
            resolve(spec)


# --- the library


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think>b", 1.0),
        ("\n<think>\na\nb\n</think>\n\nb\nc", 1.0),
        ("<think> \n </think> b", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> \n", 0.0),
        ("b <think>a</think> b", 0.0),
        ("</think>a<think> b", 0.0),
        ("<think>a</think> <think>b</think> c", 0.0),
        ("<think>a</think> b</think> c", 0.0),
        ("<think>a", 0.0),
        ("", 0.0),
    ],
)
def test_format(text, reward):
    assert run(think_format(), groups_of(text)) == [reward]


def test_format_can_ask_for_more_thought():
    assert run(
        think_format(min_characters=4), groups_of("<think>a b c</think> d", "<think>a b cd</think> d")
    ) == [0, 1]


def test_exact_answer():
    def one(text, gold, **options):
        return run(exact_answer("gold", **options), groups_of(text, gold=gold))[0]

    assert one("<think>a</think>\n 72 \n", " 72") == 1.0
    assert one("<think>a</think> 72", 72) == 1.0
    assert one("<think>a</think> 72", 72.0) == 1.0
    assert one("<think>a</think> 0.5", 0.5, score=2.0) == 2.0
    assert one("<think>72</think>", "72") == 0.0
    assert one("<think>a</think> 72 or 73", "72") == 0.0
    assert one("72", "72") == 0.0
    assert all(math.isnan(one("<think>a</think> ", gold)) for gold in (None, "", " ", math.nan))


def test_length():
    assert run(length(target=4), groups_of("", "ab", "abcd", "a" * 6, "a" * 8, "a" * 99)) == [
        0,
        0.5,
        1,
        0.5,
        0,
        0,
    ]
    with pytest.raises(RewardError, match=r"length\(target=0\): the target is a number of tokens"):
        length(target=0)


def test_soft_overlong_golden():
    """docs/algorithms/advantages.md#soft-overlong: 20480 = 16384 + a cache of 4096."""
    punish = soft_overlong(20480, 4096)
    lengths = (0, 16384, 16385, 17408, 18432, 20480, 20481)
    found = punish(completion_ids=[range(n) for n in lengths])
    assert found == pytest.approx([0, 0, -0.000244, -0.25, -0.5, -1, -1], abs=6e-7)
    assert str(found[0]) == "0.0"


@given(st.integers(1, 60), st.data())
def test_soft_overlong_is_continuous_and_falls(limit, data):
    cache = data.draw(st.integers(0, limit))
    found = soft_overlong(limit, cache)(completion_ids=[range(n) for n in range(limit + 5)])
    steps = [a - b for a, b in itertools.pairwise(found)]
    assert found[limit - cache] == 0 and found[limit + 1] == -1 and (not cache or found[limit] == -1)
    assert all(-1 <= value <= 0 for value in found)
    assert all(0 <= step <= 1 / max(1, cache) + 1e-12 for step in steps)


def test_soft_overlong_refuses_a_cache_beyond_the_limit():
    for limit, cache in ((8, 9), (8, -1), (0, 0)):
        with pytest.raises(RewardError, match=r"Give a cache of 0 to max_completion_length"):
            soft_overlong(limit, cache)


def test_helpers():
    assert completion_text("a") == "a"
    assert completion_text([{"role": "assistant", "content": "a"}]) == "a"
    for odd in (None, [], [{"role": "assistant"}], 3):
        with pytest.raises(RewardError, match="A completion is a string or a list of messages"):
            completion_text(odd)
    assert extract_answer("a</think> b c\n") == "b c"
    assert extract_answer("a</think> \n") is None
    assert extract_answer("a") is None


def test_rewards_need_no_torch():
    code = "import razona.rewards, razona.data, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
