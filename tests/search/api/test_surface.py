"""The package's Python surface: which names it has, what its functions take, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moevolve

FOLDER = Path(__file__).parents[3] / "search" / "api"
FUNCTIONS = {
    *("analyse", "answers", "as_data", "ask", "best", "cancel", "compare", "estimate", "evaluate"),
    *("export", "export_coefficients", "import_eep", "launch", "lineage", "load_comparison", "load_config", "logs"),
    *("open_reader", "open_store", "pause", "plot", "profile", "prompts", "report", "resume", "retry", "scale"),
    *("searches", "serve", "show", "stop", "submit", "tasks", "write_analysis"),
}
RECORDS = {
    *("Analysis", "Answers", "AskedRow", "BestRow", "Comparison", "ComparisonRow", "Entry", "Control", "Estimate"),
    *("Evaluation", "ExportReport", "Imported", "IndividualDetail", "LineageGraph", "Observer", "ProfileReport"),
    *("Progress", "RunConfig", "Score", "SearchSummary", "FinalTable", "Store", "StoreReader", "Submitted"),
    "TaskConfig",
}
DB_FUNCTIONS = {"check", "copy", "prune", "upgrade"}
ERRORS = {"ExportError", "PoolError", "ProfileError", "StoreError", "UserError"}


def test_the_surface_is_what_it_says() -> None:
    assert set(moevolve.__all__) == {*FUNCTIONS, *RECORDS, *ERRORS, "db"}
    assert set(moevolve.__all__) <= set(dir(moevolve))
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = moevolve.Nonsense


each_function = pytest.mark.parametrize(
    "function",
    [
        *(getattr(moevolve, name) for name in sorted(FUNCTIONS)),
        *(getattr(moevolve.db, name) for name in sorted(DB_FUNCTIONS)),
    ],
    ids=lambda function: function.__name__,
)


@each_function
def test_functions_are_typed(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())


@each_function
def test_functions_say_what_they_take(function: Callable[..., Any]) -> None:
    said = inspect.getdoc(function) or ""
    assert said
    if "Args:" in said:
        listed = {line.strip().partition(":")[0] for line in said.split("Args:")[1].split("\n\n")[0].splitlines()}
        assert set(inspect.signature(function).parameters) <= listed


@pytest.mark.parametrize("name", sorted(RECORDS | ERRORS))
def test_records_and_errors_are_classes(name: str) -> None:
    found = getattr(moevolve, name)
    assert inspect.isclass(found) and found.__doc__
    assert issubclass(found, Exception) == (name in ERRORS)


def test_a_request_is_a_function_with_the_parameters_of_its_record() -> None:
    best = inspect.signature(moevolve.best).parameters
    assert list(best) == ["store", "task", "experts", "active", "search", "by", "limit"]
    assert best["limit"].default == 10 and best["limit"].kind is inspect.Parameter.KEYWORD_ONLY
    assert inspect.signature(moevolve.show).parameters["individual"].default is inspect.Parameter.empty


def test_it_says_that_it_is_typed() -> None:
    assert (FOLDER / "py.typed").is_file()


def test_a_second_copy_cannot_be_imported() -> None:
    program = "import moevolve.search.api"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[-1].startswith("ImportError: search/api is the package `moevolve` itself")
        or "No module named 'moevolve.search.api'" in done.stderr
    )
