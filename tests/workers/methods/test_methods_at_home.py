"""That a method is its folder and a line in the registry: read from the sources, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

WORKERS = Path(__file__).parents[3] / "workers"
METHODS = sorted(path.parent.name for path in WORKERS.glob("methods/*/method.py"))


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports anywhere: in functions and for type checking, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_there_are_methods() -> None:
    assert len(METHODS) >= 4


def test_nobody_but_the_registry_names_a_method() -> None:
    named = {
        (path.relative_to(WORKERS).as_posix(), method)
        for path in WORKERS.rglob("*.py")
        for method in METHODS
        for name in imports(path)
        if name.startswith(f"moevolve.workers.methods.{method}.") and path.parent.name != method
    }
    assert named == {("methods/registry.py", method) for method in METHODS}
