"""A sequence classifier as a reward function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config, tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification

from razona.errors import RewardError
from razona.rewards import bind, resolve, score
from razona.rewards.model import ModelReward
from razona.types import Completion, Group, Prompt

TEXTS = ["a", "an answer", "a much longer answer than the others", "another"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_classifier(tmp_path_factory.mktemp("reward") / "scorer")


def saved_classifier(path: Path, arch: str = "llama", **changes: object) -> Path:
    torch.manual_seed(0)
    config = tiny_config(arch, **({"num_labels": 1} | changes))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def alone(reward: ModelReward, text: str) -> float:
    """The score at the last token of one text without padding, read off by hand."""
    ids = torch.tensor([reward.tokenizer(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        states = reward.model.base_model(ids).last_hidden_state
        return float(reward.model.score(states)[0, -1, 0])


@pytest.mark.parametrize("arch", ["llama", "gpt2"])  # relative and absolute positions
def test_scores_are_those_of_each_text_alone(arch: str, tmp_path: Path) -> None:
    reward = ModelReward(str(saved_classifier(tmp_path, arch)))
    prompts = [f"prompt {i}: " for i in range(40)]
    completions = [TEXTS[i % 4] + "." * i for i in range(40)]  # more than one batch, in a mixed order
    scores = reward(prompts=prompts, completions=completions)
    assert scores == pytest.approx(
        [alone(reward, p + c) for p, c in zip(prompts, completions, strict=True)], abs=1e-5
    )
    assert len(set(scores)) == 40
    assert reward(prompts=[], completions=[]) == []


def test_messages_are_scored_through_the_models_own_template(folder: Path) -> None:
    reward = ModelReward(str(folder))
    prompt, answer = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "hello"}]
    text = reward.tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
    assert reward(prompts=[prompt], completions=[answer]) == pytest.approx([alone(reward, text)], abs=1e-5)
    reward.tokenizer.chat_template = None
    with pytest.raises(RewardError, match="has no chat template, and the prompts are messages"):
        reward(prompts=[prompt], completions=[answer])


def test_the_command_line_names_one_by_its_folder(folder: Path) -> None:
    bound = bind([f"model:{folder}"], columns=["gold"])
    assert bound[0].name == "scorer" and bound[0].parameters == {"prompts", "completions"}
    assert resolve(f"model:{folder}") is bound[0].function  # training and evaluation share it
    completion = Completion((5,), (0.0,), "an answer", "stop", 0)
    values = score(bound, [Group(Prompt(0, "why? ", (4,), {"gold": "1"}), (completion,))], timeout=60.0)
    assert values == [pytest.approx(bound[0].function(prompts=["why? "], completions=["an answer"]))]


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"no weights for score\.weight.*random.*saved as LlamaForCausalLM"):
        resolve(f"model:{tmp_path}")


def test_several_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="has 3 labels, and a reward is one number"):
        ModelReward(str(saved_classifier(tmp_path, num_labels=3)))


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(RewardError, match="whose weights are safetensors"):
        ModelReward(str(tmp_path))


def test_what_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(RewardError, match="cannot be loaded"):
        resolve("model:no/such")
    with pytest.raises(RewardError, match=r"reward model model:FOLDER or model:OWNER/NAME"):
        resolve("modle")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    model.config._name_or_path = ""
    with pytest.raises(RewardError, match="the tokenizer of the reward model 'model' cannot be loaded"):
        ModelReward(model)


def test_empty_and_long_texts_are_refused(folder: Path) -> None:
    reward = ModelReward(str(folder))
    assert reward.max_length == 512
    assert len(reward(prompts=["p"], completions=["x" * 511])) == 1
    with pytest.raises(RewardError, match="are 513 tokens, more than the 512 that the reward model"):
        reward(prompts=["p", "p"], completions=["x", "x" * 512])
    with pytest.raises(RewardError, match="are no token for the reward model"):
        reward(prompts=["p", ""], completions=["x", ""])


def test_a_pad_token_is_found(folder: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = tiny_tokenizer()
    model.config.pad_token_id = tokenizer.pad_token = tokenizer.eos_token = None
    with pytest.raises(RewardError, match="neither a pad nor an end token"):
        ModelReward(model, tokenizer)
    model.config.pad_token_id = 0
    assert ModelReward(model, tokenizer).tokenizer.pad_token_id == 0
