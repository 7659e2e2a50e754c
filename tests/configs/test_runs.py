"""The runs and studies that ship: each can be launched as far as its settings go."""

from __future__ import annotations

from pathlib import Path

from moevolve.search.config.files import load_run_config, read_yaml
from moevolve.search.config.study import load_study

RUNS = sorted((Path(__file__).parents[2] / "configs" / "runs").glob("*.yaml"))


def test_settings_are_valid_and_the_readme_names_all() -> None:
    readme = (RUNS[0].parent / "README.md").read_text(encoding="utf-8")
    for path in RUNS:
        assert f"`{path.name}`" in readme
        if "methods" in read_yaml(path):
            assert load_study(path).cells, path
        else:
            assert load_run_config(path).phases, path
