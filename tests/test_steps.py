"""What loops share: the order of a step, what is kept when something raises, the signals that end a run."""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from test_resume import command, prepare
from tiny_runs import contents, grpo_config, lines, model_folder, run_grpo, run_sft, sft_config, varied

from razona.cli import main
from razona.config import EvalConfig, GRPOConfig, RunConfig
from razona.errors import NotFinite, RazonaError, RewardError
from razona.run.console import Console
from razona.run.folder import RunFolder
from razona.run.signals import Signalled
from razona.run.steps import Steps, keep_going, running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


class Weights:
    """A policy whose weights are the number of its updates."""

    def __init__(self, *, disk_full: bool = False) -> None:
        self.updates, self.disk_full = 0, disk_full

    def save(self, folder: Path) -> Path:
        if self.disk_full and folder.name == "model":
            raise OSError(errno.ENOSPC, "No space left on device")
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text(str(self.updates))
        return folder

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


def steps_of(
    out: Path, policy: Weights, *, evaluate: Any = None, on_step: Any = keep_going, **run: Any
) -> Steps:
    options = RunConfig(output_dir=str(out), **{"num_steps": 3, "print_every": 1, **run})
    log = RunFolder(out, resume=options.resume, resume_hint="Resume with: magic.")
    console = Console(file=io.StringIO())
    return Steps("TEST", options, EvalConfig(every=2), log, {"policy": policy}, evaluate, on_step, console)


def weights(out: Path) -> int:
    return int((out / "model/weights").read_text())


RECORD = {
    "prompt_id": 0,
    "prompt": "p",
    "completion": "c",
    "finish_reason": "stop",
    "rewards": {},
    "reward": 1,
}


def test_the_order_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluation, figures, completions, the listener, timings, checkpoint, and last what is printed."""
    happened: list[str] = []

    def said(name: str) -> Any:
        return lambda *_, **__: happened.append(name)

    for name in ("log", "log_rollouts", "log_timings"):
        monkeypatch.setattr(RunFolder, name, said(name))
    for name in ("metrics", "samples"):
        monkeypatch.setattr(Console, name, said(f"print {name}"))
    monkeypatch.setattr(Steps, "_save", said("checkpoint"))

    def evaluate() -> tuple[Mapping[str, float], list[Any]]:
        happened.append("evaluate")
        return {"eval/reward": 0.5}, [RECORD]

    def on_step(step: int, metrics: Mapping[str, float], records: Any) -> bool:
        assert ("eval/reward" in metrics) == (step >= 2) and records == [RECORD]
        happened.append("listener")
        return False

    by_step = []
    with steps_of(tmp_path / "run", Weights(), evaluate=evaluate, on_step=on_step) as steps:
        for step in steps:
            assert step == len(by_step)
            happened.clear()
            steps.end({"loss": 1.0}, [RECORD])
            by_step.append(list(happened))
    plain = ["log", "log_rollouts", "listener", "log_timings", "print metrics", "print samples"]
    with_eval = ["evaluate", *plain[:4], "checkpoint", "print samples", *plain[4:]]
    assert by_step == [plain, with_eval, with_eval]
    assert steps.result["eval/reward"] == 0.5 and steps.result["best_step"] == 2
    assert not steps.result["interrupted"] and steps.result["signal"] is None


def test_a_loop_that_does_not_end_its_steps(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not end this step"), steps_of(tmp_path, Weights()) as steps:
        for _ in steps:
            pass


@pytest.mark.parametrize("listens", [True, False])
def test_a_listener_ends_the_run_and_it_goes_on(tmp_path: Path, listens: bool) -> None:
    policy = Weights()
    with steps_of(tmp_path, policy, on_step=lambda step, *_: listens and step == 2) as steps:
        for _ in steps:
            policy.updates += 1
            steps.end({})
    assert steps.result["interrupted"] == listens and weights(tmp_path) == (2 if listens else 3)
    again = Weights()
    with steps_of(tmp_path, again, resume=True, num_steps=4) as steps:
        assert again.updates == (2 if listens else 3)
        assert list(steps_ended(steps)) == ([2, 3] if listens else [3])


def steps_ended(steps: Steps) -> Any:
    for step in steps:
        steps.end({})
        yield step


KINDS = {
    "razona's": lambda: RewardError("it failed."),
    "another": lambda: ValueError("it failed"),
    "a full disk": lambda: OSError(errno.ENOSPC, "it failed"),
    "ctrl-c": lambda: KeyboardInterrupt(),
    "second signal": lambda: Signalled("SIGTERM"),
}
PLACES = {
    "first": (4, "The weights before it are in"),
    "after one update": (5, "The weights after 1 update of it are in"),
    "after both": (6, "The weights after 2 updates of it are in"),
    "evaluate": (6, "The weights after it are in"),
    "on_step": (6, "The weights after it are in"),
}


def words(error: BaseException) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", ())])


class Failing:
    """A loop of two updates a step that raises ``error`` at a place of its third step."""

    def __init__(self, error: BaseException, place: str) -> None:
        self.error, self.place, self.step = error, place, -1

    def at(self, place: str) -> None:
        if self.step == 2 and place == self.place:
            raise self.error

    def evaluate(self) -> tuple[dict[str, float], tuple[()]]:
        self.at("evaluate")
        return {"eval/reward": 1.0}, ()

    def on_step(self, *_: Any) -> bool:
        self.at("on_step")
        return False

    def train(self, out: Path, policy: Weights) -> None:
        options = {"evaluate": self.evaluate, "on_step": self.on_step, "save_every": 1}
        with steps_of(out, policy, **options) as steps:
            for self.step in steps:
                self.at("first")
                policy.updates += 1
                self.at("after one update")
                policy.updates += 1
                self.at("after both")
                steps.end({})


needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="not run: notes need Python 3.11")


@needs_notes
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_raises_the_weights_are_kept(tmp_path: Path, kind: str, place: str) -> None:
    """Those of the last update, and the message says which these are; the error stays what was raised."""
    error, (updates, which) = KINDS[kind](), PLACES[place]
    with pytest.raises(type(error)) as caught:
        Failing(error, place).train(tmp_path, Weights())
    assert caught.value is error and "at" in [entry.name for entry in caught.traceback]
    assert weights(tmp_path) == updates
    said = words(error)
    assert said.startswith("step 3: it failed. The" if kind == "razona's" else str(error))
    assert "step 3: " in said and f"{which} {tmp_path / 'model'}; the newest" in said
    assert f"checkpoint is {tmp_path / 'checkpoints/step-000002'}. Resume with: magic." in said


@needs_notes
def test_weights_that_cannot_be_kept_hide_no_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        Failing(ValueError("it failed"), "first").train(tmp_path, Weights(disk_full=True))
    assert "The weights before it could not be saved ([Errno 28] No space" in words(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_nothing_in_a_step_ends_the_program(tmp_path: Path, place: str) -> None:
    """sys.exit(0) would look like a run that is done."""
    with pytest.raises(RazonaError) as caught:
        Failing(SystemExit(0), place).train(tmp_path, Weights())
    assert isinstance(caught.value.__cause__, SystemExit) and weights(tmp_path) == PLACES[place][0]
    said = str(caught.value)
    assert said.startswith(f"step 3: at ({__file__}, line ") and "SystemExit: 0" in said
    assert PLACES[place][1] in said


def test_not_finite_is_before_its_update(tmp_path: Path) -> None:
    """The gradient norm is what an update returns: it has counted, and changed nothing."""
    with pytest.raises(NotFinite, match=r"step 3: .*The weights before it are in .*would come to the same"):
        Failing(NotFinite("the gradient norm is nan"), "after one update").train(tmp_path, Weights())


def test_the_folder_is_closed(tmp_path: Path) -> None:
    config = GRPOConfig(run=RunConfig(output_dir=str(tmp_path / "run")))
    with (
        pytest.raises(ZeroDivisionError),
        running(config, Console(file=io.StringIO()), header="h", fingerprint={"a": 1}) as log,
    ):
        log.log(1, {"loss": 1.0})
        _ = 1 / 0
    assert log._files == {} and lines(log.path / "metrics.jsonl")[0]["step"] == 1


# Real loops.


def failing_at(call: int, error: BaseException) -> Any:
    """`varied`, that raises in its ``call``-th call, and after it."""
    calls = []

    def failing(*, completion_ids: list[list[int]]) -> list[float]:
        calls.append(1)
        if len(calls) >= call:
            raise error
        return varied(completion_ids=completion_ids)

    failing.__name__ = "varied"
    return failing


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(0), GeneratorExit()], ids=repr)
def test_a_reward_that_fails_loses_no_step(model: Path, tmp_path: Path, error: BaseException) -> None:
    options = {"run__num_steps": 4, "minibatches_per_rollout": 2}
    with pytest.raises(
        RewardError, match=r"step 3: .*'varied' raised .*weights before it.*no checkpoint yet"
    ):
        run_grpo(grpo_config(model, tmp_path / "run", **options), reward_fns=[failing_at(3, error)])
    run_grpo(grpo_config(model, tmp_path / "two", **{**options, "run__num_steps": 2}))
    kept, two = contents(tmp_path / "run"), contents(tmp_path / "two")
    assert kept["model/model.safetensors"] == two["model/model.safetensors"]
    assert kept["metrics.jsonl"] == two["metrics.jsonl"]


def test_a_listener_that_fails_loses_no_step(model: Path, tmp_path: Path) -> None:
    def listener(step: int, *_: Any) -> bool:
        return 1 / (2 - step) < 0

    with pytest.raises(ZeroDivisionError):
        run_sft(sft_config(model, tmp_path / "run"), on_step=listener)
    run_sft(sft_config(model, tmp_path / "two", run__num_steps=2))
    name = "model/model.safetensors"
    assert contents(tmp_path / "run")[name] == contents(tmp_path / "two")[name]


EXITS = """
import sys
calls = []
def varied(completion_ids):
    calls.append(1)
    if len(calls) > 1:
        sys.exit(0)
    return [sum(ids) % 97 / 97 for ids in completion_ids]
"""


def test_a_reward_that_exits_is_refused_by_the_command(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "work"
    prepare(folder, model, seconds=0)
    (folder / "mine.py").write_text(EXITS)
    monkeypatch.chdir(folder)
    assert main(command(3)) == 2
    said = capsys.readouterr().err
    assert "'varied' raised SystemExit: 0. It may not end the program" in said and "Resume with: the" in said
    assert (folder / "run/model/model.safetensors").exists()
