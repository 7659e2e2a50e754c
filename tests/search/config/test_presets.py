"""Presets fill what a run file leaves out, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moevolve.evaluators.errors import UserError
from moevolve.search.compare.config import load_comparison
from moevolve.search.config.files import load_run_config
from moevolve.search.config.presets import filled, presets
from moevolve.search.config.run import RunConfig

RUN = {"name": "one", "model": {"path": "some/model"}, "tasks": ["demo-span"], "genome": {"experts": 4}}


def written(path: Path, **settings: object) -> Path:
    file = path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN | settings))
    return file


def kinds(config: RunConfig) -> list[str]:
    return [phase.kind for phase in config.phases]


def test_a_run_without_phases_gets_the_best_preset(tmp_path: Path) -> None:
    config = load_run_config(written(tmp_path))
    assert config == load_run_config(written(tmp_path, preset="best"))
    assert kinds(config)[-1] == "repair"
    assert config.genome.model_dump()["experts"] == 4


def test_what_the_file_says_stays(tmp_path: Path) -> None:
    phases = [{"kind": "prune", "evaluations": 7, "initial": 3}]
    config = load_run_config(written(tmp_path, preset="best", phases=phases, genome={"experts": 4, "groups": 2}))
    assert kinds(config) == ["prune"] and config.phases[0].evaluations == 7
    assert config.genome.model_dump()["groups"] == 2
    assert load_run_config(written(tmp_path, phases=phases)).phases[0].strategy is None


def test_overrides_come_last_and_may_choose_the_preset(tmp_path: Path) -> None:
    overrides = ("phases.1.evaluations=9", "preset=paper")
    config = load_run_config(written(tmp_path), overrides)
    assert [(phase.kind, phase.evaluations) for phase in config.phases] == [("prune", 40), ("merge", 9)]


@pytest.mark.parametrize("name", presets())
def test_every_preset_makes_a_run(name: str, tmp_path: Path) -> None:
    assert load_run_config(written(tmp_path, preset=name)).phases


def test_presets_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="preset: nope is unknown; there are best, paper"):
        load_run_config(written(tmp_path, preset="nope"))
    with pytest.raises(UserError, match="paper has nothing for genome kind tomoe"):
        load_run_config(written(tmp_path, preset="paper", genome={"kind": "tomoe", "experts": 4}))


def test_a_method_of_a_comparison_may_name_one(tmp_path: Path) -> None:
    base = {key: value for key, value in RUN.items() if key != "name"} | {
        "genome": {"experts": 4, "groups": 2},
        "phases": [{"kind": "prune", "evaluations": 5, "initial": 5}],
    }
    methods = {"own": {}, "paper": {"preset": "paper"}, "reap": {"baseline": "reap"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"name": "c", "base": base, "methods": methods}))
    configs = {cell.method: cell.config for cell in load_comparison(tmp_path / "c.yaml").cells}
    assert kinds(configs["own"]) == ["prune"] and kinds(configs["paper"]) == ["prune", "merge"]
    assert configs["own"].genome.model_dump()["groups"] == 2 and configs["paper"].genome.model_dump()["groups"] == 4
    assert configs["reap"].phases[0].evaluations == 1


def test_mappings_are_filled_and_lists_are_not() -> None:
    data = {"a": {"x": 1}, "b": [1]}
    assert filled(data, {"a": {"x": 2, "y": 3}, "b": [1, 2], "c": 4}) == {"a": {"x": 1, "y": 3}, "b": [1], "c": 4}
    assert data == {"a": {"x": 1}, "b": [1]}
