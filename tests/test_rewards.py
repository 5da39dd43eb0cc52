"""The reward protocol and its errors."""

from __future__ import annotations

import asyncio
import functools
import math
import runpy
import threading
import time
from pathlib import Path

import pytest

from razona.errors import RewardError
from razona.rewards import (
    bind,
    score,
)
from razona.types import Completion, Group, Prompt

CASES = [
    "<think>48 en abril, la mitad en mayo: 24. Total 72.</think> 72",
    "<think></think> 72",
    "La respuesta es 72",
    "<think>48 + 24</think> 84",
]


def groups_of(*texts, row=0, messages=False, **columns):
    given = [{"role": "user", "content": "?"}] if messages else "?"
    prompt = Prompt(id=row, input=given, token_ids=(1,), columns={"prompt": given, **columns})
    return [Group(prompt, tuple(Completion((5,) * len(t), (0.0,) * len(t), t, "stop", 0) for t in texts))]


def run(fn, groups, *, timeout=None, **options):
    bound = bind([fn], columns=tuple(groups[0].prompt.columns), **options)
    return [row[0] for row in score(bound, groups, timeout=timeout)]


# --- exercise 2 of the text, as printed

COURSE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "course_rewards.py"))
reward_formato, reward_correctitud = COURSE["reward_formato"], COURSE["reward_correctitud"]


@pytest.mark.parametrize("messages", [False, True])
def test_the_functions_of_the_text_run_as_printed(messages):
    groups = groups_of(*CASES, messages=messages, respuesta_correcta="72")
    bound = bind([reward_formato, reward_correctitud], columns=("prompt", "respuesta_correcta"))
    assert [b.name for b in bound] == ["reward_formato", "reward_correctitud"]
    assert list(zip(*score(bound, groups), strict=True)) == [(1.0, 1.0, 0.0, 1.0), (2.0, 2.0, 0.0, 0.0)]


def test_question_4_of_the_text_is_an_error_before_anything_is_generated():
    def reward(completions, respuesta_correcta, **kwargs):
        raise AssertionError("must not be called")

    with pytest.raises(RewardError) as caught:
        bind([reward], columns=("prompt", "respuesta"))
    assert str(caught.value) == (
        "Reward function 'reward' needs 'respuesta_correcta', and the data has no column of that name. "
        "Columns: prompt, respuesta; always there: prompts, completions, completion_ids. "
        "Did you mean 'respuesta'? Give the parameter the exact name of a column, or rename the column: "
        "--data.rename COLUMN=respuesta_correcta."
    )
    with pytest.raises(RewardError, match=r"Did you mean 'completions'?"):
        bind([lambda completion: 0], columns=("prompt",))


# --- the protocol


def test_columns_arrive_by_name_repeated_per_completion():
    seen = {}

    def takes_all(**kwargs):
        seen.update(kwargs)
        return [0] * len(kwargs["completions"])

    groups = groups_of("a", "bc", row=3, answer="x") + groups_of("d", row=4, answer="y")
    run(takes_all, groups)
    assert seen == {
        "prompts": ["?", "?", "?"],
        "prompt": ["?", "?", "?"],
        "completions": ["a", "bc", "d"],
        "completion_ids": [[5], [5, 5], [5]],
        "answer": ["x", "x", "y"],
    }
    run(takes_all, groups_of("a", messages=True))
    assert seen["completions"] == [[{"role": "assistant", "content": "a"}]]
    assert seen["prompts"] == [[{"role": "user", "content": "?"}]]


def test_without_kwargs_a_function_gets_what_it_names():
    def only(answer, prompts):
        return [len(a) + len(p) for a, p in zip(answer, prompts, strict=True)]

    assert run(only, groups_of("a", "b", answer="xyz")) == [4.0, 4.0]


def test_what_a_function_does_to_its_lists_stays_with_it():
    def greedy(completions, answer, **kwargs):
        values = [float(len(c[0]["content"])) for c in completions]
        completions[0][0]["content"] = ""
        kwargs["prompts"][0][0]["content"] = ""
        completions.clear()
        answer.clear()
        return values

    groups = groups_of("ab", messages=True, answer="x")
    bound = bind([greedy, greedy], columns=("prompt", "answer"))
    assert score(bound, groups) == [[2.0, 2.0]]
    assert groups[0].prompt.input[0]["content"] == "?"


class Judge:
    def __init__(self, value=1.0):
        self.value = value

    def __call__(self, completions):
        return [self.value] * len(completions)


class AsyncJudge(Judge):
    async def __call__(self, completions):
        return super().__call__(completions)


async def slow(completions, seconds=0.2):
    await asyncio.sleep(seconds)
    return [1.0] * len(completions)


def test_callables_of_every_kind():
    kinds = [Judge(2.0), AsyncJudge(3.0), Judge(4.0).__call__, lambda completions: [5.0], slow]
    kinds += [functools.partial(slow, seconds=0.0), functools.partial(Judge(6.0))]
    for timeout in (None, 5.0):
        assert score(bind(kinds, columns=()), groups_of("a"), timeout=timeout) == [[2, 3, 4, 5, 1, 1, 6]]


def test_a_partial_keeps_what_it_fixed_though_a_column_has_the_name():
    def value(completions, answer, **kwargs):
        assert "answer" not in kwargs
        return [float(answer)] * len(completions)

    assert run(functools.partial(value, answer=7), groups_of("a", answer=1)) == [7.0]


def test_coroutine_functions_run_at_the_same_time_and_inside_a_running_loop():
    bound = bind([slow] * 5, columns=())

    async def notebook():
        return score(bound, groups_of("a"), timeout=5.0)

    start = time.monotonic()
    assert asyncio.run(notebook()) == [[1.0] * 5]
    assert time.monotonic() - start < 0.8


def test_coroutine_functions_keep_one_event_loop():
    loops = []

    async def which(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0]

    run(which, groups_of("a"))
    run(which, groups_of("a"))
    assert loops[0] is loops[1]


def test_plain_functions_run_here_when_there_is_no_limit():
    def where(completions):
        return [threading.current_thread() is threading.main_thread()]

    assert run(where, groups_of("a")) == [1.0]
    assert run(where, groups_of("a"), timeout=0) == [1.0]
    assert run(where, groups_of("a"), timeout=5.0) == [0.0]


@pytest.mark.parametrize("name", ["reward", "truncated", "completion_length", "format/std"])
def test_display_names_of_other_series_are_refused(name):
    """As eval/reward would be the function's mean and the weighted sum in turn."""

    def judge(completions):
        return []

    message = rf"'{name}', and its figures, such as eval/{name}, would fall together .*__name__ = 'another'"
    with pytest.raises(RewardError, match=message):
        bind([judge], columns=(), names=[name])
    judge.__name__ = name
    with pytest.raises(RewardError, match=message):
        bind([judge], columns=())
    judge.__name__ = f"my_{name.replace('/', '_')}"
    assert bind([judge], columns=())[0].name == judge.__name__


def test_display_names_are_unique():
    def judge(completions):
        return []

    def judge_2(completions):
        return []

    fns = [
        judge,
        judge,
        judge_2,
        lambda completions: [],
        lambda completions: [],
        Judge(),
        functools.partial(judge),
    ]
    names = [b.name for b in bind(fns, columns=())]
    assert names == ["judge", "judge_2", "judge_2_2", "lambda", "lambda_2", "Judge", "judge_3"]
    assert [b.name for b in bind(fns[:2], columns=(), names=["a", "b"])] == ["a", "b"]
    with pytest.raises(RewardError, match="Reward names must differ, and these do not: a, a"):
        bind(fns[:2], columns=(), names=["a", "a"])
    with pytest.raises(RewardError, match="There are 2 reward functions and 1 names"):
        bind(fns[:2], columns=(), names=["a"])


def test_weights():
    assert [b.weight for b in bind(["format", "length"], columns=())] == [1.0, 1.0]
    assert [b.weight for b in bind(["format", "length"], columns=(), weights=(2, 0))] == [2.0, 0.0]
    with pytest.raises(RewardError, match=r"There are 2 reward functions and 1 weights. Give one for each"):
        bind(["format", "length"], columns=(), weights=(2,))
    with pytest.raises(RewardError, match="A reward weight is nan"):
        bind(["format"], columns=(), weights=(math.nan,))


def test_a_default_that_no_column_feeds_is_noticed():
    def judge(completions, answr="72", *, prompts=None):
        return []

    (bound,) = bind([judge], columns=("answer",))
    assert bound.notices == (
        "Reward function 'judge': no column feeds its parameter 'answr', which stays at its default '72'. "
        "Did you mean 'answer'?",
    )
    assert bind([functools.partial(judge, answr="1")], columns=("answer",))[0].notices == ()


def positional(completions, /):
    return []


@pytest.mark.parametrize(
    ("fns", "columns", "message"),
    [
        ([], (), "No reward function was given"),
        ([Judge], (), "Reward 'Judge' is <class .*It must be a function or a callable object"),
        ([3], (), "Reward 'int' is 3"),
        ([positional], (), "'positional' takes 'completions' by position only"),
        ([dict.fromkeys], (), "does not say which parameters it takes|by position only"),
        (
            [Judge()],
            ("completions",),
            "has a column 'completions'.*--data.rename completions=data_completions",
        ),
        (["exact_answer"], ("question", "answers"), "'exact_answer' needs 'answer'.*Did you mean 'answers'"),
    ],
)
def test_what_cannot_be_bound(fns, columns, message):
    with pytest.raises(RewardError, match=message):
        bind(fns, columns=columns)
