"""Which of the workers' rooms import which, and that the registry alone names methods: read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

WORKERS = Path(__file__).parents[2] / "workers"
ORDER = ("config", "facts", "families", "methods", "messages", "model", "engine", "export", "worker", "profiling")
"""Low to high: a room imports itself and those before it."""
SHARED_BY_EXPORTERS = ("export.card", "export.mixtral_form", "export.native", "export.state")
"""Modules of `export` that methods make their checkpoints with; they import no higher room than methods."""
METHODS = sorted(path.parent.name for path in WORKERS.glob("methods/*/method.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(WORKERS).with_suffix("").parts)


MODULES = {module_of(path): path for path in WORKERS.rglob("*.py") if path.name != "__init__.py"}


def imports(path: Path) -> Iterator[str]:
    """Modules of the workers that a file imports anywhere: in functions and for type checking, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moevolve.workers"):
            package = (node.module or "").removeprefix("moevolve.workers").lstrip(".")
            for alias in node.names:
                inner = f"{package}.{alias.name}".lstrip(".")
                yield inner if inner in MODULES else package


IMPORTS = {module: set(imports(path)) for module, path in MODULES.items()}


def rank(module: str) -> int:
    return ORDER.index("methods" if module in SHARED_BY_EXPORTERS else module.split(".")[0])


def test_there_is_something_to_check() -> None:
    assert len(METHODS) >= 4
    assert {module.split(".")[0] for module in MODULES} <= set(ORDER)
    assert set(SHARED_BY_EXPORTERS) < set(MODULES) and sum(map(len, IMPORTS.values())) > 100


def test_rooms_import_lower_ones() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        if rank(other) > rank(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_do_not_import_each_other_in_a_ring() -> None:
    # Rooms can't, by their order; the engine and the harness that drives it know each other's types.
    within = {module: others for module, others in IMPORTS.items() if not module.startswith("engine.")}
    assert set(within) <= set(TopologicalSorter(within).static_order())


def test_nobody_but_the_registry_names_a_method() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, others in IMPORTS.items()
        for other in others
        for method in METHODS
        if other.startswith(f"methods.{method}.") and not module.startswith(f"methods.{method}.")
    ]
    assert sorted(wrong) == [f"methods.registry imports methods.{method}.method" for method in METHODS]
