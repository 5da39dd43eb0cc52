"""The blocks of the course texts, as printed but for their import lines, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hub_server import Hub
from tiny_runs import lines
from trl_helpers import no_hub, tiny_folder

from razona.errors import ConfigError

EXAMPLES = Path(__file__).parent.parent / "examples"
FUNCTIONS = (EXAMPLES / "course_rewards.py").read_text(encoding="utf-8")
SECTION_4 = (
    FUNCTIONS
    + """
from razona.trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="HuggingFaceTB/SmolLM2-1.7B-Instruct",
    reward_funcs=[reward_formato, reward_correctitud],
    args=GRPOConfig(num_generations=8, output_dir="grpo-razonamiento"),
    train_dataset=dataset,  # columnas: "prompt" y "respuesta_correcta" — las respuestas las genera GRPO
)
trainer.train()
"""
)

SECTION_5 = """
from razona.unsloth import FastLanguageModel
from razona.trl import GRPOConfig, GRPOTrainer

model, tokenizer = FastLanguageModel.from_pretrained(
    "unsloth/gemma-3-1b-it", max_seq_length=1024, load_in_4bit=True,
)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "v_proj"])

trainer = GRPOTrainer(
    model=model, processing_class=tokenizer,
    reward_funcs=[reward_formato, reward_correctitud],
    args=GRPOConfig(num_generations=8, use_vllm=True),  # vLLM acelera la fase de generación
    train_dataset=dataset_gsm8k,
)
trainer.train()
model.push_to_hub_merged("tu-usuario/gemma-3-razonador", tokenizer)
"""

ZERO_REWARDS = (EXAMPLES / "exercise_zero_rewards.py").read_text(encoding="utf-8")
EXERCISE_3 = re.findall(r"^from datasets .*?^trainer\.train\(\)\n", ZERO_REWARDS, re.DOTALL | re.MULTILINE)[0]

SECOND_TEXT = '''
from datasets import load_dataset
from razona.trl import GRPOTrainer, GRPOConfig

dataset = load_dataset("trl-lib/tldr", split="train")  # columna: prompt

def recompensa_largo(completions, **kwargs):
    """Recompensa ilustrativa: premia respuestas de largo moderado.
    En razonamiento real, aquí iría una recompensa VERIFICABLE
    (respuesta correcta, tests que pasan), no una heurística de forma."""
    objetivo = 200
    return [-abs(len(c) - objetivo) for c in completions]

args = GRPOConfig(
    output_dir="./grpo_out",
    num_generations=8,        # tamaño del grupo N por prompt
    per_device_train_batch_size=8,
)

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=recompensa_largo,
    args=args,
    train_dataset=dataset,
)
trainer.train()
'''

TWO_PROMPTS = [{"prompt": f"¿Cuánto es 3 + {i}?", "respuesta_correcta": str(3 + i)} for i in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_hub(folder, monkeypatch)
    monkeypatch.chdir(tmp_path)


def test_section_4(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"dataset": Dataset.from_list(TWO_PROMPTS)}
    exec(SECTION_4, names)
    state = names["trainer"].state
    assert state.global_step == 6 and state.epoch == 3.0  # one prompt x 8 a step, two prompts, three epochs
    printed = capsys.readouterr().out
    assert "'HuggingFaceTB/SmolLM2-1.7B-Instruct' is not in the local hub cache" in printed
    assert "This is not the model you named" in printed
    for words in (
        "GRPOConfig(output_dir='grpo-razonamiento'), and the rest as in TRL 1.16.0",
        "sample standard deviation of the group, as TRL and verl",
        "mean over all completion tokens of an update (TRL: dapo",
        "1 x reward_formato + 1 x reward_correctitud",
        "bf16 compute, fp32 masters",
        "1 prompts x 8 completions of at most 512 tokens",
    ):
        assert words in printed


def test_section_5_says_what_to_do_without_vllm_and_runs_without_it(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.owners.add("tu-usuario")
    names: dict[str, Any] = {"dataset_gsm8k": TWO_PROMPTS[:1]}
    exec(FUNCTIONS, names)
    with pytest.raises(
        ConfigError, match=r"GRPOConfig\(use_vllm=True\) is not supported.*leave use_vllm out"
    ):
        exec(SECTION_5, names)
    exec(SECTION_5.replace(", use_vllm=True", ""), names)
    assert names["trainer"].model is names["model"]
    assert names["trainer"].state.global_step == 3
    printed = capsys.readouterr().out
    assert "'unsloth/gemma-3-1b-it' is not in the local hub cache" in printed
    assert "LoRA r 16, alpha 16 (scaling 1) on q_proj, v_proj" in printed and "on a 4-bit base" in printed
    assert [*hub.repos] == ["tu-usuario/gemma-3-razonador"]
    files = hub.files("tu-usuario/gemma-3-razonador")
    assert {"config.json", "model.safetensors", "tokenizer.json"} < files.keys()
    assert b"quantization_config" not in files["config.json"]


def test_exercise_3(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(FUNCTIONS + EXERCISE_3, names)
    log = names["trainer"].state.log_history
    assert [entry["step"] for entry in log] == [1, 2, 3, 4, 5, 5]
    for entry in log[:-1]:
        assert (
            entry["reward"]
            == entry["rewards/reward_formato/mean"]
            == entry["rewards/reward_correctitud/mean"]
        )
        assert entry["frac_reward_zero_std"] == 1.0 and entry["reward_std"] == 0.0
    assert "in every group all rewards are equal" in capsys.readouterr().out


def test_exercise_3_with_a_batch_of_six_names_the_sizes_that_work() -> None:
    with pytest.raises(
        ConfigError, match=r"6 is not divisible by num_generations = 4.*Give 4 or 8 .*= 2, 3, 6"
    ):
        exec(FUNCTIONS + EXERCISE_3.replace("train_batch_size=4", "train_batch_size=6"), {})


def test_exercise_3_with_temperature_0_and_nearly_0() -> None:
    with pytest.raises(ConfigError, match="identical: their deviation is 0, every advantage is 0"):
        exec(FUNCTIONS + EXERCISE_3.replace("temperature=1.0", "temperature=0"), {})
    exec(
        FUNCTIONS + EXERCISE_3.replace("temperature=1.0", "temperature=0.01").replace("steps=5", "steps=1"),
        {},
    )


def test_second_text(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Dataset.from_list([{"prompt": "Resumí: uno dos tres.", "completion": "uno"}])
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: rows)
    names: dict[str, Any] = {}
    exec(SECOND_TEXT, names)
    assert names["trainer"].state.global_step == 3
    steps = lines(Path("grpo_out/run/metrics.jsonl"))
    assert all(step["reward"] < -150 and step["grad_norm"] > 0 for step in steps)
