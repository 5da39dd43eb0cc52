"""Multimodal checkpoints train on text: the language model learns, towers stay and are saved, bit for bit."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import is_on_policy
from safetensors.torch import load_file
from test_exact import exact_share, prompts_of, sample
from tiny_models import tiny_tokenizer
from tiny_multimodal import CLASSES, PREPROCESSOR, PROCESSOR, multimodal_folder, tiny_multimodal
from tiny_runs import CHATS, ROWS, contents, grpo_config, lines, run_grpo, run_sft, sft_config

from razona.batch import collate
from razona.build.model import load_model, make_policy
from razona.config import DataConfig, ModelConfig, OptimizerConfig
from razona.data import build_demonstrations, build_prompts, load_rows
from razona.engines.hf import HFEngine
from razona.errors import DataError
from razona.models import load, save
from razona.models.multimodal import language_model, towers
from razona.models.scorer import FlatScorer, FullRowScorer
from razona.policy import Policy
from razona.run.console import Console
from razona.types import Sampling

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = sorted(CLASSES)


def policy_of(kind: str, precision: str = "bf16") -> Policy:
    optimizer = OptimizerConfig(learning_rate=1e-2)
    return Policy(tiny_multimodal(kind), tiny_tokenizer(), optimizer=optimizer, precision=precision)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Equal names, dtypes and bits."""
    assert one and one.keys() == other.keys()
    return all(one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("kind", KINDS)
def test_loading_finds_the_class_and_the_language_model(kind: str, tmp_path: Path) -> None:
    loaded = load(str(multimodal_folder(tmp_path / "m", kind)), dtype=FP32)
    assert type(loaded.model) is CLASSES[kind]
    text = language_model(loaded.model)
    assert text.config is loaded.model.config.text_config and text.embed_tokens is not None
    inside = {id(p) for p in text.parameters()} | {id(loaded.model.lm_head.weight)}
    others = towers(loaded.model)
    assert inside.isdisjoint(map(id, others.values()))
    assert len(inside) + len(others) == len(list(loaded.model.parameters()))
    assert [note for note in loaded.notices if "trained, on text. vis" in note], loaded.notices


def test_a_text_model_is_its_own_language_model() -> None:
    model = tiny_multimodal("smolvlm")
    from transformers import AutoModelForCausalLM

    text = AutoModelForCausalLM.from_config(model.config.text_config)
    assert language_model(text) is text and towers(text) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_the_flat_pass_is_full_rows_and_transformers(kind: str) -> None:
    policy = policy_of(kind, "fp32")
    assert isinstance(policy.scorer, FlatScorer)
    batch = collate(sample(policy, prompts_of(5, 30, 12), Sampling(group_size=4, max_completion_length=20)))
    found = policy.logprobs(batch, temperature=1.0).detach()
    torch.testing.assert_close(found, batch.sampler_logprobs, rtol=0, atol=1e-5)
    language_model(policy.model).set_attn_implementation("sdpa")
    full = FullRowScorer(policy.model)(batch).detach()
    torch.testing.assert_close(found, full, rtol=0, atol=1e-5)
    assert full.std() > 0.5, "flat logits hide mask bugs"


@pytest.mark.parametrize("kind", KINDS)
def test_bit_for_bit_in_bf16(kind: str) -> None:
    """A thousand tokens, enough of them per completion that the linear layers are packed."""
    policy = policy_of(kind)
    assert policy.scorer.exact and policy.scorer.runs_by_hand is (kind == "smolvlm")
    groups = sample(policy, prompts_of(5, 70, 130), Sampling(group_size=8, max_completion_length=48))
    for budget in (10_000, 300):
        assert exact_share(policy, groups, budget=budget) == (1.0, 1152)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "pure_bf16"])
def test_towers_have_neither_masters_nor_moments_and_keep_their_bits(precision: str) -> None:
    policy = policy_of("gemma3", precision)
    before = {name: p.detach().clone() for name, p in tiny_multimodal("gemma3").named_parameters()}
    others = towers(policy.model)
    assert not any(p.requires_grad for p in others.values())
    groups = sample(policy, prompts_of(9, 20), Sampling(group_size=4, max_completion_length=8))
    policy.logprobs(collate(groups), temperature=1.0).mean().backward()
    assert policy.update() > 0
    state = policy.state_dict()
    assert set(state["weights"]) == set(state["adam"]) == before.keys() - others.keys()
    assert len(policy.masters) == len(state["weights"])
    assert same(others, {name: before[name] for name in others})
    assert policy.compute[0].dtype == (FP32 if precision == "fp32" else BF16)


def test_a_bf16_checkpoint_s_towers_are_not_blown_up(tmp_path: Path) -> None:
    folder = str(multimodal_folder(tmp_path / "m", dtype=BF16))
    model = load(folder, dtype=FP32).model
    assert {p.dtype for p in towers(model).values()} == {BF16}
    assert model.get_output_embeddings().weight.dtype == FP32
    exact = load(
        str(multimodal_folder(tmp_path / "f")), dtype=BF16
    ).model  # fp32 in the file: rounding it would lose
    assert {p.dtype for p in towers(exact).values()} == {FP32}
    assert exact.get_output_embeddings().weight.dtype == BF16
    assert same(towers(exact), towers(tiny_multimodal("gemma3")))
    config = json.loads((tmp_path / "f" / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "f" / "config.json").write_text(json.dumps(config))  # which is not what the file holds
    assert same(towers(load(str(tmp_path / "f"), dtype=FP32).model), towers(exact))


@pytest.mark.parametrize("loop", ["grpo", "sft"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_and_saves_the_whole_checkpoint(kind: str, loop: str, tmp_path: Path) -> None:
    folder, out = multimodal_folder(tmp_path / "m", kind), tmp_path / "out"
    run = run_grpo(grpo_config(folder, out)) if loop == "grpo" else run_sft(sft_config(folder, out))
    assert "are frozen, and are saved unchanged" in run[1]
    if loop == "grpo":
        assert [is_on_policy(m) for m in lines(out / "metrics.jsonl")] == [True, True]
    before, after = (load_file(path / "model.safetensors") for path in (folder, out / "model"))
    assert before.keys() == after.keys()
    plain = CLASSES[kind].from_pretrained(out / "model")
    original = CLASSES[kind].from_pretrained(folder)
    assert same(towers(plain), towers(original))
    moved = language_model(plain).embed_tokens.weight - language_model(original).embed_tokens.weight
    assert moved.abs().max() > 1e-3
    for name, content in (("preprocessor_config.json", PREPROCESSOR), ("processor_config.json", PROCESSOR)):
        assert json.loads((out / "model" / name).read_text()) == content
    config = json.loads((out / "model" / "config.json").read_text())
    parts = [config, config["text_config"], config["vision_config"]]
    assert "razona" not in str(config) and {part["dtype"] for part in parts} == {"float32"}
    again = load(str(out / "model"), dtype=FP32)
    assert same(towers(again.model), towers(original))


@pytest.mark.parametrize("loop", ["grpo", "sft"])
def test_a_resumed_run_is_the_uninterrupted_one(loop: str, tmp_path: Path) -> None:
    folder = multimodal_folder(tmp_path / "m")
    run: Any = run_grpo if loop == "grpo" else run_sft
    config: Any = grpo_config if loop == "grpo" else sft_config
    changes: dict[str, Any] = {"measure_kl_every": 1} if loop == "grpo" else {}
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run(config(folder, whole, run__num_steps=3, **changes))
    run(config(folder, halves, run__num_steps=1, **changes))
    run(config(folder, halves, run__num_steps=3, run__resume=True, **changes))
    assert contents(whole) == contents(halves)
    stored = load_file(next((whole / "checkpoints").glob("*3")) / "policy.safetensors")
    trained = sum(
        p.numel() for p in Policy(tiny_multimodal("gemma3"), None, optimizer=OptimizerConfig()).compute
    )
    assert sum(t.numel() for t in stored.values() if t.ndim) == 3 * trained


def test_the_tower_still_sees() -> None:
    policy, pixels = policy_of("gemma3", "fp32"), torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        found, expected = (
            model.get_image_features(pixels).pooler_output
            for model in (policy.model, tiny_multimodal("gemma3"))
        )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_says_what_the_native_engine_says(kind: str) -> None:
    policy, prompts = policy_of(kind, "fp32"), prompts_of(5, 30)
    sampling = Sampling(group_size=2, max_completion_length=10)
    own = sample(policy, prompts, sampling)
    theirs = HFEngine(policy, stop_token_ids=()).generate(prompts, sampling, seeds=[[0, 1], [1000, 1001]])
    ids = [[[c.token_ids for c in group.completions] for group in groups] for groups in (own, theirs)]
    assert ids[0] == ids[1]


class Processor:
    """What a processor looks like from Python."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
        (Path(folder) / "preprocessor_config.json").write_text("{}")


def test_a_processor_handed_in(tmp_path: Path) -> None:
    processor = Processor()
    policy = Policy(tiny_multimodal("gemma3"), processor, optimizer=OptimizerConfig())
    assert policy.tokenizer is processor.tokenizer
    groups = sample(policy, prompts_of(9), Sampling(group_size=2, max_completion_length=8))
    ids = list(groups[0].completions[0].token_ids)
    assert groups[0].completions[0].text == processor.tokenizer.decode(ids, skip_special_tokens=True)
    folder = policy.save(tmp_path / "saved")
    assert (folder / "preprocessor_config.json").read_text() == "{}"
    assert load(str(folder), dtype=FP32).tokenizer("ab")["input_ids"] == policy.tokenizer("ab")["input_ids"]
    rows = load_rows(CHATS)
    given, own = (build_prompts(rows, t, DataConfig()).prompts for t in (processor, policy.tokenizer))
    assert given == own
    pairs = load_rows([{"prompt": "a", "completion": "b"}])
    assert build_demonstrations(pairs, processor, DataConfig(), max_length=9).demonstrations  # type: ignore[arg-type]


def test_make_policy_saves_with_the_folder_s_processor(tmp_path: Path) -> None:
    folder = multimodal_folder(tmp_path / "m")
    config = ModelConfig(name=str(folder), device="cpu")
    loaded = load_model(config, Console(file=io.StringIO()))
    policy = make_policy(loaded, config, OptimizerConfig(), total_updates=1)
    assert policy.tokenizer is loaded.tokenizer
    assert json.loads((policy.save(tmp_path / "s") / "preprocessor_config.json").read_text()) == PREPROCESSOR


def test_saving_in_one_dtype_still_can(tmp_path: Path) -> None:
    loaded = load(str(multimodal_folder(tmp_path / "m")), dtype=FP32)
    folder = save(loaded.model, loaded.processor, tmp_path / "s", dtype=BF16)
    config = json.loads((folder / "config.json").read_text())
    assert {part["dtype"] for part in (config, config["text_config"])} == {"bfloat16"}
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {BF16}
    assert next(CLASSES["gemma3"].from_pretrained(folder).parameters()).dtype == BF16


PARTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_reads_parts_alone_gets_them(tmp_path: Path) -> None:
    """SmolVLM's template leaves a string out without a word; here it is in the processor's file only."""
    folder = multimodal_folder(tmp_path / "m")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS_ONLY}))
    loaded, plain = load(str(folder), dtype=FP32), tiny_tokenizer()
    assert loaded.tokenizer.chat_template == PARTS_ONLY
    found, expected = (build_prompts(load_rows(CHATS), t, DataConfig()) for t in (loaded.tokenizer, plain))
    assert [p.token_ids for p in found.prompts] == [p.token_ids for p in expected.prompts]
    assert plain.convert_tokens_to_ids("<|im_end|>") in loaded.stop_token_ids
    talk = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, hi"}]]
    both = [
        build_demonstrations(load_rows([{"messages": m} for m in talk]), t, DataConfig(), max_length=99)
        for t in (loaded.tokenizer, plain)
    ]
    assert both[0].demonstrations == both[1].demonstrations


def test_pictures_are_refused_and_picture_columns_said() -> None:
    seen = [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]
    rows = [*CHATS[:3], {"prompt": [{"role": "user", "content": seen}], "answer": "a fox"}]
    with pytest.raises(
        DataError, match=r"row 3 .*message 0 has a part of type image, and only text is trained"
    ):
        build_prompts(load_rows(rows), tiny_tokenizer(), DataConfig())
    asked = [[{"role": "user", "content": seen}, {"role": "assistant", "content": "a fox"}]]
    with pytest.raises(DataError, match=r"row 0 .*part of type image"):
        build_demonstrations(
            load_rows([{"messages": m} for m in asked]), tiny_tokenizer(), DataConfig(), max_length=99
        )
    said = [
        {"role": "user", "content": [{"type": "text", "text": "Count "}, {"type": "text", "text": "to 3"}]}
    ]
    prompts = build_prompts(load_rows([{"prompt": said}]), tiny_tokenizer(), DataConfig()).prompts
    assert prompts[0].input == [{"role": "user", "content": "Count to 3"}]
    notices = build_prompts(
        load_rows([{**r, "image": "a.png"} for r in ROWS]), tiny_tokenizer(), DataConfig()
    ).notices
    assert any("does not get the column image" in line for line in notices)
    pairs = load_rows([{"prompt": "a", "completion": "b", "images": "a.png"}])
    found = build_demonstrations(pairs, tiny_tokenizer(), DataConfig(), max_length=9)
    assert any("does not get the column images" in line for line in found.notices)
    assert not any(
        "does not get" in n for n in build_prompts(load_rows(ROWS), tiny_tokenizer(), DataConfig()).notices
    )
