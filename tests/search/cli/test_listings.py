"""What listings call the parts that individuals of different kinds consist of."""

from __future__ import annotations

import csv
import io
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from store_samples import decided, evaluation, individual, search, split

from moevolve.search.genomes.registry import KINDS
from moevolve.store.repository import Store


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Of one evaluated individual of every kind, each of a phenotype of its own."""
    url = f"sqlite:///{tmp_path / 'kinds.db'}"
    with Store.open(url) as opened:
        for place, kind in enumerate(KINDS):
            opened.create_search(search(f"a-{kind}", genome_kind=kind), [split()])
            opened.record(f"id-a-{kind}", [decided(individual(0, phenotype=place), 0.5)], [evaluation(place, 0.5)])
    return url


def heading(in_process: Any, *arguments: str) -> str:
    done = in_process(*arguments)
    assert done.returncode == 0, done.stderr
    lines = takewhile(lambda line: "\u2521" not in line, done.stdout.splitlines()[2:])  # after title and table's edge
    columns = zip(*(line.split("\u2503") for line in lines), strict=True)
    return " | ".join(" ".join(" ".join(words).split()) for words in columns)


def test_searches_name_the_model_and_the_size_of_the_winner(store: str, in_process: Any) -> None:
    with Store.open(store) as opened:
        opened.set_status("id-a-eep", "finished", winner=0)
        (row,) = (one for one in opened.searches() if one.search.name == "a-eep")
    shown = heading(in_process, "searches", "--store", store)
    assert "search | status | model | genome" in shown and shown.endswith("best on search | winner's size | "), shown
    (line,) = (line for line in in_process("searches", "--store", store).stdout.splitlines() if "a-eep" in line)
    cells = [cell.strip() for cell in line.strip("\u2502").split("\u2502")]
    assert cells[2] == row.search.model_path.rpartition("/")[2] and cells[-1] == f"{row.size:.1%}", line


def test_best_counts_what_there_is(store: str, in_process: Any) -> None:
    for kind in KINDS:
        shown = heading(in_process, "best", "--store", store, "--search", f"a-{kind}")
        assert ("experts" in shown, "blocks" in shown) == (kind != "nanomoe", kind == "nanomoe")
    assert "experts or blocks" in heading(in_process, "best", "--store", store)


def test_searches_are_labelled_filtered_and_compared(store: str, in_process: Any) -> None:
    def run(*arguments: str) -> str:
        done = in_process(*arguments, "--store", store)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert "tags: old worse\nnote: none\narchived" in run("label", "a-eep", "--tags", "old worse", "--archive")
    assert "a-eep" not in run("searches") and "old worse" in run("searches", "--archived")
    assert "archived" not in run("label", "a-eep", "--restore")
    rows = list(csv.DictReader(io.StringIO(run("searches", "--text", "WORSE", "--csv"))))
    assert [(row["search"], row["tags"]) for row in rows] == [("a-eep", "old worse")]
    best = list(csv.DictReader(io.StringIO(run("best", "--csv"))))
    assert {row["individual"] for row in best} == {f"a-{kind}:0" for kind in KINDS}
    refused = in_process("label", "a-eep", "--store", store)
    assert refused.returncode == 2 and "say which tags" in refused.stderr
    shown = run("compare", "a-eep", "a-nanomoe")
    assert "evaluations" in shown and "50.0" in shown, "both begin and end with one individual"
