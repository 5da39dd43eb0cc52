"""What chat templates and processors have in common with tokenizers, for text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer of a multimodal model's processor; a tokenizer is its own."""
    return getattr(processor, "tokenizer", None) or processor


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, answering: bool = False) -> str:
    """What the chat template makes of text messages; with ``answering`` it ends where the answer begins.

    Templates of multimodal models may read a list of parts only, and leave a string out without a word; for
    them each text becomes one part. Raises what the template raises.
    """
    given = list(messages)
    if _reads_parts_only(tokenizer, str(tokenizer.chat_template)):
        given = [_in_parts(message) for message in given]
    return str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=answering))


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


@lru_cache(maxsize=8)
def _reads_parts_only(tokenizer: Any, template: str) -> bool:
    """Tried out, once per ``template``."""
    probe = {"role": "user", "content": "razonaSAID"}

    def is_written(message: Mapping[str, Any]) -> bool:
        try:
            return "razonaSAID" in tokenizer.apply_chat_template([message], tokenize=False)
        except Exception:  # a template may refuse any conversation it likes
            return False

    return not is_written(probe) and is_written(_in_parts(probe))
