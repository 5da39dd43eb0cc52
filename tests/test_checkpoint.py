"""Checkpoints: whole or not there, restored to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import razona.run.checkpoint as checkpoint
from razona.errors import CheckpointError
from razona.run.checkpoint import load_checkpoint, newest_checkpoint, prune, read_meta, save_checkpoint


class Box:
    """State is whatever it was given."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = state or {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype and a.shape == b.shape and a.numpy(force=True).tobytes() == b.numpy().tobytes()
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b or (a != a and b != b)


def test_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    state = {
        "weights": {"a": torch.randn(3, 4), "nested": [torch.arange(5), {"deep": torch.tensor(1.5)}]},
        "empty": torch.zeros(0, 3),
        "view": torch.arange(12.0).reshape(3, 4).T[1:],
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "numbers": [
            0.1,
            1e-320,
            -0.0,
            math.inf,
            -math.inf,
            math.nan,
            2**200,
            -(2**70),
            True,
            None,
            "año \ud83d",
        ],
        "betas": (0.9, 0.999),
        "groups": {0: {"step": 3}, 1: {}, "__tensor__": "not one"},
        "strange": {"__tensor__": "0", "more": {"__tuple__": [1]}},
    }
    save_checkpoint(tmp_path, "step-1", {"box": Box(state)}, meta={"step": 1, "best": math.nan})
    box = Box()
    meta = load_checkpoint(tmp_path / "step-1", {"box": box})
    assert same(box.state, state)
    assert math.copysign(1, box.state["numbers"][2]) == -1
    assert meta["step"] == 1 and math.isnan(meta["best"])
    assert same(read_meta(tmp_path / "step-1")["step"], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.bool])
def test_dtypes_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8).repeat(8)
    tensor = bits.bool() if dtype == torch.bool else bits.view(dtype)
    save_checkpoint(tmp_path, "step-1", {"box": Box({"x": tensor})}, meta={})
    box = Box()
    load_checkpoint(tmp_path / "step-1", {"box": box})
    assert box.state["x"].dtype == dtype
    assert torch.equal(box.state["x"].view(torch.uint8), tensor.view(torch.uint8))  # NaN payloads included


def test_tensors_that_share_memory_are_stored_and_restored(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    state = {"embed": weight, "head": weight, "row": weight[1], "column": weight.T[1]}
    save_checkpoint(tmp_path, "step-1", {"box": Box(state)}, meta={})
    box = Box()
    load_checkpoint(tmp_path / "step-1", {"box": box})
    assert all(torch.equal(box.state[name], state[name]) for name in state)
    assert not (tmp_path / "step-1" / "box.safetensors").stat().st_size < (2 * 16 + 8) * 4


numbers = st.integers() | st.floats() | st.text() | st.none() | st.booleans()
trees = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), trees))
def test_any_tree_of_numbers_and_strings_comes_back(state: dict[str, Any]) -> None:
    import json

    assert same(checkpoint._decode(json.loads(json.dumps(checkpoint._encode(state, "s", {}))), {}), state)


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"box\['a'\]\[1\] is a set, which a checkpoint cannot hold"):
        save_checkpoint(tmp_path, "step-1", {"box": Box({"a": [1, {2}]})}, meta={})
    assert newest_checkpoint(tmp_path) == (None, [])
    with pytest.raises(CheckpointError, match=r"'\.\./x' cannot name a checkpoint"):
        save_checkpoint(tmp_path, "../x", {}, meta={})


def test_missing_and_extra_objects_are_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "step-1", {"policy": Box({"a": 1}), "critic": Box()}, meta={})
    policy = Box({"a": 0})
    with pytest.raises(CheckpointError, match=r"lacks source, which this run has and it holds critic, which"):
        load_checkpoint(tmp_path / "step-1", {"policy": policy, "source": Box()})
    assert policy.state == {"a": 0}


def test_an_object_that_refuses_its_state_is_named(tmp_path: Path) -> None:
    class Picky(Box):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("other")

    save_checkpoint(tmp_path, "step-1", {"policy": Box({"a": 1})}, meta={})
    with pytest.raises(CheckpointError, match="'policy' cannot take its state back: 'other'"):
        load_checkpoint(tmp_path / "step-1", {"policy": Picky()})


def objects(value: float) -> dict[str, Box]:
    return {"policy": Box({"w": torch.full((100,), value)}), "source": Box({"n": value})}


STEPS = ("save_file", "_fsync", "_write_json", "_fingerprint", "os.rename", "os.rename.after")


@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("same_name", [False, True])
def test_killed_at_any_write_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, same_name: bool
) -> None:
    """Stop at the 1st, 2nd, ... call of each function that writes: never is a half-written one taken."""
    name = "step-1" if same_name else "step-2"
    stops = 0
    for n in range(40):
        folder = tmp_path / f"{what}{n}"
        save_checkpoint(folder, "step-1", objects(1.0), meta={"step": 1})
        with monkeypatch.context() as patch:
            stopped = stop_at(patch, what, n)
            try:
                save_checkpoint(folder, name, objects(2.0), meta={"step": 2})
            except KeyboardInterrupt:
                stops += 1
        found, _ = newest_checkpoint(folder)
        if (
            found is not None
        ):  # None: between two renames of the same name; then the aside copy holds the old one
            box, source = Box(), Box()
            meta = load_checkpoint(found, {"policy": box, "source": source})
            assert box.state["w"][0].item() == source.state["n"] == meta["step"]
        else:
            assert same_name and checkpoint.what_is_wrong(folder / ".step-1.old") is None
        save_checkpoint(folder, name, objects(2.0), meta={"step": 2})  # and the next one goes through
        assert read_meta(newest_checkpoint(folder)[0] or "")["step"] == 2
        if not stopped():
            break
    assert stops >= 1
    assert not stopped()  # the last round ran to its end: every call was stopped at once


def stop_at(patch: pytest.MonkeyPatch, what: str, n: int) -> Any:
    """Raise KeyboardInterrupt at call number ``n`` of ``what``, half-way through a write."""
    calls = 0
    name = what.removesuffix(".after")
    target = checkpoint.os if name == "os.rename" else checkpoint
    attribute = name.removeprefix("os.")
    real = getattr(target, attribute)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 == n:
            if what in ("save_file", "_write_json"):
                Path(args[0] if what == "_write_json" else args[1]).write_bytes(b'{"half')
            if what.endswith(".after"):
                real(*args, **kwargs)
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    patch.setattr(target, attribute, wrapper)
    return lambda: calls > n


def whole_run(folder: Path) -> None:
    for step in (1, 2, 10):
        save_checkpoint(folder, f"step-{step}", objects(float(step)), meta={"step": step})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "COMPLETE").unlink(), r"not written to its end \(no COMPLETE file\)"),
        (lambda path: (path / "COMPLETE").write_text("{"), "its COMPLETE file cannot be read"),
        (lambda path: (path / "policy.safetensors").unlink(), "policy.safetensors is missing"),
        (lambda path: cut(path / "policy.safetensors"), r"policy.safetensors has \d+ bytes instead of \d+"),
        (lambda path: cut(path / "meta.json"), r"meta.json has \d+ bytes"),
        (lambda path: flip(path / "policy.safetensors"), r"policy.safetensors is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_said(tmp_path: Path, damage: Any, reason: str) -> None:
    whole_run(tmp_path)
    assert newest_checkpoint(tmp_path) == (tmp_path / "step-10", [])
    damage(tmp_path / "step-10")
    found, notices = newest_checkpoint(tmp_path)
    assert found == tmp_path / "step-2"
    assert len(notices) == 1 and "step-10" in notices[0]
    with pytest.raises(CheckpointError, match=reason):
        load_checkpoint(tmp_path / "step-10", objects(0.0))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "none") == (None, [])


def test_prune_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    whole_run(tmp_path)
    save_checkpoint(tmp_path, "step-11", objects(0.0), meta={})
    save_checkpoint(tmp_path, "step-12", objects(0.0), meta={})
    (tmp_path / "step-12" / "COMPLETE").unlink()
    deleted = prune(tmp_path, 2, protect=["step-1"])
    assert sorted(path.name for path in deleted) == ["step-12", "step-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-10", "step-11"]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "step-1", objects(1.0), meta={})
    names = sorted(path.name for path in (tmp_path / "step-1").iterdir())
    assert names == ["COMPLETE", "meta.json", "policy.json", "policy.safetensors", "source.json"]
