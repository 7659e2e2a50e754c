"""A new command is a file and an entry in the list: nothing else knows which commands there are."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moevolve.search.cli
from moevolve.search.cli.app import COMMANDS, main, make_app

COUNT_INDIVIDUALS = '''
"""`count-individuals`."""

from __future__ import annotations

from typing import Annotated

import typer

import moevolve
from moevolve.search.cli._console import output, print_json
from moevolve.search.cli._options import DEFAULT_STORE, JsonOption, StoreOption


def count_individuals(
    least: Annotated[int, typer.Option("--least", help="Only searches with so many.")] = 0,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Count the individuals of every search."""
    if least < 0:
        raise moevolve.UserError(f"--least {least}: give 0 or more")
    found = {row.search.name: row.individuals for row in moevolve.searches(store) if row.individuals >= least}
    if as_json:
        print_json(found)
    else:
        output.print(*(f"{name}: {count}" for name, count in found.items()))
'''

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """The command line with one more command."""
    (tmp_path / "count_individuals.py").write_text(COUNT_INDIVIDUALS)
    monkeypatch.setattr(moevolve.search.cli, "__path__", [*moevolve.search.cli.__path__, str(tmp_path)])
    app = make_app((*COMMANDS, "count_individuals"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["moevolve", *arguments])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
            main(app)
        return subprocess.CompletedProcess(list(arguments), int(end.value.code or 0), out.getvalue(), err.getvalue())

    yield run
    sys.modules.pop("moevolve.search.cli.count_individuals", None)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two searches, of one and of three individuals."""
    from store_samples import individual, search, split

    url = f"sqlite:///{tmp_path_factory.mktemp('toy') / 'toy.db'}"
    with moevolve.open_store(url, create=True) as opened:
        for name, count in (("one", 1), ("three", 3)):
            opened.create_search(search(name), [split()])
            opened.record(f"id-{name}", [individual(place) for place in range(count)])
    return url


def test_it_prints_tables_and_json(toy: Run, store: str) -> None:
    shown = toy("count-individuals", "--store", store)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "one: 1 three: 3\n", "")
    assert json.loads(toy("count-individuals", "--store", store, "--json").stdout) == {"one": 1, "three": 3}
    assert json.loads(toy("count-individuals", "--least", "2", "--store", store, "--json").stdout) == {"three": 3}


def test_bad_input_is_one_line_and_exit_code_2(toy: Run, store: str, tmp_path: Path) -> None:
    refused = toy("count-individuals", "--least", "-1", "--store", store)
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", "error: --least -1: give 0 or more\n")
    missing = toy("count-individuals", "--store", f"sqlite:///{tmp_path / 'none.db'}")
    assert missing.returncode == 2 and "none.db" in missing.stderr and missing.stderr.count("\n") == 1
    assert toy("count-individuals", "--no-such-flag").returncode == 2


def test_help_lists_it(toy: Run) -> None:
    shown = toy("--help").stdout
    assert "count-individuals" in shown and "Count the individuals of every search" in shown
    assert all(name.partition(".")[0].replace("_", "-") in shown for name in COMMANDS)
