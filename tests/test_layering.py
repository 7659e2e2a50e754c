"""Which part imports which, and where the big dependencies are confined to: read from the source, nothing is imported.

The layers within the parts are contracts of import-linter, in `pyproject.toml`; it doesn't see `kernels`, which has no
`__init__.py`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("configs", "evaluators", "kernels", "search", "store", "workers")
MAY_IMPORT = {
    "kernels": set(),
    "evaluators": set(),
    "store": set(),
    "workers": {"kernels", "evaluators"},
    "search": {"kernels", "evaluators", "store", "workers"},
    "configs": set(),
}
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
        "search/pools/ray_pool.py",
    ),
    "sqlalchemy": ("store/",),
    "starlette": ("search/server/",),
    "torch": ("kernels/", "workers/", "search/genomes/eep/coefficients.py"),
    "transformers": ("workers/",),
    "triton": ("kernels/",),
    "uvicorn": ("search/server/run.py", "search/server/connections.py"),
}
FORBIDDEN = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "random", "shelve"}


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every absolute import of a file, also within functions: (dotted name, line)."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            # `from moevolve import store` names a part as much as `import moevolve.store`.
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def part_of(name: str) -> str:
    """The part that a dotted name of ours belongs to; the surface of the package itself is one of `search`."""
    return next((part for part in name.split(".")[1:2] if part in PARTS), "search")


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


ALL = [path for part in PARTS for path in sources(part)]


def test_there_is_something_to_check() -> None:
    assert len(ALL) > 80
    assert {where(path).split("/")[0] for path in ALL} == set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_imports_go_one_way(part: str) -> None:
    allowed = MAY_IMPORT[part] | {part}
    wrong = [
        f"{where(path)}:{line} imports {name}"
        for path in sources(part)
        for name, line in imports(path)
        if name.split(".")[0] == "moevolve" and part_of(name) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dependency", CONFINED)
def test_big_dependencies_stay_where_they_belong(dependency: str) -> None:
    places = CONFINED[dependency]
    found = [(where(path), line) for path in ALL for name, line in imports(path) if name.split(".")[0] == dependency]
    wrong = [f"{file}:{line}" for file, line in found if not any(_within(file, place) for place in places)]
    assert not wrong, f"{dependency} is for {', '.join(places)} only, not for {', '.join(wrong)}"


def _within(file: str, place: str) -> bool:
    return file.startswith(place) if place.endswith("/") else file == place


def test_nevergrad_is_in_one_file_at_most() -> None:
    files = {where(path) for path in ALL for name, _ in imports(path) if name.split(".")[0] == "nevergrad"}
    assert len(files) <= 1
    assert all(file.startswith("search/strategies/") for file in files)


def test_nothing_unpickles_or_uses_the_shared_generator() -> None:
    wrong = [
        f"{where(path)}:{line} imports {name}"
        for path in ALL
        for name, line in imports(path)
        if name.split(".")[0] in FORBIDDEN or name.startswith("torch.serialization")
    ]
    assert not wrong, "\n".join(wrong)


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


def test_imports_are_absolute() -> None:
    wrong = [
        f"{where(path)}:{node.lineno}"
        for path in ALL
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert not wrong, ", ".join(wrong)


def test_parts_are_imported_by_their_package_name() -> None:
    wrong = [
        f"{where(path)}:{line} imports {name}"
        for path in ALL
        for name, line in imports(path)
        if name.split(".")[0] in set(PARTS) - {"configs"}
    ]
    assert not wrong, "\n".join(wrong)


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
