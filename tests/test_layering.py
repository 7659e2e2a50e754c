"""Where kernels and the big dependencies are imported, read from the source.

All other layers are contracts of import-linter in `pyproject.toml`; it doesn't see `kernels`, which has no
`__init__.py`. Ruff bans unsafe modules, relative imports, and the parts under their bare names.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("configs", "evaluators", "kernels", "search", "store", "workers")
# Where a dependency may be imported: folders end in "/".
CONFINED = {
    "alembic": ("store/",),
    "datasets": ("evaluators/tasks/datasets.py",),
    "fastapi": ("search/server/",),
    "evaluate": ("evaluators/harness/files.py",),
    "lm_eval": (
        "evaluators/harness/",
        "workers/engine/harness.py",
    ),
    "matplotlib": ("search/figures/",),
    "nevergrad": ("search/strategies/nevergrad.py",),
    "ray": (
        "search/pools/ray_cluster.py",
        "search/cluster/ray_jobs.py",
        "search/pools/ray_actor.py",
        "search/pools/ray_pool.py",
    ),
    "sqlalchemy": ("store/",),
    "starlette": ("search/server/",),
    "torch": ("kernels/", "workers/", "search/genomes/eep/coefficients.py"),
    "transformers": ("workers/",),
    "triton": ("kernels/",),
    "uvicorn": ("search/server/run.py", "search/server/connections.py"),
}


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports(path: Path) -> tuple[tuple[str, int], ...]:
    """Every absolute import of a file, also within functions: (dotted name, line)."""
    return tuple(_imports(ast.walk(tree(path))))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            # `from moevolve import store` names a part as much as `import moevolve.store`.
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


ALL = [path for part in PARTS for path in sources(part)]


def test_kernels_are_the_lowest_layer() -> None:
    names = {path: [name.split(".") for name, _ in imports(path)] for path in ALL}
    below = {".".join(name[:2]) for path in sources("kernels") for name in names[path] if name[0] == "moevolve"}
    assert below <= {"moevolve.kernels"}
    users = {where(path).split("/")[0] for path in ALL for name in names[path] if name[:2] == ["moevolve", "kernels"]}
    assert "workers" in users <= {"kernels", "workers", "search"}


@pytest.mark.parametrize("dependency", CONFINED)
def test_big_dependencies_stay_where_they_belong(dependency: str) -> None:
    places = CONFINED[dependency]
    found = [(where(path), line) for path in ALL for name, line in imports(path) if name.split(".")[0] == dependency]
    wrong = [f"{file}:{line}" for file, line in found if not any(_within(file, place) for place in places)]
    assert not wrong, f"{dependency} is for {', '.join(places)} only, not for {', '.join(wrong)}"


def _within(file: str, place: str) -> bool:
    return file.startswith(place) if place.endswith("/") else file == place


def test_torch_loads_weights_only() -> None:
    calls = [
        (f"{where(path)}:{node.lineno}", {word.arg: word.value for word in node.keywords})
        for path in ALL
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls, "the coefficient files are read with torch.load; has it got another name?"
    for place, keywords in calls:
        value = keywords.get("weights_only")
        assert isinstance(value, ast.Constant) and value.value is True, f"{place}: torch.load without weights_only=True"


def test_the_command_line_starts_without_the_big_dependencies() -> None:
    loaded = loaded_by("moevolve.search.cli.app")
    assert "typer" in loaded
    assert not {"torch", "transformers", "ray", "datasets", "matplotlib"} & loaded


def test_the_package_is_imported_without_any_dependency() -> None:
    loaded = loaded_by("moevolve")
    assert not {*CONFINED, "numpy", "pydantic", "yaml", "typer", "rich"} & loaded


def loaded_by(module: str) -> set[str]:
    """Top-level modules that a new process has after an import."""
    program = f"import sys, {module}; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())
