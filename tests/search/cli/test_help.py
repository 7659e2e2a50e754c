"""What users see first: groups of commands, examples, `-h`, the version, and listings."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from store_samples import decided, evaluation, individual, search, split

from moevolve.search.cli.app import COMMANDS, GROUPS
from moevolve.store.repository import Store


def test_help_has_groups_and_short_options(in_process: Any) -> None:
    shown = in_process("-h").stdout
    places = [shown.index(f"─ {title} ─") for title in GROUPS]
    assert places == sorted(places)
    assert in_process("--version").stdout == f"moevolve {version('moevolve')}\n"
    assert in_process("--help").stdout == shown


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_no_python(name: str, in_process: Any) -> None:
    shown = in_process(*name.replace("_", "-").split("."), "-h").stdout
    for word in ("None", "list[", "<bool>", "<str>", "<int", "<path>", "True", "False"):
        assert word not in shown, word


def test_many_options_are_in_panels_the_most_used_first(in_process: Any) -> None:
    shown = in_process("shrink", "-h").stdout
    order = (
        "─ Options ─",
        "--data ",
        "--experts ",
        "--help ",
        "─ Amounts",
        "--keep-score ",
        "─ Data ─",
        "--metric ",
    )
    order += ("─ Search ─", "--seed ", "─ Checks", "--guard-time ", "--force ", "─ Output ─", "--push ")
    places = [shown.index(each) for each in order]
    assert places == sorted(places)


def test_help_shows_examples_that_are_commands(in_process: Any) -> None:
    for name in ("shrink", "launch", "show", "watch", "best", "export"):
        shown = in_process(name, "-h").stdout
        _, _, examples = shown.partition("Examples:")
        lines = [line.strip() for line in examples.splitlines() if line.strip()]
        assert lines and all(line.startswith(f"moevolve {name} ") and len(line) < 78 for line in lines), lines


def test_only_the_terminal_breaks_the_lines_of_help(in_process: Any) -> None:
    assert "It is an ordinary search in the store." in in_process("shrink", "-h").stdout


def test_a_misspelt_command_is_answered_by_similar_ones(in_process: Any) -> None:
    assert "'launch'" in in_process("launsh").stderr


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'wide.db'}"
    with Store.open(url) as opened:
        for name in ("a-search-of-some-length", "b"):
            opened.create_search(search(name), [split()])
            rows = [
                decided(individual(place, phenotype=place, summary=f"keep 4 of 8, widths {place}, repaired"), 0.5)
                for place in range(3)
            ]
            opened.record(f"id-{name}", rows, [evaluation(place, 0.5) for place in range(3)])
        opened.set_status("id-b", "failed", "first line of an error\n" + "and many words more of it\n" * 16)
    return url


def test_listings_show_the_beginning_of_a_reason(store: str, in_process: Any) -> None:
    listed = in_process("searches", "--store", store)
    assert "(first" in listed.stdout and listed.stdout.count("words") <= 1


def test_genomes_are_shown_without_what_all_share(store: str, in_process: Any) -> None:
    shown = in_process("best", "--search", "b", "--store", store).stdout
    assert "widths 2" in shown and shown.count("keep 4 of 8") == 1
    assert "all of them: keep 4 of 8, repaired" in shown
