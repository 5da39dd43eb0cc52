"""Rows become demonstrations: token ids, and which of them are trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from razona.config.common import DataConfig
from razona.data.chat import tokenizer_of
from razona.data.prompts import (
    as_input,
    as_messages,
    drop_notices,
    encode,
    need_column,
    plain_notices,
    render,
    unseen_notices,
)
from razona.data.rows import Rows
from razona.errors import DataError
from razona.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One row to imitate. ``loss_mask[t]`` says whether token t is trained; the last token is one that is:
    the stop token, marked by its place and not by its id, so a pad token of the same id takes nothing
    away."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


@dataclass(frozen=True)
class DemonstrationSet:
    """Demonstrations, how many rows were dropped for which reason, lines to print (``notices``), and in words
    which of their tokens are trained.
    """

    demonstrations: tuple[Demonstration, ...]
    total: int
    dropped: Mapping[str, int]
    notices: tuple[str, ...]
    trained: str = "the answers and their stop tokens"


def build_demonstrations(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    max_length: int,
    stop_token_ids: Collection[int] = (),
) -> DemonstrationSet:
    """One demonstration per row that fits in ``max_length`` tokens.

    Rows have ``data.prompt_column`` and ``data.completion_column`` (a string, or a list with one assistant
    message); or a column ``messages``, of which every assistant turn is trained; or, with neither,
    ``data.text_column``, plain texts to go on with from their first token. Trained tokens are what the
    assistant wrote and the token that ends its turn (the first of ``stop_token_ids`` or the tokenizer's own).
    What stands before the first of them is the prompt, which ``data.max_prompt_length`` bounds. Raises
    DataError.
    """
    rows, tokenizer = rows.renamed(data.rename), tokenizer_of(tokenizer)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"The tokenizer {tokenizer.name_or_path!r} has no end token (eos_token): a model trained without "
            "one never stops. Set tokenizer.eos_token."
        )
    stops = {tokenizer.eos_token_id, *stop_token_ids}
    found: list[Demonstration] = []
    dropped: Counter[str] = Counter()
    read = _reader(rows, data)
    for i, row in enumerate(rows):
        demonstration = read(row, tokenizer, data, stops, rows.where(i))
        excess = _excess(demonstration, data.max_prompt_length, max_length)
        if not any(demonstration.loss_mask):
            dropped["nothing in it to train on" if read is _from_text else "no answer in it to train on"] += 1
        elif excess is None:
            found.append(demonstration)
        elif data.too_long == "drop":
            dropped[excess.dropped] += 1
        else:
            raise DataError(
                f"{rows.where(i)}{excess.refused}, or let such rows be left out with --data.too-long drop."
            )
    notices = drop_notices(dropped, len(rows)) + unseen_notices(rows)
    if read is _from_pair and data.system is None:
        notices += plain_notices(rows, tokenizer, data.prompt_column)
    if not found:
        raise DataError(f"Nothing is left of {rows.name} to train on. {' '.join(notices)}")
    made = DemonstrationSet(tuple(found), len(rows), dict(dropped), notices)
    return replace(made, trained="whole texts and their end tokens") if read is _from_text else made


_Reader = Callable[[Mapping[str, Any], Any, DataConfig, set[int], str], Demonstration]


def _reader(rows: Rows, data: DataConfig) -> _Reader:
    """What the columns hold, by their names. DataError where none of the three kinds is there."""
    if data.completion_column not in rows.columns:
        if "messages" in rows.columns:
            return _from_messages
        if data.text_column in rows.columns:
            if data.system is not None:
                raise DataError(
                    f"{rows.name} holds plain texts, column {data.text_column!r}, and data.system = "
                    f"{data.system!r:.60} has no place in one. Leave it out, or give prompts and completions."
                )
            return _from_text
    need_column(rows, data.prompt_column, "--data.prompt-column", "prompts")
    need_column(rows, data.completion_column, "--data.completion-column", "answers to imitate")
    return _from_pair


class _Excess(NamedTuple):
    """Why a demonstration does not fit: as it is counted when dropped, and as an error has it."""

    dropped: str
    refused: str


def _excess(demonstration: Demonstration, max_prompt_length: int | None, max_length: int) -> _Excess | None:
    """What is too long in a demonstration with a trained token; None when it fits."""
    length, prompt = len(demonstration.token_ids), [*demonstration.loss_mask, True].index(True)
    if max_prompt_length is not None and prompt > max_prompt_length:
        return _Excess(
            f"prompt longer than {max_prompt_length} tokens",
            f": its prompt has {prompt} tokens and {max_prompt_length} are allowed. Shorten it, raise "
            "--data.max-prompt-length",
        )
    if length > max_length:
        return _Excess(
            f"longer than {max_length} tokens",
            f" has {length} tokens and {max_length} are allowed. Shorten it, raise --max-length",
        )
    return None


def _from_pair(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, data: DataConfig, stops: set[int], where: str
) -> Demonstration:
    prompt = as_input(row[data.prompt_column], f"{where}, column {data.prompt_column!r}", data.system)
    completion = row[data.completion_column]
    at = f"{where}, column {data.completion_column!r}"
    if isinstance(completion, str):
        answer = completion
    elif isinstance(prompt, str):
        raise DataError(f"{at} must be a string, as the prompt is one; it holds {completion!r:.60}.")
    else:
        messages = as_messages(completion, at)
        if len(messages) != 1 or messages[0]["role"] != "assistant":
            raise DataError(
                f"{at} must hold one assistant message; its roles are {[m['role'] for m in messages]}."
            )
        answer = messages[0]["content"]
    if not answer.strip():
        return Demonstration((), ())
    if not isinstance(prompt, str):
        return _from_turns(
            [*prompt, {"role": "assistant", "content": answer}], tokenizer, stops, where, first=len(prompt)
        )
    head = encode(tokenizer, prompt, as_written=False)
    tail = _continuation(tokenizer, head, prompt, prompt + answer, where, as_written=False)
    if tail[-1] not in stops:
        tail.append(tokenizer.eos_token_id)
    return Demonstration((*head, *tail), (False,) * len(head) + (True,) * len(tail))


def _from_text(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, data: DataConfig, stops: set[int], where: str
) -> Demonstration:
    """Every token but the first, which nothing predicts; with the end token, unless the text ends by one."""
    text = row[data.text_column]
    if not isinstance(text, str):
        raise DataError(f"{where}, column {data.text_column!r} must be a string; it holds {text!r:.60}.")
    if not text.strip():
        return Demonstration((), ())
    ids = encode(tokenizer, text, as_written=False)
    if ids[-1] not in stops:
        ids.append(tokenizer.eos_token_id)
    return Demonstration(tuple(ids), (False,) + (True,) * (len(ids) - 1))


def _from_messages(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, data: DataConfig, stops: set[int], where: str
) -> Demonstration:
    at = f"{where}, column 'messages'"
    if isinstance(row["messages"], str):
        raise DataError(f"{at} holds a string. It must be a list of messages.")
    messages = as_input(row["messages"], at, data.system)
    assert not isinstance(messages, str)
    return _from_turns(messages, tokenizer, stops, at, first=0)


def _from_turns(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, stops: set[int], where: str, *, first: int
) -> Demonstration:
    """Trains every assistant turn from message ``first`` on. What comes after the last one is left out.

    A turn is what the chat template adds to the text that a sampler would be given at that point; so the ids
    before each trained turn are exactly those the model sees when it answers.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < first or not message["content"].strip():
            continue
        if i == 0:
            raise DataError(
                f"{where}: the first message is the assistant's, and it answers nothing. Put a prompt first."
            )
        before = render(tokenizer, messages[:i], where, answering=True)
        after = render(tokenizer, messages[: i + 1], where, answering=False)
        head = encode(tokenizer, before, as_written=True)
        if head[: len(ids)] != ids or not after.startswith(before):
            raise DataError(
                f"{where}: the chat template writes message {i} or those before it differently once they are "
                "history, so this conversation is not what the model sees when it answers. Give one row per "
                "answer, with the columns prompt and completion."
            )
        turn = _continuation(tokenizer, head, before, after, where, as_written=True)
        turn = turn[: _end_of_turn(tokenizer, turn, stops, where)]
        mask += [False] * (len(head) - len(mask)) + [True] * len(turn)
        ids = head + turn
    return Demonstration(tuple(ids), tuple(mask))


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, turn: list[int], stops: set[int], where: str) -> int:
    """Tokens of the turn up to its stop token, it included: the first id that stops, else a special one."""
    for place, token in enumerate(turn):
        if token in stops:
            return place + 1
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    for place, token in enumerate(turn):
        if token in special:
            return place + 1
    raise DataError(
        f"{where}: the chat template ends an assistant message without a stop token: a model trained on it "
        "never stops. Let the template write the tokenizer's eos_token there."
    )


def _continuation(
    tokenizer: PreTrainedTokenizerBase,
    head: list[int],
    before: str,
    text: str,
    where: str,
    *,
    as_written: bool,
) -> list[int]:
    """Ids that ``text`` adds to those of its beginning ``before``.

    Where a token would reach over the border the rest is tokenised on its own, because a sampler too starts
    from the ids of ``before`` alone.
    """
    whole = encode(tokenizer, text, as_written=as_written)
    if whole[: len(head)] == head:
        return whole[len(head) :]
    apart: list[int] = encode(tokenizer, text[len(before) :], as_written=True)
    if tokenizer.decode(head + apart) != tokenizer.decode(whole):
        raise DataError(
            f"{where}: prompt and answer cannot be tokenised apart: together they read "
            f"{tokenizer.decode(whole)[-60:]!r}, apart {tokenizer.decode(head + apart)[-60:]!r}. "
            "End the prompt with a newline."
        )
    return apart
