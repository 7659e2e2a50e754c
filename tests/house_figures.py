"""Print the size of this checkout in figures: lines, functions, records, tests, settings, commands and READMEs."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import tokenize
import typing
from collections import Counter
from pathlib import Path
from typing import Any

from moevolve.search.cli.app import COMMANDS
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import KINDS

ROOT = Path(__file__).parents[1]
PRODUCT = ("search", "workers", "evaluators", "store", "kernels")
APART = ("labs", "benchmarks")
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
COLUMNS = ("files", "lines", "code lines", "comment %", "chars/line", "functions", "classes", "records", "tests")
RECORDS = {"BaseModel", "RootModel", "NamedTuple", "TypedDict"}


def counted(text: str) -> Counter[str]:
    """Count what is in a file; code lines are those with more than comments and docstrings."""
    found = Counter({"files": 1, "lines": text.count("\n"), "characters": len(text) - text.count("\n")})
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        found["comments"] += token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
        if token.type not in BLANK:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(functions=1, tests=node.name.startswith("test_"))
        elif isinstance(node, ast.ClassDef):
            found["classes"] += 1
            decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
            bases = {ast.unparse(each).split("[")[0].rpartition(".")[2] for each in node.bases}
            found["records"] += "dataclass" in decorators or any(each in RECORDS or "Section" in each for each in bases)
    found["code lines"] = len(code)
    return found


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


def main() -> None:
    tests = ROOT / "tests"
    parts = {"product": [path for part in PRODUCT for path in (ROOT / part).rglob("*.py")]}
    parts |= {part: list((ROOT / part).rglob("*.py")) for part in PRODUCT}
    parts |= {f"tests/{part}": list((tests / part).rglob("*.py")) for part in APART}
    parts["other tests"] = [path for path in tests.rglob("*.py") if path.relative_to(tests).parts[0] not in APART]
    print(" " * 16 + "".join(f"{name:>12}" for name in COLUMNS))
    for part, paths in parts.items():
        found: Counter[str] = sum((counted(path.read_text(encoding="utf-8")) for path in paths), Counter())
        shares = {"comment %": 100 * found["comments"], "chars/line": found["characters"]}
        cells = (f"{shares[n] / found['lines']:>12.1f}" if n in shares else f"{found[n]:>12,}" for n in COLUMNS)
        print(f"{part:16}" + "".join(cells))
    print("folders of product", len({path.parent for path in parts["product"]}))
    print("rooms of search", len(list((ROOT / "search").glob("*/__init__.py"))))
    print("settings of a run", len(settings(RunConfig).union(*(settings(kind.section) for kind in KINDS.values()))))
    print("commands", len(COMMANDS))
    print("READMEs", len(list(ROOT.glob("[!.]*/**/README.md"))) + 1)


if __name__ == "__main__":
    main()
