"""Rows from JSONL files and from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks import datasets as loading
from moevolve.evaluators.tasks.config import Source


def _write(folder: Path, text: str | bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_rows_keep_order_types_and_places(tmp_path: Path) -> None:
    first = _write(tmp_path, '{"a": 1, "n": {"x": "y"}}\n\n{"a": 2, "n": {"x": "z\u2028"}}\n', "one.jsonl")
    second = _write(tmp_path, b'\xef\xbb\xbf{"a": 3, "b": true}', "two.jsonl")
    table = loading.read_files([first, second])
    assert table.column("a") == [1, 2, 3]
    assert table.row(1) == {"a": 2, "n": {"x": "z\u2028"}, "b": None}
    assert table.row(2)["b"] is True
    assert [table.place(i) for i in range(3)] == [f"{first}:1", f"{first}:3", f"{second}:1"]
    with pytest.raises(UserError, match="no column `c`; it has: a, n, b"):
        table.column("c")
    with pytest.raises(UserError, match=r"absent\.jsonl: no such file; .* relative to the task file's folder"):
        loading.read_files([tmp_path / "absent.jsonl"])
    with pytest.raises(UserError, match="Is a directory; give the path of a file"):
        loading.read_files([tmp_path])


def test_arrays_and_tables_have_rows_too(tmp_path: Path) -> None:
    array = _write(tmp_path, '[{"a": "x", "b": "1"},\n {"a": "y"}]', "rows.json")
    table = _write(tmp_path, 'a,b\r\n"x",1\r\n\r\ny,\r\n', "rows.csv")
    for path, place in ((array, f"{array}: row 2"), (table, f"{table}:4")):
        found = loading.read_files([path])
        assert (found.column("a"), found.column("b"), found.place(1)) == (["x", "y"], ["1", None], place)
    with pytest.raises(UserError, match=r"bad.jsonl: 2 of 3 rows can't be used: .*:1: not JSON.*; .*:3: expected"):
        loading.read_files([_write(tmp_path, '{\n{"a": 1}\n7\n', "bad.jsonl")])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a": \n{"a": 3}\n', "rows.jsonl:2: not JSON: Expecting value at column"),
        ('{"a": 1}\n[1]\n', "rows.jsonl:2: expected a JSON object with named fields, got list"),
        ('{"a": 1}\n\n{"a": "x"}\n', "rows.jsonl: field `a` isn't of one type in all lines: Could not convert 'x'"),
        (b'{"a": "ok"}\n{"a": "\xff"}\n', "rows.jsonl:2: not UTF-8"),
        ("", "rows.jsonl: no rows; put one JSON object on each line"),
    ],
)
def test_malformed_files_are_named_with_their_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(UserError) as caught:
        loading.read_files([_write(tmp_path, text)])
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


def test_hub_rows_come_from_the_named_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fake(path: str, name: str | None, *, split: str, revision: str | None) -> datasets.Dataset:
        asked.append((path, name, split, revision))
        return datasets.Dataset.from_dict({"a": [1, 2]})

    monkeypatch.setattr(loading, "load_dataset", fake)
    table = loading.load_table(Source(hub="org/data", config="c", revision="v1"), "train")
    assert asked == [("org/data", "c", "train", "v1")]
    assert table.row(1) == {"a": 2}
    assert table.place(1) == "org/data c train, row 1"


def test_hub_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(loading, "load_dataset", fail)
    for error in (
        datasets.exceptions.DatasetNotFoundError("Dataset 'org/data' doesn't exist\nmore"),
        ConnectionError("Couldn't reach the Hub"),
        ValueError('Unknown split "train"'),
        RuntimeError("Dataset scripts are no longer supported"),
    ):
        with pytest.raises(UserError, match=r"org/data train: can't be loaded: .*local JSONL files") as caught:
            loading.load_table(Source(hub="org/data"), "train")
        assert str(error).splitlines()[0] in str(caught.value)
        assert "\n" not in str(caught.value)
