"""Where kernels and the big dependencies are imported, and what benchmarks import, read from the source.

All other layers are contracts of import-linter in `pyproject.toml`; it doesn't see `kernels`, which has no
`__init__.py`. Ruff bans unsafe modules, relative imports, and the parts under their bare names.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

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
    "matplotlib": ("search/drawing.py", "search/report/"),
    "nevergrad": ("search/strategies/nevergrad.py",),
    "ray": (
        "search/pools/ray_cluster.py",
        "search/pools/ray_jobs.py",
        "search/pools/ray_actor.py",
        "search/pools/ray_pool.py",
    ),
    "sqlalchemy": ("store/",),
    "starlette": ("search/server/",),
    "torch": ("kernels/", "workers/", "search/interface/checkpoints/import_eep.py"),
    "transformers": ("workers/",),
    "uvicorn": ("search/server/serve.py", "search/server/connections.py"),
}


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


IMPORT = re.compile(r"^ *(?:from +([\w.]+) +import +(.*)|import +(.*))$", re.MULTILINE)


@cache
def imports(path: Path) -> set[str]:
    """The dotted names of every import of a file, also within functions.

    They are read by their lines, since parsing all files takes seconds; `from moevolve import store` names a part as
    much as `import moevolve.store`.
    """
    found = IMPORT.findall(path.read_text(encoding="utf-8"))
    plain = {name.split()[0] for *_, names in found if names for name in names.split(",")}
    return plain | {f"{module}.{name.strip(' (')}" for module, names, _ in found if module for name in names.split(",")}


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


ALL = [path for part in PARTS for path in sources(part)]


def test_kernels_are_the_lowest_layer() -> None:
    names = {path: [name.split(".") for name in imports(path)] for path in ALL}
    below = {".".join(name[:2]) for path in sources("kernels") for name in names[path] if name[0] == "moevolve"}
    assert below == {"moevolve.kernels"}
    users = {where(path).split("/")[0] for path in ALL for name in names[path] if name[:2] == ["moevolve", "kernels"]}
    assert "workers" in users <= {"kernels", "workers", "search"}


def test_big_dependencies_stay_where_they_belong() -> None:
    found = {(name.split(".")[0], where(path)) for path in ALL for name in imports(path)}
    used = {(dependency, file) for dependency, file in found if dependency in CONFINED}
    assert [(dependency, file) for dependency, file in used if not file.startswith(CONFINED[dependency])] == []
    assert {dependency for dependency, _ in used} == CONFINED.keys()


def test_no_modules_import_each_other() -> None:
    """Neither directly nor by way of others, nor late in a function, nor for types alone."""
    files = {path: ["moevolve", *path.relative_to(ROOT).with_suffix("").parts] for path in ALL}
    modules = {".".join(parts).removesuffix(".__init__"): path for path, parts in files.items()}
    graph = {
        module: {each for name in imports(path) for each in (name, name.rpartition(".")[0]) if each in modules}
        - {module}
        for module, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises an error that names a circle


def test_benchmarks_import_what_there_is() -> None:
    """From one another, from the labs and from the package, also where a function imports it as it runs."""
    missing = [
        f"{where(path)}:{node.lineno}: {node.module}.{alias.name}"
        for path in sources("tests/benchmarks")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (module := own_module(node.module or ""))
        for alias in node.names
        if alias.name not in bound(module)
    ]
    assert missing == []


def own_module(name: str) -> Path | None:
    """The file of a module of the package, the labs or the benchmarks; None for a package or one of others."""
    folders = (ROOT,) if name.startswith("moevolve.") else (ROOT / "tests/labs", ROOT / "tests/benchmarks")
    files = [Path(folder, *name.removeprefix("moevolve.").split(".")).with_suffix(".py") for folder in folders]
    return next((file for file in files if file.is_file()), None)


@cache
def bound(module: Path) -> set[str]:
    """Names that a module binds outside of its functions and classes."""
    names, nodes = set[str](), list[ast.AST](ast.parse(module.read_text(encoding="utf-8")).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        else:
            names |= {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
            nodes += ast.iter_child_nodes(node)
    return names


def test_torch_loads_weights_only() -> None:
    calls = [
        (f"{where(path)}:{node.lineno}", {word.arg: word.value for word in node.keywords})
        for path in ALL
        if "torch.load" in path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert calls, "the coefficient files are read with torch.load; has it got another name?"
    for place, keywords in calls:
        value = keywords.get("weights_only")
        assert isinstance(value, ast.Constant) and value.value is True, f"{place}: torch.load without weights_only=True"


def test_the_package_and_the_command_line_start_without_the_big_dependencies() -> None:
    assert not {*CONFINED, "numpy", "pydantic", "yaml", "typer", "rich"} & loaded_by("moevolve")
    loaded = loaded_by("moevolve.search.cli.app")
    assert "typer" in loaded
    assert not {"torch", "transformers", "ray", "datasets", "matplotlib"} & loaded


def loaded_by(module: str) -> set[str]:
    """Top-level modules that a new process has after an import."""
    program = f"import sys, {module}; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())
