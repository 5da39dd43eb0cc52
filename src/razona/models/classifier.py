"""A causal language model with a scalar head, and transformers' sequence classifier with one label: the same
weights under two names.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from razona.errors import ModelError
from razona.models.load import stop_token_ids
from razona.models.multimodal import language_model
from razona.models.save import save


def from_classifier(classifier: Any) -> tuple[Any, nn.Linear]:
    """The backbone of a sequence classifier with one label as a causal language model, for
    `razona.policy.ValueModel` to train, and the classifier's head. No weight is copied; the language-model
    head is the embedding, which nobody reads.

    Raises ModelError for another number of labels and for a head that is not one linear layer ``score``.
    """
    name, score = type(classifier).__name__, getattr(classifier, "score", None)
    if not isinstance(score, nn.Linear) or score.out_features != 1:
        raise ModelError(
            f"{name} has {classifier.config.num_labels} labels, or another head than a linear layer 'score': "
            "it does not say one number. Load AutoModelForSequenceClassification with num_labels=1, of a "
            "decoder."
        )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(classifier.config)
    model.config = classifier.config
    setattr(model, model.base_model_prefix, classifier.base_model)
    head = model.get_output_embeddings()
    head.weight, head.bias = model.get_input_embeddings().weight, None
    return model.train(classifier.training), score


def save_classifier(model: Any, score: nn.Linear, tokenizer: Any, folder: Path) -> Path:
    """Writes the backbone of a causal language model and ``score`` as a folder that
    `AutoModelForSequenceClassification` loads with one label, each weight in its own dtype.

    transformers takes the last token that is not padding for a sequence's end, and so needs a padding token
    that ends none. Where padding is a stop token too, as is usual, the folder's padding is the unknown or
    the first token; without either it has none, and transformers refuses to score several sequences at once.
    Raises ModelError where transformers has no such class for the architecture.
    """
    name = type(model).__name__
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = _pad_token(model, tokenizer)
    config.pad_token_id = tokenizer.pad_token_id
    try:
        if language_model(model) is not model:
            raise ValueError("it is multimodal")
        with torch.device("meta"):
            classifier = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ModelError(
            f"{name} cannot be saved as a reward model: transformers has no sequence classifier that holds "
            f"it ({error}). Train the reward model on another architecture."
        ) from error
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    classifier.score = score
    return save(classifier, tokenizer, folder)


def _pad_token(model: Any, tokenizer: Any) -> str | None:
    stops = tokenizer.convert_ids_to_tokens(stop_token_ids(model, tokenizer))
    candidates = (tokenizer.pad_token, tokenizer.unk_token, tokenizer.bos_token)
    return next((token for token in candidates if token and token not in stops), None)
