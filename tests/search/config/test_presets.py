"""Presets fill what a run file leaves out, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config, presets
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.operators import FIRST_PARENT
from moevolve.search.genomes.contract.phases import MergePhase, PrunePhase
from moevolve.search.genomes.eep.space import _NORMALISED

RUN = {"name": "one", "model": {"path": "some/model"}, "tasks": ["demo-span"], "genome": {"experts": 4}}


def written(path: Path, **settings: object) -> Path:
    file = path / "run.yaml"
    file.write_text(yaml.safe_dump(RUN | settings))
    return file


def kinds(config: RunConfig) -> list[str]:
    return [phase.kind for phase in config.phases]


def test_a_run_without_phases_gets_the_best_preset(tmp_path: Path) -> None:
    config = load_run_config(written(tmp_path))
    assert config == load_run_config(written(tmp_path, preset="repaired"))
    assert kinds(config) == ["prune", "repair"] and config.genome.kind == "eep"
    assert config.genome.model_dump()["experts"] == 4


def test_what_the_file_says_stays(tmp_path: Path) -> None:
    phases = [{"kind": "prune", "evaluations": 7, "initial": 3}]
    config = load_run_config(written(tmp_path, preset="paper", phases=phases, genome={"experts": 4, "groups": 2}))
    assert kinds(config) == ["prune"] and config.phases[0].evaluations == 7
    assert config.genome.model_dump()["groups"] == 2
    assert load_run_config(written(tmp_path, phases=phases)).phases[0].strategy is None


def test_overrides_come_last_and_may_choose_the_preset(tmp_path: Path) -> None:
    overrides = ("phases.1.evaluations=9", "preset=paper")
    config = load_run_config(written(tmp_path), overrides)
    assert [(phase.kind, phase.evaluations) for phase in config.phases] == [("prune", 71), ("merge", 9)]


def test_every_preset_makes_a_run(tmp_path: Path) -> None:
    for name in presets():
        settings: dict[str, dict[str, object]] = {
            "counts": {"neuron_share": 0.25},
            "active-neurons": {},
            "kept-neurons": {},
        }
        genome = settings.get(name, {"experts": 4})
        assert load_run_config(written(tmp_path, preset=name, genome=genome)).phases


def test_the_papers_preset_has_its_iterations_after_the_random_ones(tmp_path: Path) -> None:
    config = load_run_config(written(tmp_path, preset="paper"))
    prune, merge = config.phases
    assert isinstance(prune, PrunePhase) and isinstance(merge, MergePhase)
    assert (prune.evaluations - prune.initial, merge.evaluations) == (40, 160)
    assert prune.parents == merge.parents == 10
    assert (prune.initial, prune.group_rate, prune.replace_rate, prune.crossover_rate) == (31, 0.25, 0.15, 0.3)
    assert (merge.crossover_rate, merge.entry_rate, merge.sigma) == (0.3, 0.25, 0.065)
    assert not prune.allow_duplicates and not merge.allow_duplicates
    assert (merge.start, config.final.rerank) == ("best", 0)


def test_the_authors_preset_has_their_released_settings(tmp_path: Path) -> None:
    """By the file that they released (search.yml), whose numbers stand here as there."""
    released = {
        "discrete_mutate.prob": 0.15,
        "crossover.prob": 0.3,
        "crossover.from_front_prob": 0.6,
        "mutate.prob": 0.25,
    }
    released |= {"mutate.scale": 0.065, "norm_prob": 0.1, "change_prob": 0.25}
    config = load_run_config(written(tmp_path, preset="authors"))
    prune, merge = config.phases
    assert isinstance(prune, PrunePhase) and isinstance(merge, MergePhase)
    assert merge.crossover_rate == released["crossover.prob"] and prune.crossover_rate == 0
    assert released["crossover.from_front_prob"] == FIRST_PARENT
    assert (merge.entry_rate, merge.sigma) == (released["mutate.prob"], released["mutate.scale"])
    assert prune.replace_rate == released["discrete_mutate.prob"]
    assert prune.group_rate == merge.group_rate == released["change_prob"]
    assert released["norm_prob"] == _NORMALISED
    assert merge.start == "all" and prune.allow_duplicates and merge.allow_duplicates
    for phase in (prune, merge):
        assert phase.parents == "threshold"
    assert (prune.initial, prune.evaluations, prune.evaluations + merge.evaluations) == (31, 101, 402)
    assert config.final.rerank == 20


def test_presets_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="counts, kept-neurons, p"):
        load_run_config(written(tmp_path, preset="nope"))
    with pytest.raises(UserError, match="paper is for genome kind eep, not tomoe"):
        load_run_config(written(tmp_path, preset="paper", genome={"kind": "tomoe", "experts": 4}))
