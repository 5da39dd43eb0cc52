"""`razona push` against a hub on this machine: what arrives, the card, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hub_server import Hub, use_hub
from test_sft_loop import TALKS
from tiny_runs import grpo_config, lines, model_folder, run_grpo, run_sft, sft_config

from razona import __version__
from razona.cli import main
from razona.commands.merge import run as merge
from razona.config import BUNDLED_MODEL
from razona.models.resolve import Source
from razona.report.card import model_card

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A GRPO run with LoRA on a model by its hub id, an SFT run, and the base."""
    root = tmp_path_factory.mktemp("runs")
    base = model_folder(root / "base")
    with pytest.MonkeyPatch.context() as patch:
        original = sys.modules["razona.models.load"].resolve  # type: ignore[attr-defined]
        patch.setattr(
            sys.modules["razona.models.load"],
            "resolve",
            lambda name, **_: Source(base) if name == BUNDLED_MODEL else original(name),
        )
        config = grpo_config(
            Path(BUNDLED_MODEL), root / "grpo", run__num_steps=3, lora__r=4, optimizer__learning_rate=3e-2,
            eval__every=1, objective__kl_coef=0.1, data__system="Think first.",
        )  # fmt: skip
        run_grpo(config, eval_rows=[{"prompt": f"Say {i}:"} for i in range(6)])
    sft = sft_config(base, root / "sft", run__num_steps=6, optimizer__learning_rate=3e-2, eval__every=1)
    run_sft(sft, rows=TALKS[:4], eval_rows=TALKS[4:])
    return {"base": base, "grpo": root / "grpo", "sft": root / "sft"}


def of_folder(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def front_matter(card: str) -> dict[str, Any]:
    _, head, _ = card.split("---\n", 2)
    return yaml.safe_load(head)  # type: ignore[no-any-return]


def test_what_arrives_is_the_folder_and_the_card(runs: dict[str, Path], hub: Hub, capsys: Captured) -> None:
    assert main(["push", str(runs["grpo"]), "me/thinker", "--private", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    arrived = hub.files("me/thinker")
    card = arrived.pop("README.md")
    assert arrived == of_folder(runs["grpo"] / "model") and "adapter_model.safetensors" in arrived
    assert len(hub.objects) == len(hub.verified) == 1  # the weights went by LFS
    assert hub.repos["me/thinker"]["private"] and len(hub.repos["me/thinker"]["commits"]) == 1
    assert result["repo"] == "me/thinker" and result["url"] == f"{hub.url}/me/thinker"
    assert result["files"] == ["README.md", *sorted(arrived)]
    assert result["bytes"] == len(card) + sum(map(len, arrived.values()))
    model = runs["grpo"] / "model"
    assert card.decode() == model_card(model, runs["grpo"], "me/thinker")


def test_the_card_of_a_grpo_run_with_lora(runs: dict[str, Path]) -> None:
    card = model_card(runs["grpo"] / "model", runs["grpo"], "me/thinker", tags=["maths"])
    assert front_matter(card) == {
        "base_model": BUNDLED_MODEL, "library_name": "peft", "pipeline_tag": "text-generation",
        "license": "apache-2.0", "tags": ["razona", "grpo", "lora", "maths"],
    }  # fmt: skip
    header = json.loads((runs["grpo"] / "config.json").read_text())["header"]
    assert len(header) >= 8 and "\n".join(header) in card  # the run's own words
    last = lines(runs["grpo"] / "metrics.jsonl")[-1]
    figure = f"{last['eval/reward']:.4g} ± {last['eval/reward/error']:.2g}"
    row = next(line for line in card.splitlines() if line.startswith("| 3 |"))
    assert figure in row and "this model" in row
    assert "over held-out prompts; the best by `eval/reward`" in card
    for text in (
        f"trained from [{BUNDLED_MODEL}](https://huggingface.co/{BUNDLED_MODEL}) with GRPO by razona "
        f"{__version__}.",
        "| `optimizer.learning_rate` | `0.03` |", "| `objective.kl_coef` | `0.1` |", "| `lora.r` | `4` |",
        "| `run.num_steps` | `3` |", "- training: rows given from Python, fingerprint `",
        '- every prompt has the system prompt "Think first."',
        'AutoPeftModelForCausalLM.from_pretrained("me/thinker")', "razona generate --model me/thinker",
    ):  # fmt: skip
        assert text in card, text
    assert (
        "weight_decay" not in card and str(runs["base"].parent) not in card
    )  # defaults; paths of this machine
    mine = model_card(runs["grpo"] / "model", runs["grpo"], "me/thinker", license="mit", dataset="me/sums")
    assert front_matter(mine)["license"] == "mit" and front_matter(mine)["datasets"] == ["me/sums"]


def test_the_best_step(runs: dict[str, Path], hub: Hub, capsys: Captured) -> None:
    assert main(["push", str(runs["sft"]), "me/best", "--best"]) == 0
    capsys.readouterr()
    steps = lines(runs["sft"] / "metrics.jsonl")
    best = min(steps, key=lambda step: step["eval/loss"])["step"]
    assert best < 6
    arrived = hub.files("me/best")
    card = arrived.pop("README.md").decode()
    assert arrived == of_folder(runs["sft"] / "best") != of_folder(runs["sft"] / "model")
    assert f"It is the model of step {best}, the best held-out one of 6 steps." in card
    assert f"| {best} |" in card and card.count("| best, this model |") == 1
    assert "over held-out rows; the best by `eval/loss`" in card
    head = front_matter(card)
    assert head == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["razona", "sft"],
    }
    assert "a model that is not on the hub" in card and "SFT on 4 demonstrations" in card


def test_a_table_that_would_be_too_long(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["sft"], tmp_path / "run")
    first = lines(run / "metrics.jsonl")[0]
    rows = [{**first, "step": n + 1, "eval/loss": abs(n - 41) + 1.0} for n in range(100)]
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    card = model_card(run / "model", run, "me/long")
    shown = [line for line in card.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert len(shown) == 13 and shown[0].startswith("| 1 |") and shown[-1].startswith("| 100 |")
    assert any(line.startswith("| 42 | 1 ±") and line.endswith("| best |") for line in shown)
    assert "13 of 100 evaluations are shown" in card


def test_a_hub_data_set_and_an_earlier_run_are_named(runs: dict[str, Path], tmp_path: Path) -> None:
    run = shutil.copytree(runs["sft"], tmp_path / "first")
    stored = json.loads((run / "config.json").read_text())
    stored["config"]["data"]["path"], stored["config"]["eval"]["data"] = (
        "openai/gsm8k",
        "/home/x/held_out.jsonl",
    )
    (run / "config.json").write_text(json.dumps({**stored, "model": BUNDLED_MODEL}))
    card = model_card(run / "model", run, "me/m")
    assert front_matter(card)["datasets"] == ["openai/gsm8k"] and "split `train`" in card
    assert "the file `held_out.jsonl`" in card and "/home/x" not in card
    second = shutil.copytree(run, tmp_path / "second")
    (second / "config.json").write_text(json.dumps({**stored, "model": str(run / "model")}))
    assert front_matter(model_card(second / "model", second, "me/m"))["base_model"] == BUNDLED_MODEL


def test_dry_run_asks_nobody(runs: dict[str, Path], hub: Hub, capsys: Captured) -> None:
    assert main(["push", str(runs["sft"]), "me/dry", "--dry-run", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert hub.requests == [] and result["dry_run"]
    assert result["files"] == ["README.md", *sorted(of_folder(runs["sft"] / "model"))]
    assert result["card"] == model_card(runs["sft"] / "model", runs["sft"], "me/dry")
    weights = (runs["sft"] / "model/model.safetensors").stat().st_size
    assert f"{weights:,}  model.safetensors" in printed.err and "nothing was uploaded" in printed.err
    assert result["card"].splitlines()[-1] in printed.err


def test_the_environment_says_where_and_who(runs: dict[str, Path], hub: Hub) -> None:
    """HF_ENDPOINT and HF_TOKEN, as a process of its own sees them; a name alone is the user's."""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_writes", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "razona", "push", str(runs["sft"]), "alone"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arrived = hub.files("me/alone")
    assert 'from_pretrained("me/alone")' in arrived.pop("README.md").decode()
    assert arrived == of_folder(runs["sft"] / "model")


@pytest.mark.parametrize(
    ("token", "repo", "texts"),
    [
        (None, "me/x", ["There is no token for http", "nothing was uploaded", "hf auth login", "HF_TOKEN"]),
        ("hf_wrong", "me/x", ["with 401", "nothing was uploaded", "wrong or has run out", "HF_TOKEN"]),
        ("hf_reads", "me/x", ["refused me/x with 403", "nothing was uploaded", "may not write to 'me'"]),
        ("hf_writes", "other/x", ["refused other/x with 403", "may not write to 'other'"]),
        ("hf_writes", "not a name", ["'not a name' cannot name a repository", "Write OWNER/NAME"]),
    ],
)
def test_what_the_hub_refuses(
    token: str | None, repo: str, texts: list[str], runs: dict[str, Path], hub: Hub,
    monkeypatch: pytest.MonkeyPatch, capsys: Captured,
) -> None:  # fmt: skip
    use_hub(hub, monkeypatch, token=token)
    assert main(["push", str(runs["sft"]), repo]) == 2
    printed = capsys.readouterr()
    for text in texts:
        assert text in printed.err, printed.err
    assert hub.repos == {} and "are in http" not in printed.out


def test_rights_that_end_at_the_commit(
    runs: dict[str, Path], hub: Hub, monkeypatch: Any, capsys: Captured
) -> None:
    hub.add("me/there", files={"model-00001-of-00002.safetensors": b"old", ".gitattributes": b""})
    use_hub(hub, monkeypatch, token="hf_reads")
    assert main(["push", str(runs["sft"]), "me/there"]) == 2
    error = capsys.readouterr().err
    assert "me/there is there, and nothing was committed to it" in error and "may not write to 'me'" in error
    for route in ("/lfs/upload", "/commit/"):
        hub.broken = (route, 409)
        use_hub(hub, monkeypatch)
        assert main(["push", str(runs["sft"]), "me/there"]) == 2
        error = capsys.readouterr().err
        assert "with 409 (out of order), so me/there is there, and nothing was committed" in error
        assert hub.repos["me/there"]["commits"] == []
    hub.broken = None
    assert main(["push", str(runs["sft"]), "me/there"]) == 0
    assert "still in me/there: model-00001-of-00002.safetensors. Delete those" in capsys.readouterr().out


def test_metadata_that_the_hub_does_not_take(runs: dict[str, Path], hub: Hub, capsys: Captured) -> None:
    assert main(["push", str(runs["sft"]), "me/x", "--license", "mine"]) == 2
    error = capsys.readouterr().err
    assert 'with 400 (Invalid metadata in README.md; "license" must be one of [apache-2.0, mit])' in error
    assert "me/x is there, and nothing was committed to it. Mend what it names" in error
    assert main(["push", str(runs["sft"]), "me/x", "--license", "mit"]) == 0
    assert front_matter(hub.files("me/x")["README.md"].decode())["license"] == "mit"


def test_private_is_not_uploaded_in_public(runs: dict[str, Path], hub: Hub, capsys: Captured) -> None:
    hub.add("me/open")
    assert main(["push", str(runs["sft"]), "me/open", "--private"]) == 2
    assert "is on the hub already, and public" in capsys.readouterr().err
    assert hub.files("me/open") == {} and not any("commit" in request for request in hub.requests)


def test_without_a_hub(runs: dict[str, Path], hub: Hub, monkeypatch: Any, capsys: Captured) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["push", str(runs["sft"]), "me/x"]) == 2
    error = capsys.readouterr().err
    assert (
        "http://127.0.0.1:9 gave no usable answer (ConnectError" in error and "nothing was uploaded" in error
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["push", str(runs["sft"]), "me/x"]) == 2
    error = capsys.readouterr().err
    assert "HF_HUB_OFFLINE is set" in error and "nothing was uploaded" in error


def test_a_run_without_a_finished_model(
    runs: dict[str, Path], hub: Hub, tmp_path: Path, capsys: Captured
) -> None:
    def refused(name: Path, *flags: str) -> str:
        assert main(["push", str(name), "me/x", *flags]) == 2
        return capsys.readouterr().err

    run = shutil.copytree(runs["sft"], tmp_path / "run")
    weights, timings = run / "model/model.safetensors", lines(run / "timings.jsonl")
    os.utime(weights, (timings[-1]["time"] - 1,) * 2)
    assert "is older than the last of the 6 steps in metrics.jsonl" in refused(run)
    shutil.rmtree(run / "model")
    assert (
        "has no finished model: 6 of 6 steps are done. Go on with the same command and --run.resume"
        in refused(run)
    )
    assert "Its best step so far can be uploaded with --best" in refused(run)
    shutil.rmtree(run / "best")
    assert "kept no best step (6 of 6 steps are done)" in refused(run, "--best")
    assert "There is no folder" in refused(tmp_path / "none")
    assert "is neither a run nor a model" in refused(tmp_path)
    assert "which is no run but a model" in refused(runs["base"], "--best")
    assert hub.requests == []
    for args, text in ((["push"], "has no run"), (["push", "x"], "has no repository")):
        assert main(args) == 2
        assert text in capsys.readouterr().err


def test_a_run_that_was_stopped_says_so(
    runs: dict[str, Path], hub: Hub, tmp_path: Path, capsys: Captured
) -> None:
    run = shutil.copytree(runs["sft"], tmp_path / "run")
    stored = json.loads((run / "config.json").read_text())
    stored["config"]["run"]["num_steps"] = 50
    (run / "config.json").write_text(json.dumps(stored))
    assert main(["push", str(run), "me/stopped"]) == 0
    assert "the run stopped after step 6 of 50; the card says so" in capsys.readouterr().out
    assert "The run was stopped after step 6 of 50." in hub.files("me/stopped")["README.md"].decode()


def test_a_merged_model_and_an_adapter_that_nobody_could_load(
    runs: dict[str, Path], hub: Hub, tmp_path: Path, capsys: Captured
) -> None:
    run = tmp_path / "local"
    run_grpo(grpo_config(runs["base"], run, run__num_steps=1, lora__r=4))
    assert main(["merge", str(run)]) == 0
    assert main(["push", str(run), "me/adapter"]) == 0
    assert "the adapter's base is a model on this machine" in capsys.readouterr().out
    assert main(["push", str(run / "merged"), "me/merged"]) == 0
    arrived = hub.files("me/merged")
    card = arrived.pop("README.md").decode()
    assert arrived == of_folder(run / "merged") and merge.__module__ == "razona.commands.merge"
    assert front_matter(card)["library_name"] == "transformers" and "with GRPO by razona" in card
    assert main(["push", str(runs["base"]), "me/plain"]) == 0
    assert "A model, uploaded with razona" in hub.files("me/plain")["README.md"].decode()


def test_the_commands_of_the_page_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs/publish.md").read_text(encoding="utf-8")
    commands = re.findall(r"^razona (push .*?) *(?:#.*)?$", page, re.MULTILINE)
    taken: list[Any] = []
    monkeypatch.setattr(
        "razona.commands.push.run", lambda config, **options: taken.append((config, options)) or {}
    )
    for command in commands:
        assert main(command.replace("OWNER/NAME", "me/model").split()) == 0
    configs = [config for config, _ in taken]
    assert len(configs) == 4 and {config.repo for config in configs} == {"me/model"}
    assert [options["dry_run"] for _, options in taken] == [True, False, False, False]
    assert configs[1].private and configs[2].best and configs[2].license == "apache-2.0"
    assert configs[3].folder == "runs/first/merged"
