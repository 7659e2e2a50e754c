"""Print the size of this checkout in figures: what a user can type, ask for and set, and how much code is behind it.

.venv/bin/python tests/house_figures.py            # by folder, with the options of every command
.venv/bin/python tests/house_figures.py --short    # as `make lint` prints them
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from moevolve.search.cli.app import app
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import KINDS

ROOT = Path(__file__).parents[1]
PRODUCT = ("search", "workers", "evaluators", "store", "kernels")
APART = ("labs", "benchmarks")
COLUMNS = ("files", "lines", "code lines", "comment %", "chars/line", "functions", "classes", "records", "Any", "tests")
RECORDS = {"BaseModel", "RootModel", "NamedTuple", "TypedDict"}
METHODS = {"get", "post", "put", "patch", "delete"}


def counted(text: str) -> Counter[str]:
    """Count what is in a file; code lines are those with more than comments and docstrings."""
    lines = text.splitlines()
    found = Counter({"files": 1, "lines": len(lines), "characters": sum(map(len, lines))})
    comments = {number for number, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
    code = {number for number, line in enumerate(lines, 1) if line.strip()} - comments
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(functions=1, tests=node.name.startswith("test_"))
            found["routes"] += any(map(is_route, node.decorator_list))
        elif isinstance(node, ast.ClassDef):
            found["classes"] += 1
            decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
            bases = {ast.unparse(each).split("[")[0].rpartition(".")[2] for each in node.bases}
            found["records"] += "dataclass" in decorators or any(each in RECORDS or "Section" in each for each in bases)
            found["routes"] += sum(map(names_route, node.body))
        elif isinstance(node, ast.Name):
            found["Any"] += node.id == "Any"
    return found + Counter({"comments": len(comments), "code lines": len(code)})


def is_route(decorator: ast.expr) -> bool:
    """Whether a function answers HTTP requests."""
    call = decorator.func if isinstance(decorator, ast.Call) else None
    return isinstance(call, ast.Attribute) and ast.unparse(call.value) == "routes" and call.attr in METHODS


def names_route(statement: ast.stmt) -> bool:
    """Whether a statement of a class names the route at which a server offers the request."""
    if not isinstance(statement, ast.AnnAssign | ast.Assign):
        return False
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets
    constant = isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    return constant and [ast.unparse(target) for target in targets] == ["route"]


def settings(kind: Any) -> set[str]:
    """Name the fields that a user can set in a configuration's type; what classes inherit counts once."""
    if typing.get_origin(kind):
        return set().union(*map(settings, typing.get_args(kind)))
    fields = getattr(kind, "model_fields", {})
    if inspect.isclass(kind) and dataclasses.is_dataclass(kind):
        fields = [field.name for field in dataclasses.fields(kind)]
    found: set[str] = set()
    for name in fields:
        owner = next(each for each in kind.__mro__ if name in inspect.get_annotations(each))
        found |= settings(typing.get_type_hints(kind)[name]) or {f"{owner.__name__}.{name}"}
    return found


def options() -> dict[str, int]:
    """The number of options of every command; those of a group behind its name."""

    def below(name: str, command: Any) -> Iterator[tuple[str, int]]:
        if hasattr(command, "commands"):
            for verb, each in command.commands.items():
                yield from below(f"{name} {verb}".strip(), each)
        else:
            yield name, sum(option.param_type_name == "option" for option in command.params)

    return dict(below("", typer.main.get_command(app)))


def total(paths: list[Path]) -> Counter[str]:
    """Count what is in several files."""
    return sum((counted(path.read_text(encoding="utf-8")) for path in paths), Counter())


def summary(product: Counter[str]) -> Iterator[str]:
    """The figures that a change should show."""
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    readmes = [ROOT / "README.md", *ROOT.glob("[!.]*/**/README.md")]
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in readmes)
    typed = options()
    set_in_runs = settings(RunConfig).union(*(settings(kind.section) for kind in KINDS.values()))
    names = ("lines", "code lines", "functions", "classes")
    sizes = ", ".join(f"{product[name]:,} {name}" for name in names)
    yield f"product: {sizes}, {product['Any']} uses of Any; tests: {tests:,} lines"
    yield (
        f"verbs {len(typed)}, options {sum(typed.values())} (shrink {typed['shrink']}), settings of a run "
        f"{len(set_in_runs)}, HTTP routes {product['routes']}, READMEs {len(readmes)} with {words:,} words"
    )


def table() -> Iterator[str]:
    """A line for every part of the checkout."""
    tests = ROOT / "tests"
    parts = {part: list((ROOT / part).rglob("*.py")) for part in PRODUCT}
    parts |= {f"tests/{part}": list((tests / part).rglob("*.py")) for part in APART}
    parts["other tests"] = [path for path in tests.rglob("*.py") if path.relative_to(tests).parts[0] not in APART]
    yield " " * 16 + "".join(f"{name:>12}" for name in COLUMNS)
    for part, paths in parts.items():
        found = total(paths)
        shares = {"comment %": 100 * found["comments"], "chars/line": found["characters"]}
        cells = (f"{shares[n] / found['lines']:>12.1f}" if n in shares else f"{found[n]:>12,}" for n in COLUMNS)
        yield f"{part:16}" + "".join(cells)


def main() -> None:
    paths = [path for part in PRODUCT for path in (ROOT / part).rglob("*.py")]
    if sys.argv[1:] != ["--short"]:
        print("\n".join(table()))
        print("options:", ", ".join(f"{name} {number}" for name, number in options().items()))
        print("folders of product", len({path.parent for path in paths}))
        print("rooms of search", len(list((ROOT / "search").glob("*/__init__.py"))))
    product = total(paths)
    print("\n".join(summary(product)))
    print(f"{product['characters'] / product['lines']:.1f} characters per line of the product")


if __name__ == "__main__":
    main()
