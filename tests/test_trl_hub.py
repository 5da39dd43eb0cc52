"""push_to_hub of the trainers, against a hub on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, use_hub
from peft import LoraConfig
from test_push import front_matter, of_folder
from test_trl_trainer import EVAL
from tiny_runs import ROWS
from trl_helpers import tiny_folder, trainer

from razona.errors import ConfigError, HubError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_push_to_hub(folder: Path, tmp_path: Path, hub: Hub) -> None:
    """Before training: the model as it is, under the name of output_dir."""
    made = trainer(folder, tmp_path / "grpo-out")
    commit = made.push_to_hub("hello")
    assert str(commit) == f"{hub.url}/me/grpo-out/commit/{'c' * 40}" and commit.oid == "c" * 40
    assert hub.repos["me/grpo-out"]["commits"] == [("main", "hello")]
    assert not hub.repos["me/grpo-out"]["private"]
    arrived = hub.files("me/grpo-out")
    card = arrived.pop("README.md").decode()
    made.save_model(str(tmp_path / "saved"))
    assert arrived == of_folder(tmp_path / "saved") and "model.safetensors" in arrived
    assert "# grpo-out" in card and "with GRPO" not in card


def test_the_fields_of_an_upload(
    folder: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(hub, monkeypatch, token=None)
    fields = {
        **EVAL, "load_best_model_at_end": True, "push_to_hub": True, "hub_model_id": "me/mine",
        "hub_token": "hf_writes", "hub_private_repo": True, "hub_revision": "dev",
    }  # fmt: skip
    made = trainer(folder, tmp_path / "out", fields=fields, eval_dataset=ROWS[:3])
    made.train()
    repo = hub.repos["me/mine"]
    assert repo["private"] and repo["commits"] == [("dev", "End of training")]
    card = hub.files("me/mine")["README.md"].decode()
    assert "with GRPO by razona" in card and " optimises: 1 x varied, by GRPO" in card
    assert f"It is the model of step {made.state.best_global_step}, the best held-out one of 2 steps." in card
    made.push_to_hub(revision="other", tags="maths", dataset_name="me/sums")
    assert repo["commits"][1] == ("other", "End of training")
    head = front_matter(hub.files("me/mine")["README.md"].decode())
    assert head["tags"] == ["razona", "grpo", "maths"] and head["datasets"] == ["me/sums"]
    made.create_model_card(model_name="me/named", tags=["a", "b"])
    written = (tmp_path / "out/README.md").read_text()
    assert "# named" in written and front_matter(written)["tags"] == ["razona", "grpo", "a", "b"]
    with pytest.raises(ConfigError, match=r"push_to_hub\(blocking=False\) is not supported"):
        made.push_to_hub(blocking=False)


def test_what_would_be_refused_is_refused_before_the_training(
    folder: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []

    def counted(completions: list[str], trainer_state: Any) -> list[float]:
        steps.append(trainer_state.global_step)
        return [0.0] * len(completions)

    for token, error in ((None, "There is no token"), ("hf_wrong", "with 401"), ("hf_reads", "with 403")):
        use_hub(hub, monkeypatch, token=token)
        fields = {"push_to_hub": True, "hub_model_id": "me/x"}
        with pytest.raises(HubError, match=error):
            trainer(folder, tmp_path / "out", fields=fields, reward_funcs=counted).train()
    hub.add("me/open")
    use_hub(hub, monkeypatch)
    fields = {"push_to_hub": True, "hub_model_id": "me/open", "hub_private_repo": True}
    with pytest.raises(ConfigError, match="is on the hub already, and public"):
        trainer(folder, tmp_path / "out", fields=fields, reward_funcs=counted).train()
    assert steps == [] and not (tmp_path / "out").exists()


def test_an_adapter(folder: Path, tmp_path: Path, hub: Hub) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear")
    made = trainer(folder, tmp_path / "out", fields={"push_to_hub": True}, peft_config=lora)
    made.train()
    arrived = hub.files("me/out")
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= arrived.keys()
    assert "model.safetensors" not in arrived
    head = front_matter(arrived["README.md"].decode())
    assert head["library_name"] == "peft" and head["tags"] == ["razona", "grpo", "lora"]
