"""The runs and comparisons that ship: each can be launched as far as its settings go."""

from __future__ import annotations

from pathlib import Path

import pytest

from moevolve.search.compare.config import load_comparison
from moevolve.search.config.files import load_run_config, read_yaml

RUNS = sorted((Path(__file__).parents[2] / "configs" / "runs").glob("*.yaml"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_settings_are_valid(path: Path) -> None:
    if "methods" in read_yaml(path):
        assert load_comparison(path).cells
    else:
        assert load_run_config(path).phases


def test_the_readme_names_all() -> None:
    readme = (RUNS[0].parent / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in RUNS if f"`{path.name}`" not in readme]
