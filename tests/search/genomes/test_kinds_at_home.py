"""That a genome kind is its folder and a line in the registry: read from the sources, nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SEARCH = Path(__file__).parents[3] / "search"
GENOMES = "moevolve.search.genomes"
KINDS = sorted(path.parent.name for path in (SEARCH / "genomes").glob("*/kind.py"))
# Coefficient files are the EEP authors'.
OF_ONE_KIND = {"eep": {"service/import_eep.py", "service/export.py"}}
FILES = {"section.py", "genome.py", "space.py", "cost.py", "figures.py", "kind.py"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def importers(prefix: str) -> set[str]:
    """Files of `search` that import a package or something within."""
    return {
        path.relative_to(SEARCH).as_posix()
        for path in SEARCH.rglob("*.py")
        if any(name == prefix or name.startswith(f"{prefix}.") for name in imports(path))
    }


def test_there_are_kinds() -> None:
    assert len(KINDS) >= 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_a_file_for_everything(kind: str) -> None:
    assert {path.name for path in (SEARCH / "genomes" / kind).glob("*.py")} >= FILES


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_but_the_registry_knows_a_kind(kind: str) -> None:
    outside = {path for path in importers(f"{GENOMES}.{kind}") if not path.startswith(f"genomes/{kind}/")}
    assert outside - OF_ONE_KIND.get(kind, set()) == {"genomes/registry.py"}


def test_figures_know_nothing_of_genomes() -> None:
    assert not {path for path in importers(GENOMES) if path.startswith("figures/")}
