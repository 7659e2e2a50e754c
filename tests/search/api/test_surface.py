"""The package's Python surface: which names it has, what its functions take, and what importing it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import moevolve

FOLDER = Path(__file__).parents[3] / "search" / "api"
SIGNATURES = {
    "analyse": "(individual, task, *, store, split='dev', tokens=None, model=None)",
    "answers": (
        "(*individuals, task, store, split='test', limit=None, only=None, search=None, model=None, "
        "device=None, dtype=None)"
    ),
    "as_data": "(record)",
    "best": "(store, *, task=None, experts=None, active=None, search=None, by='dev', limit=10)",
    "cancel": "(search, *, store)",
    "compare": "(comparison, *, observer=None)",
    "compare_measured": "(estimate, search, *, store)",
    "estimate": (
        "(config, *, model=None, keep=None, gpus=None, cpu=False, prompt_tokens=None, new_tokens=None, examples=None, "
        "utilisation=None, overrides=())"
    ),
    "evaluate": "(individual, task, *, store, split='test', search=None, model=None, overrides=())",
    "export": "(individual, directory, *, store, form=None, model=None, device=None, dtype=None)",
    "export_coefficients": "(individual, path, *, store)",
    "import_eep": "(*files, experts_of, store, active=None, router_space='probs', overrides=())",
    "launch": (
        "(config, *, store=None, name=None, address=None, overrides=(), or_resume=False, search_id=None, observer=None)"
    ),
    "lineage": "(individual, *, store, descendants=False, depth=None)",
    "load_comparison": "(path, *, store=None, address=None, overrides=())",
    "load_config": "(path, overrides=())",
    "logs": "(search, cluster, *, follow=False, insecure=False)",
    "open_reader": "(url)",
    "open_store": "(url, *, create=False)",
    "pause": "(search, *, store)",
    "plot": "(search, path, *, store, individual=None)",
    "profile": (
        "(*models, store=None, batch_sizes=(1, 8, 32), prompt_tokens=None, new_tokens=None, task=None, split='test', "
        "repeats=5, device='auto', threads=None, search=None, model=None, trust_remote_code=False, apart=None, "
        "dtype=None, on_stage=...)"
    ),
    "prompts": "(individual, task, *, store, split='test', limit=None, search=None, model=None)",
    "report": "(search, path, *, store, limit=5, analysis=None)",
    "resume": "(search, *, store, address=None, overrides=(), observer=None)",
    "retry": "(search, *, store, address=None, overrides=(), observer=None)",
    "scale": "(search, workers=None, *, store, priority=None)",
    "serve": "(settings=None, *, store=None, host=None, port=None, hosts=None, tokens=None, on_ready=...)",
    "searches": "(store)",
    "show": "(individual, *, store)",
    "stop": "(search, *, store)",
    "submit": (
        "(config, cluster, *, store=None, name=None, overrides=(), search_id=None, insecure=False, shared_paths=False)"
    ),
    "tasks": "()",
    "write_analysis": "(analysis, folder)",
}
RECORDS = {
    *(
        "Analysis",
        "Answers",
        "AskedRow",
        "BestRow",
        "Comparison",
        "ComparisonRow",
        "Contestant",
        "Control",
        "Evaluation",
    ),
    *("Estimate", "ExportReport", "Imported", "IndividualDetail", "LineageGraph", "Observer", "ProfileReport"),
    *("Progress", "RunConfig", "Score", "SearchSummary", "Standings", "Store", "StoreReader", "Submitted"),
    "TaskConfig",
}
DB_SIGNATURES = {
    "check": "(store)",
    "copy": "(*searches, store, to)",
    "prune": "(*searches, store, dry_run=False)",
    "upgrade": "(store)",
}
ERRORS = {"ExportError", "PoolError", "ProfileError", "StoreError", "UserError"}


def test_the_surface_is_what_it_says() -> None:
    assert moevolve.__all__ == sorted(moevolve.__all__)
    assert set(moevolve.__all__) == {*SIGNATURES, *RECORDS, *ERRORS, "db"}
    assert set(moevolve.__all__) <= set(dir(moevolve))
    with pytest.raises(AttributeError, match="module 'moevolve' has no attribute 'Nonsense'"):
        _ = moevolve.Nonsense


FUNCTIONS = {getattr(moevolve, name): shown for name, shown in SIGNATURES.items()}
FUNCTIONS |= {getattr(moevolve.db, name): shown for name, shown in DB_SIGNATURES.items()}
each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)


@each_function
def test_functions_take_plain_things(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    plain = [
        each.replace(
            annotation=inspect.Parameter.empty, default=... if inspect.isfunction(each.default) else each.default
        )
        for each in signature.parameters.values()
    ]
    shown = str(inspect.Signature(plain)).replace("Ellipsis", "...")
    assert shown == FUNCTIONS[function]
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(each.annotation is not inspect.Parameter.empty for each in signature.parameters.values())


@each_function
def test_functions_say_what_they_take_and_raise(function: Callable[..., Any]) -> None:
    said = inspect.getdoc(function) or ""
    assert said
    needs_errors = function.__name__ not in ("as_data", "retry")  # the one raises nothing, the other refers to `resume`
    assert ("Raises:" in said) == needs_errors
    if "Args:" in said:
        listed = {line.strip().partition(":")[0] for line in said.split("Args:")[1].split("\n\n")[0].splitlines()}
        assert set(inspect.signature(function).parameters) <= listed


@pytest.mark.parametrize("name", sorted(RECORDS | ERRORS))
def test_records_are_loaded_from_where_type_checkers_find_them(name: str) -> None:
    tree = ast.parse((FOLDER / "__init__.py").read_text(encoding="utf-8"))
    homes = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = getattr(moevolve, name)
    assert inspect.isclass(found)
    module, own = homes[name]
    assert getattr(__import__(str(module), fromlist=[own]), own) is found
    assert issubclass(found, Exception) == (name in ERRORS)
    assert found.__doc__


def test_hints_resolve_to_records() -> None:
    from moevolve.search.loop.standings import Standings
    from moevolve.store.reader import StoreReader
    from moevolve.store.records import BestRow
    from moevolve.store.repository import Store

    known = {"Store": Store, "StoreReader": StoreReader, "BestRow": BestRow, "Standings": Standings}
    assert get_type_hints(moevolve.best, localns=known)["return"] == list[BestRow]
    assert get_type_hints(moevolve.open_store, localns=known)["return"] is Store
    assert get_type_hints(moevolve.open_reader, localns=known)["return"] is StoreReader


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
