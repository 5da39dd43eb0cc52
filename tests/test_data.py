"""Rows, prompts and their order."""

from __future__ import annotations

import json
from collections import Counter

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from conftest import tiny_tokenizer
from hypothesis import given, strategies as st

from razona.config.common import DataConfig
from razona.data import PromptSource, Rows, build_prompts, load_rows
from razona.errors import CheckpointError, DataError

ROWS = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "¿7 por 6?", "answer": "42"}]


def rows_of(*prompts, **columns):
    return Rows.of([{"prompt": p, **columns} for p in prompts], "rows")


def build(prompts, *, tok=None, max_context=None, reserve=0, **options):
    return build_prompts(
        rows_of(*prompts),
        tok or tiny_tokenizer(),
        DataConfig(**options),
        max_context=max_context,
        reserve=reserve,
    )


# --- rows


def written(folder):
    (folder / "a.jsonl").write_text("\n\n".join(json.dumps(r) for r in ROWS) + "\n", encoding="utf-8-sig")
    (folder / "a.json").write_text(json.dumps(ROWS, ensure_ascii=False, indent=1), encoding="utf-8")
    (folder / "lines.json").write_text("\n".join(json.dumps(r) for r in ROWS), encoding="utf-8")
    (folder / "a.csv").write_text("prompt,answer\n2 + 2?,4\n\n¿7 por 6?,42\n", encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet")
    return [folder / name for name in ("a.jsonl", "a.json", "lines.json", "a.csv", "a.parquet")]


def test_every_form_gives_the_same_rows_and_fingerprint(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    forms = [*written(tmp_path), str(tmp_path / "a.jsonl"), ROWS, tuple(ROWS), data]
    forms.append(datasets.DatasetDict(train=data))
    found = [load_rows(form) for form in forms]
    assert all(list(rows) == ROWS for rows in found)
    assert {rows.columns for rows in found} == {("prompt", "answer")}
    assert len({rows.fingerprint for rows in found}) == 1
    assert load_rows(found[0]) is found[0]


def test_a_changed_character_or_order_changes_the_fingerprint():
    fingerprint = load_rows(ROWS).fingerprint
    assert load_rows([ROWS[0], {**ROWS[1], "answer": "43"}]).fingerprint != fingerprint
    assert load_rows(ROWS[::-1]).fingerprint != fingerprint
    assert load_rows([dict(reversed(r.items())) for r in ROWS]).fingerprint == fingerprint


def test_rows_cannot_be_changed_through_what_they_hand_out():
    rows = load_rows(ROWS)
    rows[0]["prompt"] = "changed"
    next(iter(rows))["prompt"] = "changed"
    assert rows[0]["prompt"] == "2 + 2?"


def test_missing_values_are_none():
    assert list(load_rows([{"a": 1}, {"b": 2}])) == [{"a": 1, "b": None}, {"a": None, "b": 2}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "x.jsonl",
            '{"a": 1}\n\n{"a": 1,}\n',
            r"x\.jsonl, line 3 is not JSON: .* Every line must be one object",
        ),
        ("x.jsonl", '{"a": 1}\n[1]\n', r"x\.jsonl, line 2 is \[1\], not an object"),
        ("x.jsonl", "", r"x\.jsonl has no rows: there is nothing to train on"),
        ("x.json", '[{"a": 1},\n {"a" 1}]', r"x\.json, line 2 is not JSON: .* list of objects"),
        ("x.json", "[1, 2]", r"x\.json, row 0 is 1, not a dict of columns"),
        ("x.json", '{\n"a": 1\n}', r"x\.json, line 1 is not JSON"),
        ("x.csv", "a,b\n1,2\n1,2,3\n", r"x\.csv, line 3 has 3 cells, and the header has 2. Put quotes"),
        ("x.csv", "a,a\n1,2\n", r"x\.csv, line 1 names the column 'a' twice"),
        ("x.parquet", "no", r"x\.parquet is not a whole Parquet file"),
        ("x.txt", "no", r"x\.txt is not of a kind that can be read. Give a \.jsonl"),
    ],
)
def test_broken_files(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows(tmp_path / name)


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "x.csv").write_bytes("a\nñ\n".encode("latin-1"))
    with pytest.raises(DataError, match="is not UTF-8 text"):
        load_rows(tmp_path / "x.csv")


def test_what_cannot_be_loaded(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"There is no file .*trian\.jsonl\. Did you mean 'train\.jsonl'\?"):
        load_rows(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"--data.split test: the file .* has no splits"):
        load_rows(tmp_path / "train.jsonl", split="test")
    with pytest.raises(DataError, match=r"No data set was given. Name one with --data.path"):
        load_rows("")
    with pytest.raises(DataError, match=r"Rows cannot be read from 7 \(int\)"):
        load_rows(7)
    with pytest.raises(DataError, match=r"has no split 'tests'. It has: train, test. Did you mean 'test'"):
        load_rows(dataset_dict(), split="tests")
    with pytest.raises(DataError, match="column names must be strings"):
        load_rows([{1: 2}])


def dataset_dict():
    data = datasets.Dataset.from_list(ROWS)
    return datasets.DatasetDict(train=data, test=data)


def test_a_hub_id_without_a_network_says_which_forms_work():
    with pytest.raises(DataError) as caught:
        load_rows("nobody/nothing:main@test")
    assert "could not be loaded" in str(caught.value)
    assert "Without a network only files" in str(caught.value)
    assert "a list of dicts" in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_hub_id_carries_config_and_split(monkeypatch):
    seen = []

    def load_dataset(name, config, *, split):
        seen.append((name, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load_rows("openai/gsm8k:main@test")
    load_rows("owner/name", split="validation")
    assert seen == [("openai/gsm8k", "main", "test"), ("owner/name", None, "validation")]


def test_rename():
    rows = load_rows(ROWS).renamed({"answer": "gold"})
    assert rows.columns == ("prompt", "gold")
    assert rows[1] == {"prompt": "¿7 por 6?", "gold": "42"}
    assert load_rows(ROWS).renamed({"prompt": "answer", "answer": "prompt"})[0] == {
        "prompt": "4",
        "answer": "2 + 2?",
    }
    with pytest.raises(
        DataError, match=r"has no column 'answr'. Its columns: prompt, answer. Did you mean 'answer'"
    ):
        rows = load_rows(ROWS).renamed({"answr": "gold"})
    with pytest.raises(DataError, match="would have two columns called 'prompt'"):
        load_rows(ROWS).renamed({"answer": "prompt"})


# --- prompts


def test_string_prompts_stay_strings_and_are_tokenised_as_they_are():
    tok = tiny_tokenizer()
    found = build(["abc", "d"], tok=tok)
    assert [p.input for p in found.prompts] == ["abc", "d"]
    assert not found.conversational
    assert [line.partition(":")[0] for line in found.notices] == ["rows"]  # that they bypass the template
    tok.chat_template = None
    assert build(["abc"], tok=tok).notices == () == build([[USER]]).notices
    assert tok.decode(found.prompts[0].token_ids) == "abc"
    assert found.prompts[1].columns == {"prompt": "d"}
    assert [p.id for p in found.prompts] == [0, 1]


def test_a_begin_token_comes_once():
    tok = tiny_tokenizer(bos=True)
    plain, written_out = build(["abc", "<s>abc"], tok=tok).prompts
    assert plain.token_ids == written_out.token_ids
    assert plain.token_ids.count(tok.bos_token_id) == 1
    with_template = tiny_tokenizer(bos=True, chat_template="<s>" + tok.chat_template)
    chat = build(["abc"], tok=with_template, system="S").prompts[0]
    assert chat.token_ids.count(tok.bos_token_id) == 1


def test_a_chat_template_alone_decides_about_the_begin_token():
    tok = tiny_tokenizer(bos=True)
    assert tok.bos_token_id not in build(["abc"], tok=tok, system="S").prompts[0].token_ids


def test_messages_and_the_system_prompt():
    tok = tiny_tokenizer()
    messages = [{"role": "user", "content": "abc", "name": None}]
    found = build([messages], tok=tok)
    assert found.conversational
    assert found.prompts[0].input == [{"role": "user", "content": "abc"}]
    assert (
        tok.decode(found.prompts[0].token_ids) == "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    )
    given_by_option = build(["abc"], tok=tok, system="S").prompts[0]
    assert given_by_option.input == [{"role": "system", "content": "S"}, {"role": "user", "content": "abc"}]
    assert build([messages], tok=tok, system="S").prompts[0].token_ids == given_by_option.token_ids


def test_a_missing_prompt_column_names_the_columns_and_the_option():
    rows = load_rows([{"question": "2 + 2?", "answer": "4"}])
    with pytest.raises(DataError) as caught:
        build_prompts(rows, tiny_tokenizer(), DataConfig())
    assert str(caught.value) == (
        "the list of rows has no column 'prompt'. Its columns: question, answer. Did you mean 'question'? "
        "Name the one that holds the prompts with --data.prompt-column."
    )
    with pytest.raises(DataError, match=r"no column 'questoin'.* Did you mean 'question'"):
        build_prompts(rows, tiny_tokenizer(), DataConfig(prompt_column="questoin"))
    found = build_prompts(
        rows, tiny_tokenizer(), DataConfig(prompt_column="question", rename={"answer": "gold"})
    )
    assert found.columns == ("question", "gold")
    assert found.prompts[0].columns == {"question": "2 + 2?", "gold": "4"}


USER = {"role": "user", "content": "abc"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            7,
            r"row 1 \(the first is 0\), column 'prompt' holds 7 \(int\). It must be a string or a list",
        ),
        (None, "row 1 .* holds None"),
        ("", "row 1 .* the prompt is empty"),
        ([], "row 1 .* the list of messages is empty"),
        ([USER, {"role": "user"}], "row 1 .* message 1 needs the keys role and content, and has: role"),
        ([{"from": "human", "value": "abc"}], "row 1 .* message 0 needs .* and has: from, value"),
        (["abc"], "row 1 .* message 0 needs .* and has: 'abc'"),
        (
            [{"role": "human", "content": "abc"}],
            "row 1 .* has the role 'human'. Roles are system, .* called user",
        ),
        ([{"role": "user", "content": [{}]}], "row 1 .* message 0 has a content of type list"),
        ([USER, {"role": "assistant", "content": "d"}], "row 1 .* ends with an assistant message"),
        ("abc", "row 1 .* its prompt is a string, and that of row 0 is a list of messages"),
    ],
)
def test_unusable_prompts_are_named_by_row(prompt, message):
    with pytest.raises(DataError, match=message):
        build([[USER], prompt])


def test_two_system_prompts():
    with pytest.raises(
        DataError, match=r"already begins with a system message, and --data.system gives another"
    ):
        build([[{"role": "system", "content": "S"}, USER]], system="T")


def test_chat_template_errors():
    with pytest.raises(
        DataError, match=r"row 0 .* 'tiny' has no chat template .* plain string prompts without"
    ):
        build([[USER]], tok=tiny_tokenizer(chat_template=None))
    refusing = tiny_tokenizer(chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(
        DataError, match=r"template refuses these messages: no system role. Their roles are system, "
    ):
        build(["abc"], tok=refusing, system="S")


def test_a_template_that_opens_the_thinking_is_said():
    tok = tiny_tokenizer()
    tok.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    assert "already opens <think>" in build([[USER]], tok=tok).notices[0]


def test_long_prompts_are_dropped_and_counted_never_cut():
    found = build(["a" * 10, "a" * 11, "a", "a" * 500], max_prompt_length=10)
    assert [(p.id, len(p.token_ids)) for p in found.prompts] == [(0, 10), (2, 1)]
    assert found.dropped == {"prompt longer than 10 tokens": 2}
    assert found.notices[0] == "2 of 4 rows dropped: prompt longer than 10 tokens."
    assert found.total == 4


def test_long_prompts_are_refused_by_option():
    with pytest.raises(
        DataError, match=r"row 1 .* its prompt has 11 tokens and 10 are allowed.*--data.too-long drop"
    ):
        build(["a", "a" * 11], max_prompt_length=10, too_long="error")


def test_the_context_minus_the_completion_limits_prompts_too():
    assert len(build(["a" * 10, "a" * 11], max_context=26, reserve=16).prompts) == 1
    assert len(build(["a" * 10, "a" * 11], max_context=26, reserve=16, max_prompt_length=100).prompts) == 1
    assert len(build(["a" * 10, "a" * 9], max_context=26, reserve=16, max_prompt_length=9).prompts) == 1
    with pytest.raises(DataError, match="holds 16 tokens and 16 are kept for the completion: no prompt fits"):
        build(["a"], max_context=16, reserve=16)


def test_nothing_left():
    with pytest.raises(DataError, match=r"All 2 prompts .* longer than 3 tokens \(the shortest has 4\)"):
        build(["a" * 5, "a" * 4], max_prompt_length=3)


def test_duplicate_rows_are_kept_apart():
    assert [p.id for p in build(["a", "a"]).prompts] == [0, 1]


# --- the order

sizes = st.integers(1, 9)
takes = st.lists(st.integers(0, 25), max_size=8)


@given(sizes, takes, st.integers(0, 3), st.booleans())
def test_every_epoch_visits_every_prompt_exactly_once(size, ns, seed, shuffle):
    source = PromptSource(range(size), seed=seed, shuffle=shuffle)
    walked = []
    for n in ns:
        taken = source.take(n)
        assert len(taken) == n
        walked += taken
    epochs = [walked[i : i + size] for i in range(0, len(walked), size)]
    for epoch in epochs:
        assert max(Counter(epoch).values()) == 1
        assert len(epoch) < size or set(epoch) == set(range(size))
    assert len(epochs) <= 1 or len(epochs[-2]) == size


@given(sizes, takes, takes, st.booleans())
def test_a_resumed_source_goes_on_as_one_never_stopped(size, before, after, shuffle):
    straight = PromptSource(range(size), seed=5, shuffle=shuffle)
    for n in before:
        straight.take(n)
    resumed = PromptSource(range(size), seed=5, shuffle=shuffle)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert [resumed.take(n) for n in after] == [straight.take(n) for n in after]
    assert resumed.state_dict() == straight.state_dict()


@given(sizes, takes)
def test_the_order_does_not_depend_on_how_it_is_taken(size, ns):
    at_once = PromptSource(range(size), seed=1).take(sum(ns))
    source = PromptSource(range(size), seed=1)
    assert [p for n in ns for p in source.take(n)] == at_once


def test_epochs_and_seeds_have_their_own_order():
    source = PromptSource(range(50), seed=0)
    first, second = source.take(50), source.take(50)
    assert first != second
    assert first != list(range(50))
    assert PromptSource(range(50), seed=1).take(50) != first
    assert PromptSource(range(3), seed=0, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]
    assert PromptSource(range(6), seed=0).take(12) == [2, 1, 0, 4, 3, 5, 0, 4, 1, 3, 2, 5]  # on every machine


def test_fewer_prompts_than_a_step_needs_is_said():
    source = PromptSource(range(3), seed=0)
    assert source.warning(3) is None
    assert (
        "has 3 usable prompts and a step takes 8: every step sees each of them 2 to 3 times"
        in source.warning(8)
    )
    assert "sees each of them 2 times" in source.warning(6)
    assert sorted(source.take(6)) == [0, 0, 1, 1, 2, 2]


def test_a_source_refuses_other_data():
    state = PromptSource(range(3), seed=0).state_dict()
    with pytest.raises(CheckpointError, match="walked through 3 prompts and the data set now gives 4"):
        PromptSource(range(4), seed=0).load_state_dict(state)
    with pytest.raises(DataError, match="There are no prompts to take from"):
        PromptSource([], seed=0)
