"""Tiny random models of every tested architecture, and a tokenizer to go with them.

Random models have flat logits that hide mask bugs, so the weights are drawn large: attention looks somewhere,
and logits have a standard deviation of about 2.
"""

from __future__ import annotations

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "gpt2", "gpt_neox", "opt")
VOCAB_SIZE = 200
SLIDING_WINDOW = 5
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_config(arch: str, **changes: object) -> PretrainedConfig:
    """Hidden 64, 2 layers, 4 heads, 2 key/value heads; Gemma (layer 0) and Mistral slide over 5 tokens.

    GPT-2, GPT-NeoX and OPT know no key/value heads: every query head has its own. Dropout is off, as `load`
    leaves it.
    """
    shape: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": arch in ("qwen2", "gemma2", "gemma3"),
    }
    shape |= {
        "gpt2": {
            "n_inner": 96,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), 0.0),
        },
        "gpt_neox": {"classifier_dropout": 0.0},
        "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    }.get(arch, {"num_key_value_heads": 2})
    if arch == "qwen3":
        shape |= {"head_dim": 16}
    if arch in ("gemma2", "gemma3"):
        shape |= {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    if arch in ("gemma2", "gemma3", "mistral"):
        shape |= {"sliding_window": SLIDING_WINDOW}
    name = "gemma3_text" if arch == "gemma3" else arch
    return AutoConfig.for_model(name, **(shape | changes))


def tiny_model(
    arch: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """A random model with sharp logits; equal ``seed``, equal weights. ``changes`` go to the config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(arch, **changes))
        sharpen(model, arch)
    model.tie_weights()
    for parameter in model.parameters():  # model.to(dtype) would round the rotary frequencies too
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model.eval()


@torch.no_grad()
def sharpen(model: PreTrainedModel, arch: str) -> None:
    """Draws the weights anew, large."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # rows of a unit vector in, values of standard deviation 2 out
            parameter.normal_(0.0, 2.0 / parameter.shape[-1] ** 0.5)
        elif "norm" in name or "ln_" in name:
            parameter.add_(0.2 * torch.randn_like(parameter))
            if "gemma" in arch and "post_" in name:  # else the scaled embedding drowns the layers
                parameter.add_(3.0)
        else:
            parameter.normal_(0.0, 0.5)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, ChatML: 195 ids, ``<|im_end|>`` ends a turn, ``</s>`` ends a text, no pad token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [c for c in alphabet if ord(c) < 0x7F or c in "ĠĊ"]
    rest = [c for c in alphabet if c not in printable]
    tokens = [*special, *printable, *rest][:195]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHATML
    return tokenizer
