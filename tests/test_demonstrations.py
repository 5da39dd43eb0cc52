"""Which tokens of a demonstration are trained."""

from __future__ import annotations

import pytest
from conftest import CHATML, tiny_tokenizer

from razona.config.common import DataConfig
from razona.data import Rows, build_demonstrations
from razona.errors import DataError

USER = {"role": "user", "content": "2 + 2?"}
THOUGHT = "<think>2 and 2</think> 4"
ANSWER = {"role": "assistant", "content": THOUGHT}


def build(*rows, tok=None, max_length=1000, stop_token_ids=(), **options):
    tok = tok or tiny_tokenizer()
    data = DataConfig(**options)
    return build_demonstrations(
        Rows.of(rows, "rows"), tok, data, max_length=max_length, stop_token_ids=stop_token_ids
    )


def parts(demonstration, tok=None):
    """The text before, and the trained text; only for one trained stretch at the end."""
    tok = tok or tiny_tokenizer()
    ids, mask = demonstration.token_ids, demonstration.loss_mask
    assert len(ids) == len(mask)
    start = mask.index(True)
    assert all(mask[start:])
    return tok.decode(ids[:start]), tok.decode(ids[start:])


def test_strings_train_the_completion_and_the_stop_token_even_when_pad_is_the_same():
    tok = tiny_tokenizer()
    assert tok.pad_token_id == tok.eos_token_id
    found = build({"prompt": "2 + 2?\n", "completion": "4"}, tok=tok).demonstrations[0]
    assert parts(found) == ("2 + 2?\n", "4<|im_end|>")
    assert found.token_ids[-1] == tok.eos_token_id
    assert found.loss_mask[-1]


def test_a_stop_token_that_is_already_there_is_not_doubled():
    found = build({"prompt": "2 + 2?\n", "completion": "4<|im_end|>"}).demonstrations[0]
    assert parts(found) == ("2 + 2?\n", "4<|im_end|>")


def test_a_begin_token_is_not_trained():
    tok = tiny_tokenizer(bos=True)
    assert parts(build({"prompt": "a", "completion": "b"}, tok=tok).demonstrations[0]) == (
        "<s>a",
        "b<|im_end|>",
    )


def test_a_token_never_reaches_over_the_border_of_prompt_and_completion():
    """Together "ab" + "cd" is a|bc|d; the sampler starts from a|b, and so must the demonstration."""
    tok = tiny_tokenizer()
    assert len(tok("abcd")["input_ids"]) == 3
    found = build({"prompt": "ab", "completion": "cd"}, tok=tok).demonstrations[0]
    assert list(found.token_ids[:2]) == tok("ab")["input_ids"]
    assert parts(found) == ("ab", "cd<|im_end|>")
    chat = build({"prompt": [USER], "completion": "\n4"}, tok=tok).demonstrations[0]
    assert parts(chat)[1] == "\n4<|im_end|>"


@pytest.mark.parametrize("completion", [THOUGHT, [ANSWER]])
def test_conversations_train_the_answer_up_to_its_end_token_and_nothing_after(completion):
    before = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    found = build({"prompt": [USER], "completion": completion}).demonstrations[0]
    assert parts(found) == (before, THOUGHT + "<|im_end|>")
    with_system = build({"prompt": "2 + 2?", "completion": completion}, system="S").demonstrations[0]
    assert parts(with_system) == ("<|im_start|>system\nS<|im_end|>\n" + before, THOUGHT + "<|im_end|>")


def test_every_assistant_turn_of_messages_is_trained():
    tok = tiny_tokenizer()
    second = {"role": "assistant", "content": "6"}
    more = {"role": "user", "content": "3 + 3?"}
    found = build({"messages": [USER, ANSWER, more, second, USER]}, tok=tok).demonstrations[0]
    whole = tok.apply_chat_template([USER, ANSWER, more, second], tokenize=False)
    assert tok.decode(found.token_ids) == whole.removesuffix("\n")
    trained = tok.decode([t for t, m in zip(found.token_ids, found.loss_mask, strict=True) if m])
    assert trained == THOUGHT + "<|im_end|>" + "6<|im_end|>"


def test_an_answer_in_the_prompt_is_history_and_not_trained():
    found = build({"prompt": [USER, {**ANSWER, "content": "old"}, USER], "completion": "new"}).demonstrations[
        0
    ]
    before, trained = parts(found)
    assert "old<|im_end|>" in before
    assert trained == "new<|im_end|>"


def test_other_columns_by_option():
    row = {"question": "a", "solution": "b", "id": 1}
    found = build(row, prompt_column="question", completion_column="solution").demonstrations[0]
    assert parts(found) == ("a", "b<|im_end|>")
    renamed = {"question": "prompt", "solution": "completion"}
    assert build(row, rename=renamed).demonstrations[0] == found


GEMMA = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_turn_ends_at_its_own_token_when_the_end_of_text_is_another():
    """As in Gemma: eos is <s> here, the turn ends with <|im_end|>: by id, or the first special one."""
    tok = tiny_tokenizer(chat_template=GEMMA)
    tok.eos_token = "<s>"
    end = tok.convert_tokens_to_ids("<|im_end|>")
    row = {"prompt": [USER], "completion": " 4 "}
    for stops in ((), (end,)):
        assert parts(build(row, tok=tok, stop_token_ids=stops).demonstrations[0])[1] == "4<|im_end|>"


def test_what_the_template_writes_after_the_last_turn_is_left_out():
    """As in Phi-3: the whole text ends with an end-of-text token of its own."""
    tok = tiny_tokenizer(chat_template=CHATML + "{% if not add_generation_prompt %}<s>{% endif %}")
    row = {"messages": [USER, ANSWER, USER, ANSWER]}
    found = build(row, tok=tok, stop_token_ids=(tok.convert_tokens_to_ids("<s>"),)).demonstrations[0]
    assert tok.decode(found.token_ids).count("<s>") == 0
    assert tok.decode(found.token_ids).endswith(THOUGHT + "<|im_end|>")


def test_a_template_without_a_stop_token_is_refused():
    tok = tiny_tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    with pytest.raises(DataError, match=r"row 0 .* ends an assistant message without a stop token"):
        build({"messages": [USER, ANSWER]}, tok=tok)


def test_a_template_that_rewrites_history_is_refused():
    """As templates that take the thinking out of earlier turns do."""
    forgetful = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    )
    tok = tiny_tokenizer(chat_template=forgetful)
    with pytest.raises(
        DataError, match=r"writes message 3 or those before it differently .* one row per answer"
    ):
        build({"messages": [USER, ANSWER, USER, ANSWER]}, tok=tok)
    assert parts(build({"prompt": [USER], "completion": THOUGHT}, tok=tok).demonstrations[0])[1].startswith(
        "<think>"
    )


def test_rows_that_do_not_fit_or_teach_nothing_are_dropped_and_counted():
    rows = [{"prompt": "a", "completion": c} for c in ("b", "b" * 50, "", "b" * 8)]
    found = build(*rows, max_length=10)
    assert [len(d.token_ids) for d in found.demonstrations] == [3, 10]
    assert found.dropped == {"longer than 10 tokens": 1, "no answer in it to train on": 1}
    assert "1 of 4 rows dropped: longer than 10 tokens." in found.notices
    with pytest.raises(DataError, match=r"row 1 .* has 52 tokens and 10 are allowed"):
        build(*rows, max_length=10, too_long="error")
    with pytest.raises(
        DataError, match=r"Nothing is left of rows to train on. 1 of 1 rows dropped: no answer"
    ):
        build({"messages": [USER]})


def test_a_prompt_may_be_too_long():
    rows = [{"prompt": p, "completion": "b"} for p in ("aa", "aaa")]
    found = build(*rows, max_prompt_length=2)
    assert [len(d.token_ids) for d in found.demonstrations] == [4]
    assert found.dropped == {"prompt longer than 2 tokens": 1}
    with pytest.raises(
        DataError, match=r"row 1 .*: its prompt has 3 tokens and 2 are allowed.*too-long drop"
    ):
        build(*rows, max_prompt_length=2, too_long="error")
    with pytest.raises(DataError, match="1 of 1 rows dropped: prompt longer than 1 tokens"):
        build({"messages": [USER, ANSWER]}, max_prompt_length=1)
    nothing = build({"prompt": "aaa", "completion": ""}, *rows, max_prompt_length=2, too_long="drop")
    assert nothing.dropped == {"no answer in it to train on": 1, "prompt longer than 2 tokens": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "answer": "b"},
            "no column 'completion'. Its columns: prompt, answer.*--data.completion-col",
        ),
        ({"question": "a", "completion": "b"}, "no column 'prompt'.*'question'.*--data.prompt-column"),
        (
            {"prompt": "a", "completion": [ANSWER]},
            "row 0 .*'completion' must be a string, as the prompt is one",
        ),
        ({"prompt": "a", "completion": 4}, "row 0 .*'completion' must be a string"),
        (
            {"prompt": [USER], "completion": [USER]},
            r"must hold one assistant message; its roles are \['user'\]",
        ),
        ({"prompt": [USER], "completion": [ANSWER, ANSWER]}, "must hold one assistant message"),
        ({"messages": "a"}, "row 0 .*'messages' holds a string"),
        ({"messages": [ANSWER]}, "row 0 .* the first message is the assistant's"),
    ],
)
def test_unusable_rows(row, message):
    with pytest.raises(DataError, match=message):
        build(row)


def test_a_tokenizer_without_an_end_token_is_refused():
    tok = tiny_tokenizer()
    tok.eos_token = None
    with pytest.raises(DataError, match="'tiny' has no end token"):
        build({"prompt": "a", "completion": "b"}, tok=tok)


def test_plain_texts_are_trained_whole_with_their_end():
    tok = tiny_tokenizer()
    made = build({"text": "abc d"}, {"text": "e<|im_end|>"}, {"text": " \n"}, tok=tok)
    first, second = made.demonstrations
    assert parts(first) == ("a", "bc d<|im_end|>") and parts(second) == ("e", "<|im_end|>")
    assert made.notices == ("1 of 3 rows dropped: nothing in it to train on.",)
    assert made.trained == "whole texts and their end tokens"
    begun = build({"text": "abc"}, tok=tiny_tokenizer(bos=True)).demonstrations[0]
    assert parts(begun, tiny_tokenizer(bos=True)) == ("<s>", "abc<|im_end|>")


def test_which_columns_are_read():
    """An answer goes before messages, and both before plain text."""
    row = {"text": "x", "prompt": "p", "messages": [USER, ANSWER]}
    assert "user" in parts(build(row).demonstrations[0])[0]
    assert parts(build({**row, "completion": "c"}).demonstrations[0]) == ("p", "c<|im_end|>")
    body = build({"body": "ab", "prompt": "p"}, text_column="body").demonstrations[0]
    assert parts(body) == ("a", "b<|im_end|>")
    with pytest.raises(DataError, match=r"no column 'completion'"):
        build({"text": "x", "prompt": "p"}, text_column="body")
    with pytest.raises(DataError, match=r"column 'text' must be a string; it holds 3"):
        build({"text": 3})
    with pytest.raises(DataError, match=r"data.system = 'Think.' has no place in one"):
        build({"text": "x"}, system="Think.")
