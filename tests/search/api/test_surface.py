"""The package's Python surface: which names it has, what its functions take, and what importing it costs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moevolve

FOLDER = Path(__file__).parents[3] / "search" / "api"
FUNCTIONS = {
    *("analyse", "answers", "apply", "as_data", "ask", "best", "cancel", "compare", "effects"),
    *(
        "estimate",
        "evaluate",
        "export",
        "genome",
        "import_eep",
        "final_table",
        "launch",
        "lineage",
        "load_study",
    ),
    *("load_config", "open_reader", "open_store", "overview", "pareto", "pause", "plot", "profile"),
    *(
        "prompts",
        "recipe",
        "report",
        "resume",
        "retry",
        "scale",
        "searches",
        "serve",
        "show",
        "shrink",
        "stop",
    ),
    *("study", "tasks", "watch"),
}
RECORDS = {
    *("Analysis", "Answers", "AskedRow", "BestRow", "Study", "StudyRow", "Comparison", "Control"),
    *("Effects", "Entry", "Estimate", "Evaluations", "ExportReport", "FinalTable", "GenomeOutline", "Imported"),
    *("IndividualDetail", "LineageGraph", "Observer", "Pareto", "ProfileReport", "Progress"),
    *(
        "Recipe",
        "RunConfig",
        "Score",
        "SearchOverview",
        "SearchState",
        "SearchSummary",
        "ShrinkPlan",
        "ShrinkResult",
        "Store",
        "StoreReader",
    ),
    *("TaskConfig",),
}
DB_FUNCTIONS = {"check", "copy", "prune", "upgrade"}
ERRORS = {"ExportError", "PoolError", "ProfileError", "StoreError", "UserError"}


def test_the_surface_is_what_it_says() -> None:
    assert (FOLDER / "py.typed").is_file()
    assert set(moevolve.__all__) == {*FUNCTIONS, *RECORDS, *ERRORS, "db"}
    assert set(moevolve.__all__) <= set(dir(moevolve))
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = moevolve.Nonsense


def test_every_name_is_what_it_should_be_and_is_described() -> None:
    found = {name: getattr(moevolve, name) for name in moevolve.__all__}
    db = [getattr(moevolve.db, name) for name in DB_FUNCTIONS]
    assert all(inspect.getdoc(each) for each in (*found.values(), *db))
    assert {name for name, each in found.items() if inspect.isfunction(each)} == FUNCTIONS
    assert {name for name, each in found.items() if inspect.isclass(each)} == RECORDS | ERRORS
    assert {name for name in RECORDS | ERRORS if issubclass(found[name], Exception)} == ERRORS


def test_a_request_is_a_function_with_the_parameters_of_its_record() -> None:
    best = inspect.signature(moevolve.best).parameters
    assert list(best) == ["store", "task", "experts", "active", "search", "model", "split", "limit"]
    assert best["limit"].default == 10 and best["limit"].kind is inspect.Parameter.KEYWORD_ONLY
    assert inspect.signature(moevolve.show).parameters["individual"].default is inspect.Parameter.empty


def test_a_second_copy_cannot_be_imported() -> None:
    program = "import moevolve.search.api"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1].startswith("ImportError: search/api is the package `moevolve` itself")
        or "No module named 'moevolve.search.api'" in done.stderr
    )


def test_threads_of_torch_sleep_while_they_wait_unless_the_user_says_otherwise() -> None:
    program = "import os, sys, moevolve; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    for given, expected in (({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "active"}, "None")):
        mine = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=mine | given)
        assert done.stdout.split() == [expected, "False"]
