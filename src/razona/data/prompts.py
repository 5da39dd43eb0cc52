"""Rows become prompts: what the model sees as token ids, and what the reward functions see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from razona.config.common import DataConfig
from razona.data.chat import chat_text, tokenizer_of
from razona.data.rows import Rows
from razona.errors import DataError, nearest
from razona.types import Message, Prompt, PromptInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")
USUAL_NAMES = ("question", "problem", "query", "instruction", "input", "messages", "pregunta")
MEDIA_COLUMNS = ("image", "images", "pixel_values", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class PromptSet:
    """Prompts, how many rows were dropped for which reason, and lines to print (``notices``)."""

    prompts: tuple[Prompt, ...]
    columns: tuple[str, ...]
    """Columns every prompt has, after renaming: what reward functions can be bound to."""
    conversational: bool
    """Inputs are messages, and completions are given to reward functions as messages."""
    total: int
    dropped: Mapping[str, int]
    notices: tuple[str, ...]


def build_prompts(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    max_context: int | None = None,
    reserve: int = 0,
) -> PromptSet:
    """One prompt per row that fits.

    A string stays a string and is tokenised as it is; a list of messages, or a string under ``data.system``,
    is rendered with the tokenizer's chat template. A prompt may have ``data.max_prompt_length`` tokens, and
    at most what ``max_context`` (tokens the model holds) leaves beside ``reserve`` (tokens kept for the
    completion); a longer one is never cut, but dropped and counted, or refused. Raises DataError.
    """
    rows, tokenizer = rows.renamed(data.rename), tokenizer_of(tokenizer)
    limit = _limit(data, max_context, reserve)
    inputs = _inputs(rows, data)
    conversational = not isinstance(inputs[0], str)
    texts = [
        given if isinstance(given, str) else render(tokenizer, given, rows.where(i), answering=True)
        for i, given in enumerate(inputs)
    ]
    prompts: list[Prompt] = []
    lengths: list[int] = []
    for i, (given, text) in enumerate(zip(inputs, texts, strict=True)):
        ids = encode(tokenizer, text, as_written=conversational)
        lengths.append(len(ids))
        if limit is None or len(ids) <= limit:
            prompts.append(Prompt(rows.number(i), given, tuple(ids), rows[i]))
        elif data.too_long == "error":
            raise DataError(
                f"{rows.where(i)}: its prompt has {len(ids)} tokens and {limit} are allowed. Shorten it, "
                "raise --data.max-prompt-length, or let such rows be left out with --data.too-long drop."
            )
    if not prompts:
        raise DataError(
            f"All {len(rows)} prompts of {rows.name} are longer than {limit} tokens (the shortest has "
            f"{min(lengths)}): nothing is left. Raise --data.max-prompt-length, lower "
            "--sampling.max-completion-length, or take a model with a longer context."
        )
    dropped = (
        {f"prompt longer than {limit} tokens": len(rows) - len(prompts)} if len(prompts) < len(rows) else {}
    )
    notices = drop_notices(dropped, len(rows)) + unseen_notices(rows)
    if conversational and texts[0].rstrip().endswith("<think>"):
        notices += (
            "The chat template already opens <think>: completions begin inside it, and a reward that looks "
            "for the opening tag, as `format` does, gives 0 to all of them.",
        )
    if data.system is None:
        notices += plain_notices(rows, tokenizer, data.prompt_column)
    return PromptSet(tuple(prompts), rows.columns, conversational, len(rows), dropped, notices)


def _inputs(rows: Rows, data: DataConfig) -> list[PromptInput]:
    """The prompt column as strings only or messages only."""
    column = need_column(rows, data.prompt_column, "--data.prompt-column", "prompts")
    inputs = [
        as_input(row[column], f"{rows.where(i)}, column {column!r}", data.system)
        for i, row in enumerate(rows)
    ]
    for i, given in enumerate(inputs):
        if isinstance(given, str) != isinstance(inputs[0], str):
            raise DataError(
                f"{rows.where(i)}: its prompt is {_kind(given)}, and that of row 0 is {_kind(inputs[0])}. "
                "Reward functions get completions in the form of the prompt, so use one form in the whole "
                "column."
            )
        if not isinstance(given, str) and given[-1]["role"] == "assistant":
            raise DataError(
                f"{rows.where(i)}: its prompt ends with an assistant message, but that is what the model is "
                "to write. Remove the answer from the prompt; a reward function can have it from another "
                "column."
            )
    return inputs


def _kind(given: PromptInput) -> str:
    return "a string" if isinstance(given, str) else "a list of messages"


def _limit(data: DataConfig, max_context: int | None, reserve: int) -> int | None:
    """Tokens a prompt may have; None when nothing limits it."""
    room = None if max_context is None else max_context - reserve
    if room is not None and room < 1:
        raise DataError(
            f"The model holds {max_context} tokens and {reserve} are kept for the completion: no prompt "
            "fits. Lower --sampling.max-completion-length."
        )
    return min((n for n in (data.max_prompt_length, room) if n is not None), default=None)


def need_column(rows: Rows, column: str, option: str, what: str) -> str:
    """``column`` if the rows have it, else a DataError that names those there are and the option."""
    if column in rows.columns:
        return column
    usual = [name for name in USUAL_NAMES if name in rows.columns] if column == "prompt" else []
    close = f" Did you mean '{usual[0]}'?" if usual else nearest(column, rows.columns)
    raise DataError(
        f"{rows.name} has no column {column!r}. Its columns: {', '.join(rows.columns)}.{close} "
        f"Name the one that holds the {what} with {option}."
    )


def as_input(value: Any, where: str, system: str | None) -> PromptInput:
    """A prompt as given, checked; messages when it is a list or when there is a system prompt."""
    if isinstance(value, str):
        if not value:
            raise DataError(
                f"{where}: the prompt is empty, and there is nothing to answer. Fill it or remove the row."
            )
        if system is None:
            return value
        return [{"role": "system", "content": system}, {"role": "user", "content": value}]
    messages = as_messages(value, where)
    if system is None:
        return messages
    if messages[0]["role"] in ("system", "developer"):
        raise DataError(
            f"{where}: it already begins with a system message, and --data.system gives another. Leave one "
            "out."
        )
    return [{"role": "system", "content": system}, *messages]


def as_messages(value: Any, where: str) -> list[Message]:
    """A list of messages, checked: each with a known role and a string content. Raises DataError."""
    if not isinstance(value, (list, tuple)):
        raise DataError(
            f"{where} holds {value!r:.60} ({type(value).__name__}). It must be a string or a list of "
            "messages "
            '[{"role": "user", "content": "..."}].'
        )
    if not value:
        raise DataError(f"{where}: the list of messages is empty, and there is nothing to answer.")
    messages: list[Message] = []
    for number, message in enumerate(value):
        # Arrow fills the keys that other rows have with None.
        found = {k: v for k, v in message.items() if v is not None} if isinstance(message, Mapping) else {}
        if not {"role", "content"} <= found.keys():
            keys = ", ".join(map(str, found)) if found else f"{message!r:.60}"
            raise DataError(f"{where}: message {number} needs the keys role and content, and has: {keys}.")
        if found["role"] not in ROLES:
            raise DataError(
                f"{where}: message {number} has the role {found['role']!r}. Roles are {', '.join(ROLES)}; "
                "ShareGPT's human and gpt are called user and assistant."
            )
        messages.append({**found, "content": _text(found["content"], f"{where}: message {number}")})
    return messages


def _text(content: Any, which: str) -> str:
    """The content of a message as one string: itself, or parts that are all text. Raises DataError."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else ()
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    others = sorted({str(kind) for kind in kinds if kind not in (None, "text")})
    if others:
        raise DataError(
            f"{which} has a part of type {', '.join(others)}, and only text is trained: the model would "
            "answer without having seen it. Leave such rows out, or say in words what it shows."
        )
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if not texts or None in kinds or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{which} has a content of type {type(content).__name__}. It must be a string, or a list of "
            'parts [{"type": "text", "text": "..."}].'
        )
    return "".join(map(str, texts))


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str, *, answering: bool
) -> str:
    """The chat template's text; with ``answering`` it ends where the assistant's answer begins."""
    if not tokenizer.chat_template:
        raise DataError(
            f"{where} is a conversation, and the tokenizer {tokenizer.name_or_path!r} has no chat template "
            "to write it with. Take the model's chat variant (often -Instruct or -it), set "
            "tokenizer.chat_template, or give plain string prompts without --data.system."
        )
    try:
        return chat_text(tokenizer, messages, answering=answering)
    except Exception as error:  # templates raise whatever they like
        raise DataError(
            f"{where}: the chat template refuses these messages: {error}. Their roles are "
            f"{', '.join(m['role'] for m in messages)}."
        ) from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, as_written: bool) -> list[int]:
    """Token ids of a text. ``as_written`` adds nothing (a chat template has written the special tokens);
    otherwise a begin token is put in front where the tokenizer is made to and the text does not have it, and
    never an end token.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if not as_written and bos is not None and tokenizer("")["input_ids"][:1] == [bos] and ids[:1] != [bos]:
        return [bos, *ids]
    return ids


def drop_notices(dropped: Mapping[str, int], total: int) -> tuple[str, ...]:
    """One printable line per reason."""
    return tuple(f"{count} of {total} rows dropped: {reason}." for reason, count in dropped.items())


def unseen_notices(rows: Rows) -> tuple[str, ...]:
    """What to print when rows hold pictures or sound beside their text."""
    unseen = [column for column in rows.columns if column in MEDIA_COLUMNS]
    if not unseen:
        return ()
    return (
        f"{rows.name}: only text is trained. The model does not get the column {', '.join(unseen)}, so "
        "prompts that cannot be answered without it teach guessing; reward functions do get it.",
    )


def plain_notices(rows: Rows, tokenizer: PreTrainedTokenizerBase, column: str) -> tuple[str, ...]:
    """What to print when prompts are strings and the model has a chat template, which they bypass."""
    if not tokenizer.chat_template or not any(isinstance(row[column], str) for row in rows):
        return ()
    return (
        f"{rows.name}: prompts are plain text and go to the model as they are; this model has a chat "
        "template: use messages or --system.",
    )
