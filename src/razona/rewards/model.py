"""A model as a reward: the score that a sequence classifier gives to prompt and completion together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from razona.data.chat import chat_text
from razona.errors import RewardError

BATCH_SIZE = 16


class ModelReward:
    """The one label of a sequence classifier, as a reward function.

    ``model`` is a folder, a hub id or a model object. ``tokenizer`` is its own, not the policy's; left out,
    it is read from where the model came from. String prompts are scored as prompt + completion, messages as
    its chat template writes them. No special tokens are added (TRL does the same).

    Raises RewardError for what cannot be loaded, for a head whose weights are not in the files (a language
    model, which would get a random one), for weights that are not safetensors and for several labels.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, device: Any = None) -> None:
        named = isinstance(model, str)
        name = model if named else str(getattr(model.config, "_name_or_path", "") or "model")
        self.model = _load(name, device) if named else model
        labels = getattr(self.model.config, "num_labels", 1)
        if labels != 1:
            raise RewardError(
                f"the reward model '{name}' has {labels} labels, and a reward is one number. Give a model "
                "that was trained with num_labels=1."
            )
        self.model.eval()
        self.tokenizer = tokenizer or _tokenizer(name)
        self._set_pad_token(name)
        self.name = name
        self.__name__ = name.rstrip("/").split("/")[-1]

    def _set_pad_token(self, name: str) -> None:
        """The tokenizer pads, and the model must know with what: it reads the token before."""
        tokenizer, config = self.tokenizer, self.model.config
        if tokenizer.pad_token_id is None and getattr(config, "pad_token_id", None) is not None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
        elif tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise RewardError(
                f"the tokenizer of the reward model '{name}' has neither a pad nor an end token, so texts of "
                "different length cannot be scored together. Set tokenizer.pad_token and save it."
            )
        config.pad_token_id = tokenizer.pad_token_id

    @property
    def max_length(self) -> int:
        """Tokens that a text may have."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return min(positions or self.tokenizer.model_max_length, self.tokenizer.model_max_length)

    @torch.inference_mode()
    def __call__(self, prompts: list[Any], completions: list[Any]) -> list[float]:
        """One score per completion. Texts of like length are scored together. Raises RewardError for an empty
        text and for one that is too long: a score of a part would be that of another text.
        """
        texts = [self._text(p, c) for p, c in zip(prompts, completions, strict=True)]
        rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        self._check(texts, rows)
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        scores = [0.0] * len(rows)
        for start in range(0, len(order), BATCH_SIZE):
            batch = order[start : start + BATCH_SIZE]
            inputs = self.tokenizer.pad(
                {"input_ids": [rows[i] for i in batch]}, padding_side="right", return_tensors="pt"
            ).to(self.model.device)
            logits = self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            for i, score in zip(batch, logits[:, 0].float().tolist(), strict=True):
                scores[i] = score
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        if not self.tokenizer.chat_template:
            raise RewardError(
                f"the tokenizer of the reward model '{self.name}' has no chat template, and the prompts are "
                "messages. Set tokenizer.chat_template to the one it was trained with and save it."
            )
        return chat_text(self.tokenizer, [*prompt, *completion])

    def _check(self, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
        for text, row in zip(texts, rows, strict=True):
            if not row:
                raise RewardError(
                    f"prompt and completion, {text!r}, are no token for the reward model '{self.name}', and "
                    "it cannot score nothing. Give rows with a prompt."
                )
            if len(row) > self.max_length:
                raise RewardError(
                    f"prompt and completion are {len(row)} tokens, more than the {self.max_length} that the "
                    f"reward model '{self.name}' can read: {text[:60]!r}... Lower "
                    "sampling.max_completion_length or data.max_prompt_length, or take another reward model."
                )


_in_use: WeakValueDictionary[str, ModelReward] = WeakValueDictionary()


def reward_model(name: str) -> ModelReward:
    """The reward model ``name``, on the GPU if there is one; training and evaluation share one copy."""
    reward = _in_use.get(name)
    if reward is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        reward = _in_use[name] = ModelReward(str(Path(name).expanduser()), device=device)
    return reward


def _load(name: str, device: Any) -> Any:
    """transformers would give a head without weights random ones, and say so in a warning only."""
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # OSError, ValueError, RuntimeError, SafetensorError, ...
        raise RewardError(
            f"the reward model '{name}' cannot be loaded: {error}. Give a folder or hub id of a sequence "
            "classifier whose weights are safetensors: a pickle (.bin, .pt) runs whatever code it holds."
        ) from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise RewardError(
            f"the reward model '{name}' has no weights for {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}: they would be random, and so would the reward. It is "
            f"saved as {', '.join(model.config.architectures or ['?'])}; give a sequence classifier trained "
            "as a reward model."
        )
    return model.to(device)


def _tokenizer(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RewardError(
            f"the tokenizer of the reward model '{name}' cannot be loaded: {error}. Save it beside the "
            "model, or give it: ModelReward(model, tokenizer), in razona.trl reward_processing_classes."
        ) from error
