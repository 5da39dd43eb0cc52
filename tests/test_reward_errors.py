"""What reward functions return, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
import time
import traceback

import numpy as np
import pytest
import torch
from test_rewards import groups_of, run

from razona.errors import RewardError
from razona.rewards.resolve import resolve


@pytest.mark.parametrize(
    "values",
    [
        [1, True, 0.5],
        (1, True, 0.5),
        np.array([1, 1, 0.5]),
        torch.tensor([1, 1, 0.5]),
        [np.float32(1), np.bool_(True), np.float64(0.5)],
        [torch.tensor(1), torch.tensor(True), torch.tensor(0.5)],
    ],
)
def test_numbers_of_every_kind(values):
    assert run(lambda completions: values, groups_of("a", "b", "c")) == [1.0, 1.0, 0.5]
    assert run(lambda completions: iter(values), groups_of("a", "b", "c"), timeout=5.0) == [1.0, 1.0, 0.5]


def test_none_abstains():
    values = run(lambda completions: [None, 0.0], groups_of("a", "b"))
    assert math.isnan(values[0])
    assert values[1] == 0.0


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, "returned nan. Return a finite number, or None where it cannot score"),
        (math.inf, "returned inf"),
        (torch.tensor(-math.inf), "returned -inf"),
        (10**400, "returned inf"),
        ("1.0", r"returned '1\.0' \(str\), which is not a number"),
        ([1.0], r"returned \[1\.0\] \(list\), which is not a number"),
        (1j, r"returned 1j \(complex\), which is not a number"),
        (torch.tensor([1.0, 2.0]), r"returned tensor\(.* \(Tensor\), which is not a number"),
    ],
)
def test_a_bad_value_is_named_with_row_and_completion(value, message, timeout):
    groups = groups_of("a", "b", row=7) + groups_of("c", "d" * 100, row=8)
    full = f"Reward function 'lambda' {message}.*Row 8, completion '{'d' * 77}\\.\\.\\.'"
    with pytest.raises(RewardError, match=full):
        run(lambda completions: [0.0, 0.0, 0.0, value], groups, timeout=timeout)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.0, "returned 1.0, not a list of 2 numbers, one per completion"),
        (None, "returned None, not a list of 2 numbers"),
        ("ab", "returned 'ab', not a list"),
        ({"a": 1, "b": 2}, "returned {'a': 1, 'b': 2}, not a list"),
        (torch.tensor(1.0), r"returned tensor\(1\.\), not a list"),
        ([1.0], "returned 1 rewards for 2 completions. It must return one for each"),
        ([1.0, 2.0, 3.0], "returned 3 rewards for 2 completions"),
    ],
)
def test_a_bad_result(value, message):
    with pytest.raises(RewardError, match=f"Reward function 'lambda' {message}.*Row 7, completion 'a'"):
        run(lambda completions: value, groups_of("a", "b", row=7))


async def afails(completions):
    return fails(completions)


def fails(completions):
    return [1.0 / (c != "bad") for c in completions]


@pytest.mark.parametrize("fn", [fails, afails])
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_an_exception_is_named_with_the_completion_that_brings_it_about(fn, timeout):
    groups = groups_of("a", "b", row=7) + groups_of("c", "bad", row=8)
    with pytest.raises(RewardError) as caught:
        run(fn, groups, timeout=timeout)
    assert str(caught.value).startswith(f"Reward function '{fn.__name__}' raised ZeroDivisionError: ")
    assert str(caught.value).endswith("Row 8, completion 'bad'.")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "fails" in [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)]


def leaves(completions):
    sys.exit(0)


async def aleaves(completions):
    sys.exit(0)


async def leaves_within(completions):
    await asyncio.gather(aleaves(completions))


async def cancels(completions):
    raise asyncio.CancelledError


def closes(completions):
    raise GeneratorExit


def leaves_when_read(completions):
    yield from leaves(completions)


@pytest.mark.parametrize("fn", [leaves, aleaves, leaves_within, cancels, closes, leaves_when_read])
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_no_function_ends_the_program(fn, timeout):
    with pytest.raises(RewardError, match=f"'{fn.__name__}' raised .*Row 7, completion 'a'") as caught:
        run(fn, groups_of("a", row=7), timeout=timeout)
    assert ("SystemExit: 0. It may not end the program" in str(caught.value)) == ("leaves" in fn.__name__)
    assert run(slow_constant, groups_of("a"), timeout=5.0) == [1.0]  # the event loop lives on


async def slow_constant(completions):
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)


def test_ctrl_c_in_a_function_is_ctrl_c():
    """Where functions run in this thread, it is not theirs."""

    def interrupted(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(interrupted, groups_of("a"), timeout=None)


def test_a_file_that_ends_the_program_is_an_error(tmp_path):
    (tmp_path / "mine.py").write_text("import sys\n\ndef reward(completions): ...\n\nsys.exit(0)\n")
    with pytest.raises(RewardError, match=r"mine\.py cannot be run: SystemExit: 0"):
        resolve(f"{tmp_path / 'mine.py'}:reward")


def test_a_generator_fails_like_a_function():
    def generated(completions):
        yield from fails(completions)

    assert run(generated, groups_of("a")) == [1.0]
    with pytest.raises(RewardError, match=r"'generated' raised ZeroDivisionError.*Row 7, completion 'bad'"):
        run(generated, groups_of("a", "bad", row=7), timeout=5.0)


def test_a_function_that_leaves_completions_out_is_named_with_the_first_left_out():
    with pytest.raises(RewardError, match=r"returned 1 rewards for 2 completions.*Row 7, completion 'bad'"):
        run(lambda completions: [1.0 for c in completions if c != "bad"], groups_of("a", "bad", row=7))


def test_an_exception_that_no_completion_explains():
    def together(completions):
        return [1.0 / (len(completions) == 1)] * len(completions)

    message = (
        "The call was for 2 completions, and no single one explains it; the first: Row 7, completion 'a'"
    )
    with pytest.raises(RewardError, match=message):
        run(together, groups_of("a", "b", row=7))


def test_a_signal_in_a_worker_thread_says_what_to_do():
    def alarmed(completions):
        raise ValueError("signal only works in main thread of the main interpreter")

    with pytest.raises(RewardError, match=r"signal.alarm does not work.*parsing_timeout=None"):
        run(alarmed, groups_of("a"), timeout=1.0)


def test_a_time_out_names_the_completion_that_is_stuck_from_any_thread():
    stop = threading.Event()

    def stuck(completions):
        return [float(c != "bad" or stop.wait(20)) for c in completions]

    async def astuck(completions):
        await asyncio.sleep(20)

    caught = []

    def elsewhere(fn):
        try:
            run(fn, groups_of("a", "bad", row=7), timeout=0.2)
        except RewardError as error:
            caught.append(error)

    for fn in (stuck, astuck):
        thread = threading.Thread(target=elsewhere, args=(fn,))
        thread.start()
        thread.join(timeout=10)
    stop.set()
    assert re.search(
        r"'stuck' took longer than 0.2 s \(reward_timeout\). Row 7, completion 'bad'", str(caught[0])
    )
    assert re.search(
        r"'astuck' took longer than 0.2 s .* 2 completions.*the first: Row 7, completion 'a'", str(caught[1])
    )
    assert caught[0].__cause__ is not None


def test_a_function_that_is_slow_everywhere_blames_nobody():
    def slow_everywhere(completions):
        time.sleep(0.11 * len(completions))
        return [0.0] * len(completions)

    with pytest.raises(RewardError, match=r"took longer than 0.2 s .* no single one explains it"):
        run(slow_everywhere, groups_of("a", "b", "c", "d"), timeout=0.2)


def test_a_time_out_of_the_functions_own_is_an_exception():
    async def own(completions):
        raise asyncio.TimeoutError("the judge did not answer")

    with pytest.raises(RewardError, match="raised TimeoutError: the judge did not answer"):
        run(own, groups_of("a"), timeout=5.0)


def test_a_coroutine_that_blocks_the_loop_is_a_time_out_too():
    async def blocking(completions):
        time.sleep(1.4)
        return [0.0]

    with pytest.raises(RewardError, match=r"'blocking' took longer than 0.1 s"):
        run(blocking, groups_of("a"), timeout=0.1)
    time.sleep(0.5)  # leave the shared loop free for the other tests
