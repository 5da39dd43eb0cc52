"""Files, lists and data sets become rows: dicts that all have the same columns."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razona.errors import DataError, nearest

FORMS = (
    "a .jsonl, .json, .csv or .parquet file, a list of dicts, a datasets.Dataset, "
    "or a hub id: owner/name, owner/name:config, owner/name:config@split"
)
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True, repr=False)
class Rows:
    """Rows of a data set, in memory and not to be changed. Build them with ``load_rows`` or ``Rows.of``.

    Every row has every column; a value that a row did not have is None. ``fingerprint`` is a hash of the
    contents: equal contents give it equally whatever file format they came in, and one changed character
    changes it.
    """

    name: str
    columns: tuple[str, ...]
    fingerprint: str
    _rows: tuple[dict[str, Any], ...]
    _numbers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]], name: str) -> Rows:
        """Checks that each row is a dict with string keys and fills what is missing with None."""
        found = list(rows)
        columns: dict[str, None] = {}
        for number, row in enumerate(found):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{name}, row {number} is {_short(row)}, not a dict of columns. "
                    'A row looks like {"prompt": "2 + 2?", "answer": "4"}.'
                )
            columns.update(dict.fromkeys(row))
        if not found:
            raise DataError(f"{name} has no rows: there is nothing to train on. Give it at least one.")
        if odd := [key for key in columns if not isinstance(key, str)]:
            raise DataError(f"{name} has a column named {odd[0]!r}: column names must be strings.")
        filled = tuple({column: row.get(column) for column in columns} for row in found)
        return cls(name, tuple(columns), _fingerprint(filled), filled)

    def renamed(self, rename: Mapping[str, str]) -> Rows:
        """These rows with columns ``old`` called ``new``; the fingerprint stays. Raises DataError."""
        for old in rename:
            if old not in self.columns:
                raise DataError(
                    f"--data.rename {old}={rename[old]}: {self.name} has no column {old!r}. "
                    f"Its columns: {', '.join(self.columns)}.{nearest(old, self.columns)}"
                )
        columns = tuple(rename.get(column, column) for column in self.columns)
        for column in columns:
            if columns.count(column) > 1:
                raise DataError(
                    f"After --data.rename, {self.name} would have two columns called {column!r}. "
                    f"Rename the other one too, for example {column}=old_{column}."
                )
        rows = tuple({rename.get(c, c): v for c, v in row.items()} for row in self._rows)
        return Rows(self.name, columns, self.fingerprint, rows, self._numbers)

    def with_rows(self, rows: Sequence[tuple[int, dict[str, Any]]]) -> Rows:
        """Numbered rows in place of these, all with the same columns; name and fingerprint stay."""
        numbers, contents = zip(*rows, strict=True)
        return Rows(self.name, tuple(contents[0]), self.fingerprint, contents, numbers)

    def number(self, index: int) -> int:
        """Which row of the data set the one at ``index`` was, before others were dropped."""
        return index if self._numbers is None else self._numbers[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(row) for row in self._rows)

    def __repr__(self) -> str:
        return f"Rows({self.name}: {len(self)} rows, columns {', '.join(self.columns)})"

    def where(self, index: int) -> str:
        """How errors name a row."""
        return f"{self.name}, row {self.number(index)} (the first is 0)"


def load_rows(data: Any, *, split: str = "train") -> Rows:
    """Read rows from a file, a list of dicts, a ``datasets.Dataset`` or ``DatasetDict``, or a hub id.

    ``split`` belongs to hub ids and DatasetDicts; a hub id may carry its own: ``openai/gsm8k:main@test``.
    Values of a CSV file stay strings, so that the answer ``"072"`` is not turned into 72. Raises DataError.
    """
    if isinstance(data, Rows):
        return data
    if isinstance(data, (str, Path)):
        return _from_path(data, split)
    if _is_from_datasets(data, "DatasetDict"):
        if split not in data:
            raise DataError(
                f"The DatasetDict has no split {split!r}. It has: {', '.join(data)}.{nearest(split, data)} "
                "Choose one with --data.split."
            )
        data = data[split]
    if _is_from_datasets(data, "Dataset"):
        return Rows.of(data.to_list(), "the data set")
    if isinstance(data, (list, tuple)):
        return Rows.of(data, "the list of rows")
    raise DataError(f"Rows cannot be read from {_short(data)} ({type(data).__name__}). Give {FORMS}.")


def _from_path(data: str | Path, split: str) -> Rows:
    text = str(data)
    if not text:
        raise DataError(f"No data set was given. Name one with --data.path: {FORMS}.")
    path = Path(text).expanduser()
    if path.is_dir():
        return _from_hub(str(path), split)
    if path.suffix.lower() not in SUFFIXES:
        if path.exists():
            raise DataError(f"{path} is not of a kind that can be read. Give {FORMS}.")
        return _from_hub(text, split)
    if not path.exists():
        there = [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else []
        raise DataError(f"There is no file {path}.{nearest(path.name, there)} Paths start at {Path.cwd()}.")
    if split != "train":
        raise DataError(
            f"--data.split {split}: the file {path} has no splits. Give the file of that split; where the "
            f"split is that of a hub id beside it, write it there: owner/name@{split}."
        )
    readers = {".jsonl": _read_json_lines, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    try:
        return Rows.of(readers[path.suffix.lower()](path), str(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}). Save it as UTF-8.") from error


def _read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}, in "
                    f"{_short(line)}. Every line must be one object."
                ) from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}, line {number} is {_short(row)}, not an object. Every line must be one object."
                )
            yield row


def _read_json(path: Path) -> Iterable[dict[str, Any]]:
    """A list of objects, or, as the hub often has it, JSON lines under the name .json."""
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        return _read_json_lines(path)
    try:
        return list(json.loads(text))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno} is not JSON: {error.msg}. The file must be a list of objects."
        ) from error


def _read_csv(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if repeated := [name for name in header if header.count(name) > 1]:
            raise DataError(f"{path}, line 1 names the column {repeated[0]!r} twice. Rename one.")
        for cells in reader:
            if len(cells) not in (0, len(header)):
                raise DataError(
                    f"{path}, line {reader.line_num} has {len(cells)} cells, and the header has "
                    f"{len(header)}. "
                    'Put quotes ("...") around cells that contain a comma.'
                )
            if cells:
                yield dict(zip(header, cells, strict=True))


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a whole Parquet file ({error}). Write or copy it again.") from error
    return rows


def _from_hub(text: str, split: str) -> Rows:
    """``owner/name``, ``owner/name:config`` and either with ``@split``; or a folder of data files."""
    import datasets

    name, _, own_split = text.partition("@")
    name, _, config = (name, "", "") if Path(name).is_dir() else name.partition(":")
    try:
        found = datasets.load_dataset(name, config or None, split=own_split or split)
    except Exception as error:  # the hub client's errors have no common root
        raise DataError(
            f"{text!r} is no file here, and as a data set of the hub it could not be loaded: "
            f"{type(error).__name__}: {error}\n"
            f"Without a network only files and data sets that are already cached work. Give {FORMS}."
        ) from error
    return Rows.of(found.to_list(), text)


def _is_from_datasets(data: Any, kind: str) -> bool:
    """isinstance without the import, which takes a second."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(data, getattr(module, kind))


def _fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=_plain).encode("utf-8", "surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def _short(value: Any, limit: int = 60) -> str:
    text = value.strip() if isinstance(value, str) else repr(value)
    return repr(value)[:limit] if not text else (text if len(text) <= limit else text[: limit - 3] + "...")
