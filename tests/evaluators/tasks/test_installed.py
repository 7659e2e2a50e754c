"""Rows of installed text, and the packaged tasks that read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.prepare import prepare_splits
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.tasks import installed
from moevolve.evaluators.tasks.installed import DOMAINS, SOURCE_SPLITS, rows_of


@pytest.mark.parametrize("domain", DOMAINS)
def test_packaged_tasks_read_whole_lines_of_which_no_two_splits_have_one(domain: str) -> None:
    prepared = prepare_splits(load_task(f"text-{domain}"))
    assert tuple(prepared) == SOURCE_SPLITS[1:]
    texts = {split: [example.prompt for example in value.examples] for split, value in prepared.items()}
    assert all(len(rows) >= 64 and all(120 <= len(row) <= 480 for row in rows) for rows in texts.values())
    trained = {row["text"] for row in rows_of(domain, "train")}
    assert len(trained.union(*texts.values())) == len(trained) + sum(map(len, texts.values()))
    assert {(value.fitness, value.metric) for value in prepared.values()} == {("perplexity", "inverse_perplexity")}


def test_paragraphs_belong_to_the_first_document_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"Line {number} of a paragraph with {'many ' * 8}words.\n" for number in range(24)]
    shared, own = "".join(lines[:4]), "".join(lines[4:])
    monkeypatch.setitem(DOMAINS, "manual", lambda: iter([("a", shared), ("b", f"{shared}\n\n{own}")]))
    installed._rows.cache_clear()
    rows = [row["text"] for split in SOURCE_SPLITS for row in rows_of("manual", split)]
    installed._rows.cache_clear()
    assert "".join(f"{row}\n" for row in rows) == "".join(lines)


def test_docstrings_and_code_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "ast.py").write_text('def f():\n    r"""Says\n    more."""\n    return """no"""\n')
    for other in ("not_of_python.py", "tests/ast.py"):
        (tmp_path / other).write_text('"""Unread."""\n')
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(installed, "_package", lambda _: tmp_path / "absent")
    assert list(DOMAINS["code"]()) == [("ast.py", 'def f():\n\n    return """no"""\n')]
    assert list(DOMAINS["docstrings"]()) == [("ast.py", "Says\nmore.")]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> Any:
        return None

    monkeypatch.setattr("importlib.util.find_spec", missing)
    with pytest.raises(UserError, match="the text of torch is a task's source, and torch isn't installed"):
        list(DOMAINS["headers"]())
