"""Value and reward model: one number per token or sequence, read off the policy's own backbone."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from test_flat import BATCHES, assert_same_gradients, gradients, other_model, rollout
from test_policy import same_bits
from tiny_models import tiny_config, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from razona.batch import Batch
from razona.config import LoRAConfig, OptimizerConfig
from razona.errors import ModelError
from razona.models import attach
from razona.models.classifier import from_classifier
from razona.models.readout import Scalar
from razona.models.scorer import FlatScorer, FullRowScorer, ScalarScorer
from razona.policy import RewardModel, ValueModel

ADAM = OptimizerConfig(learning_rate=3e-3)


def head(width: int = 64) -> torch.nn.Linear:
    """One that is not 0, so that every state shows."""
    score = torch.nn.Linear(width, 1, bias=False)
    with torch.no_grad():
        score.weight.copy_(torch.linspace(-0.3, 0.4, width)[None])
    return score


def value_model(
    arch: str = "llama", *, precision: str = "fp32", fresh: bool = False, **options: Any
) -> ValueModel:
    score = None if fresh else head()
    return ValueModel(tiny_model(arch), optimizer=ADAM, precision=precision, score=score, **options)


def literal(model: Any, batch: Batch, score: torch.nn.Linear) -> tuple[Tensor, Tensor]:
    """Values and scores, one unpadded row after the other through the model as transformers runs it."""
    values, scores = torch.zeros(batch.loss_mask.shape), []
    for row, (group, length) in enumerate(zip(batch.group_of, batch.lengths, strict=True)):
        prompt = torch.tensor(batch.prompts[group])
        ids = torch.cat([prompt, batch.token_ids[row, :length]])
        read = score(model.base_model(ids[None], use_cache=False).last_hidden_state[0])[:, 0]
        values[row, :length] = read[len(prompt) - 1 : len(ids) - 1]
        scores.append(read[-1])
    return torch.where(batch.loss_mask, values, 0.0), torch.stack(scores)


def named_gradients(model: ValueModel, loss: Tensor) -> dict[str, Tensor]:
    for parameter in model.masters:
        parameter.grad = None
    loss.backward()
    return {n: p.grad.clone() for n, p in zip(model.names, model.masters, strict=True) if p.grad is not None}


@pytest.mark.parametrize("which", BATCHES)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "mistral", "gemma2", "opt"])
def test_values_and_scores_against_plain_rows(arch: str, which: str) -> None:
    """Flat, full rows and a literal loop agree, in values and in gradients."""
    batch, plain, score = BATCHES[which](), tiny_model(arch), head()
    expected, ends = literal(plain, batch, score)
    slopes = torch.sin(batch.token_ids * 1.7)
    loss = (expected * slopes).sum() + (ends * torch.arange(1.0, len(batch) + 1)).sum()
    wanted = {n: g for n, g in gradients(plain, loss).items() if n not in ("lm_head.weight",)}
    assert ends.std() > 0.1 and expected[batch.loss_mask].std() > 0.1

    full = ScalarScorer(FullRowScorer(tiny_model(arch)), Scalar(64, score=head()))
    torch.testing.assert_close(full(batch, per_token=True), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(full(batch, per_token=False), ends, atol=1e-5, rtol=1e-5)

    for checkpointing in (False, True):
        model = value_model(arch, gradient_checkpointing=checkpointing)
        assert isinstance(model.scorer, FlatScorer)
        values, scores = model.values(batch), model.scores(batch)
        assert values.dtype == scores.dtype == torch.float32 and (values[~batch.loss_mask] == 0).all()
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scores, ends, atol=1e-5, rtol=1e-5)
        loss = (values * slopes).sum() + (scores * torch.arange(1.0, len(batch) + 1)).sum()
        found = named_gradients(model, loss)
        assert found.pop("score.weight").abs().max() > 0.1
        assert_same_gradients(found, wanted, 1e-5)


def test_a_fresh_head_says_0_and_learns() -> None:
    model, batch = value_model(fresh=True), rollout()
    assert not model.values(batch).any() and not model.scores(batch).any()
    (model.scores(batch) - 1).square().sum().backward()
    assert model.update() > 0
    assert model.scores(batch).any()


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_fits_a_scalar_target(per_token: bool, precision: str) -> None:
    """A number per token, of either sign and of its own, and one per sequence."""
    model, batch = value_model(precision=precision, fresh=True), rollout()
    before = torch.tensor([[batch.prompts[group][-1]] for group in batch.group_of])
    before = torch.cat([before, batch.token_ids[:, :-1]], 1)  # what a state has seen last; not token t itself
    target = torch.sin(before * 1.7) if per_token else torch.linspace(-1, 4, len(batch)).cos()
    mask = batch.loss_mask if per_token else torch.ones(len(batch), dtype=torch.bool)
    losses = []
    for _ in range(60):
        found = model.values(batch) if per_token else model.scores(batch)
        loss = (found - target)[mask].square().mean()
        loss.backward()
        model.update()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0], losses[::20]


def test_gradients_do_not_depend_on_micro_batches_order_or_padding() -> None:
    model, batch = value_model(), rollout()
    targets = torch.sin(batch.token_ids * 1.7)
    whole = replace(batch, advantages=torch.where(batch.loss_mask, targets, 0.0))

    def slopes(parts: list[Batch]) -> dict[str, Tensor]:
        loss = torch.zeros(())
        for part in parts:
            difference = model.values(part) - part.advantages
            loss = loss + difference.square().sum() + model.scores(part).sin().sum()
        return named_gradients(model, loss)

    expected = slopes([whole])
    backwards = whole.select([*range(len(whole))][::-1])
    padded = replace(
        whole,
        token_ids=torch.nn.functional.pad(whole.token_ids, (0, 3)),
        loss_mask=torch.nn.functional.pad(whole.loss_mask, (0, 3)),
        advantages=torch.nn.functional.pad(whole.advantages, (0, 3)),  # type: ignore[arg-type]
    )
    for parts in (
        [*whole.split(20)],
        [*whole.split(20, whole_groups=True)],
        [whole.select([row]) for row in range(len(whole))],
        [backwards],
        [padded],
    ):
        assert_same_gradients(slopes(parts), expected, 1e-5)


def test_scores_are_read_at_the_last_token_whatever_is_trained() -> None:
    """The mask says what is trained, not where a sequence ends; padding and neighbours change nothing."""
    model, batch = value_model(), rollout()
    with torch.no_grad():
        scores = model.scores(batch)
        first = torch.arange(batch.loss_mask.shape[1]) < 1
        assert torch.equal(model.scores(replace(batch, loss_mask=batch.loss_mask & first)), scores)
        alone = torch.cat([model.scores(batch.select([row])) for row in range(len(batch))])
    torch.testing.assert_close(alone, scores, atol=1e-5, rtol=1e-5)
    assert len({round(s, 3) for s in scores.tolist()}) == len(batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_a_checkpoint_brings_back_every_bit(precision: str) -> None:
    def learn(model: ValueModel, batch: Batch) -> None:
        (model.values(batch) - 1).square().sum().backward()
        model.update()

    model, batch = value_model(precision=precision), rollout()
    assert model.network.readout.score.weight.dtype == torch.float32
    learn(model, batch)
    state = copy.deepcopy(model.state_dict())
    learn(model, batch)
    other = value_model(precision=precision)
    other.load_state_dict(state)
    assert same_bits(other.state_dict(), state)
    learn(other, batch)
    assert same_bits(other.state_dict(), model.state_dict())
    with torch.no_grad():
        assert torch.equal(other.values(batch), model.values(batch))


def test_release_gives_the_model_back() -> None:
    model = tiny_model()
    before, unread = [name for name, p in model.named_parameters()], model.lm_head.weight.clone()
    critic = ValueModel(model, optimizer=ADAM)
    assert not model.lm_head.weight.requires_grad and "lm_head.weight" not in critic.names
    critic.scores(rollout()).sum().backward()
    critic.update()
    critic.release()
    assert [name for name, p in model.named_parameters() if p.requires_grad] == before
    assert {p.dtype for p in model.parameters()} == {torch.float32} and torch.equal(
        model.lm_head.weight, unread
    )
    assert model.config._attn_implementation == "sdpa"
    model.zero_grad()
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())  # no hook takes them away


def test_a_tied_embedding_is_trained() -> None:
    assert "model.embed_tokens.weight" in value_model("qwen2").names


def lora() -> Any:
    return attach(tiny_model(), LoRAConfig(r=4), base="", seed=0)


def test_a_lora_value_model_trains_adapter_and_head_alone() -> None:
    batch, wrapped = rollout(), lora()
    base = {name: p.clone() for name, p in wrapped.named_parameters() if "lora_" not in name}
    model = ValueModel(wrapped, optimizer=ADAM, precision="fp32")
    assert all("lora_" in name for name in model.names[:-1]) and model.names[-1] == "score.weight"
    target = torch.linspace(-1, 1, len(batch))
    losses = []
    for _ in range(60):
        loss = (model.scores(batch) - target).square().mean()
        loss.backward()
        model.update()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert all(torch.equal(p, base[name]) for name, p in wrapped.named_parameters() if name in base)


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_other_mixers_have_values_too(kind: str) -> None:
    """Full padded rows: neither padding nor micro-batches show."""
    batch, plain = rollout(), other_model(kind)
    with torch.no_grad():
        expected, ends = literal(plain, batch, head())
    model = ValueModel(plain, optimizer=ADAM, precision="fp32", score=head())
    assert isinstance(model.scorer, FullRowScorer)
    torch.testing.assert_close(model.values(batch), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.scores(batch), ends, atol=1e-5, rtol=1e-5)
    whole = named_gradients(model, model.scores(batch).square().sum())
    parts = [model.scores(part).square().sum() for part in batch.split(20)]
    assert_same_gradients(named_gradients(model, torch.stack(parts).sum()), whole, 1e-5)


def reward_model(model: Any, **options: Any) -> RewardModel:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token  # as `load` leaves one that has none
    return RewardModel(model, tokenizer, optimizer=ADAM, score=head(), **options)


@torch.no_grad()
def plain_scores(classifier: Any, batch: Batch, pad: int) -> Tensor:
    rows = [
        torch.cat([torch.tensor(batch.prompts[g]), batch.token_ids[row, :length]])
        for row, (g, length) in enumerate(zip(batch.group_of, batch.lengths, strict=True))
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    attended = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
    return classifier(ids, attention_mask=attended.long()).logits[:, 0].float()


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3", "opt", "gpt_neox"])
def test_a_reward_model_is_a_plain_classifier_and_comes_back(arch: str, tmp_path: Path) -> None:
    batch = rollout()
    batch.token_ids[:, 0] = 2  # the end of text inside, and at the end of rows of one token
    model = reward_model(tiny_model(arch), precision="fp32")
    (model.scores(batch) - 1).square().sum().backward()
    model.update()
    with torch.no_grad():
        expected = model.scores(batch)
    folder = model.save(tmp_path / "reward")
    classifier, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and classifier.config.num_labels == 1
    pad = classifier.config.pad_token_id
    assert pad == 0 and not (batch.token_ids == pad)[batch.loss_mask].any()
    torch.testing.assert_close(plain_scores(classifier.eval(), batch, pad), expected, atol=1e-5, rtol=1e-5)

    backbone, score = from_classifier(classifier)
    again = RewardModel(backbone, tiny_tokenizer(), optimizer=ADAM, precision="fp32", score=score)
    assert isinstance(again.scorer, FlatScorer) and set(again.names) == set(model.names)
    with torch.no_grad():
        assert torch.equal(again.scores(batch), expected)
        assert torch.equal(
            ValueModel(backbone, optimizer=ADAM, score=score, precision="fp32").scores(batch), expected
        )


def test_bf16_weights_and_an_fp32_head_are_saved_as_they_are(tmp_path: Path) -> None:
    model = reward_model(tiny_model())
    classifier = AutoModelForSequenceClassification.from_pretrained(model.save(tmp_path / "reward"))
    assert torch.equal(classifier.score.weight, model.network.readout.score.weight)
    for name, weight in model.model.model.named_parameters():
        assert torch.equal(classifier.model.get_parameter(name), weight.float())


def test_a_lora_reward_model_is_an_adapter_on_a_plain_classifier(tmp_path: Path) -> None:
    batch, model = rollout(), reward_model(lora(), precision="fp32")
    (model.scores(batch) - 1).square().sum().backward()
    model.update()
    with torch.no_grad():
        expected = model.scores(batch)
    folder = model.save(tmp_path / "adapter")
    reward_model(tiny_model(), precision="fp32").save(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    found = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    torch.testing.assert_close(plain_scores(found, batch, 0), expected, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_a_reward_model_says_so(tmp_path: Path) -> None:
    config = tiny_model().config
    config.num_labels = 2
    with pytest.raises(ModelError, match="2 labels"):
        from_classifier(AutoModelForSequenceClassification.from_config(config))
    granite = AutoModelForCausalLM.from_config(tiny_config("granite"))
    with pytest.raises(ModelError, match="no sequence classifier that holds it"):
        reward_model(granite).save(tmp_path / "reward")
    assert not (tmp_path / "reward").exists()
