"""SIGINT, SIGTERM and SIGHUP end a run after its step; a second one at once."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_resume import command, prepare, start, wait_for_a_step
from tiny_runs import lines, model_folder

from razona.run.checkpoint import newest_checkpoint
from razona.run.console import Console
from razona.run.signals import Signalled, Signals

STUCK = """
import time
calls = []
def varied(completion_ids):
    calls.append(1)
    if len(calls) == 2:
        print("stuck", flush=True)
        time.sleep(60)
    return [sum(ids) % 97 / 97 for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("models") / "llama")


def test_only_the_main_thread_has_signals() -> None:
    def elsewhere() -> None:
        with Signals(Console(file=io.StringIO())):
            found.append(signal.getsignal(signal.SIGTERM))

    found: list[Any] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


def test_what_nohup_ignores_stays_ignored() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(Console(file=io.StringIO())) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.received == "SIGTERM"
            with pytest.raises(Signalled) as caught:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            assert caught.value.name == "SIGINT"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_signal_ends_the_step_and_saves(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    prepare(folder, model, seconds=0.2)
    process = start(folder, 200)
    wait_for_a_step(process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 143, printed
    assert "SIGTERM: finishing this step" in printed and "stopped by SIGTERM after" in printed
    assert "Resume with: the same command and --run.resume" in printed
    steps = lines(folder / "run/metrics.jsonl")[-1]["step"]
    newest, notices = newest_checkpoint(folder / "run/checkpoints")
    assert newest is not None and newest.name == f"step-{steps:06d}" and not notices
    assert (folder / "run/model/model.safetensors").exists()


def test_a_second_signal_stops_at_once(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    prepare(folder, model, seconds=0)
    (folder / "mine.py").write_text(STUCK)
    process = start(folder, 200)
    assert process.stdout is not None and any(line == "stuck\n" for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: finishing" in process.stdout.readline()
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert time.monotonic() - started < 30 and process.returncode == 143, printed
    assert "interrupted by SIGTERM." in printed and (folder / "run/model/model.safetensors").exists()
    if sys.version_info >= (3, 11):
        assert "step 2: The weights before it are in" in printed and "Resume with: the same" in printed


def test_a_terminal_that_closes(model: Path, tmp_path: Path) -> None:
    """SIGHUP comes, and nothing can be printed any more: the run is saved all the same."""
    folder = tmp_path / "work"
    prepare(folder, model, seconds=0.2)
    options = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(options.replace("save_every = 1", "save_every = 0"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, "-m", "razona", *command(200)], dict(os.environ))
    said = b""
    while b"step   1" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    steps = lines(folder / "run/metrics.jsonl")[-1]["step"]
    newest, _ = newest_checkpoint(folder / "run/checkpoints")
    assert newest is not None and newest.name == f"step-{steps:06d}" and steps < 200
    assert (folder / "run/model/model.safetensors").exists()
