"""The toy kind, registered by one line, works everywhere."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy_kind
from report_lab import finished
from toy_kind import RUNS, RunsGenome, RunsSection

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config, parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.kind import Baseline
from moevolve.search.genomes.registry import KINDS
from moevolve.search.running.candidates import find_candidate
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.plan.workload import Prompts
from moevolve.store.repository import Store

LEFTMOST = Baseline(lambda space: Offspring(space.genome(), "leftmost", ()))
PHASES: list[dict[str, Any]] = [
    {"kind": "prune", "evaluations": 6, "initial": 4, "init": ["leftmost"]},
    {"kind": "prune", "evaluations": 6, "initial": 1, "strategy": "surrogate"},
]


@pytest.fixture
def make_run(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """A run of the kind, which is registered."""
    monkeypatch.setitem(KINDS, "runs", replace(RUNS, baselines={"leftmost": LEFTMOST}))

    def make(**changes: Any) -> RunConfig:
        settings = {"genome": {"kind": "runs"}, "phases": PHASES} | changes
        return load_run_config(tiny.write_run(tmp_path / "run.yaml", "toy", **settings))

    return make


def test_a_configuration_takes_it(make_run: Callable[..., RunConfig]) -> None:
    config = make_run(genome={"kind": "runs", "length": 3})
    assert isinstance(config.genome, RunsSection) and config.genome.length == 3
    assert json.loads(config.canonical_json())["genome"] == {"kind": "runs", "length": 3}
    assert parse_stored_config(config.canonical_json(), config.name) == config
    assert config.config_hash != make_run().config_hash
    with pytest.raises(UserError, match=r"genome\.lenght: unknown key"):
        make_run(genome={"kind": "runs", "lenght": 3})
    with pytest.raises(UserError, match="genome: rums is unknown; there are eep, factorllm, tomoe, nanomoe, runs"):
        make_run(genome={"kind": "rums"})


def test_it_is_searched_listed_and_reported(
    make_run: Callable[..., RunConfig], in_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moevolve.search.cli.output.console.output.width", 140)  # no column is left out
    url = f"sqlite:///{tmp_path / 'toy.db'}"
    with Store.open(url) as store:
        finished(store, make_run(window=1))
        rows = store.history(store.search("toy").id)
        assert [row.operator for row in rows[:4]] == ["leftmost", "random", "random", "random"]
        assert {"crossover+mutation", "mutation"} & {row.operator for row in rows}
        assert len(rows) == 12 and all(row.status == "ok" for row in rows)
        genome = find_candidate(store, "toy:0").genome
        assert isinstance(genome, RunsGenome) and not genome.firsts.any()

    def shown(*arguments: str) -> str:
        done = in_process(*arguments, "--store", url)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert "from [" in shown("best") and "toy" in shown("searches")
    text = shown("show", "toy:0")
    assert "neighbours" in text and "runs: from [0, 0, 0, 0]" in text and "2 per network, 2 active" in text
    picture, page = tmp_path / "toy.svg", tmp_path / "toy.html"
    shown("plot", "toy", "-o", str(picture))
    assert picture.read_text().startswith("<?xml")
    shown("report", "toy", "-o", str(page))
    assert "leftmost" in page.read_text()


def test_its_costs_are_estimated_and_its_baselines_its_own(make_run: Callable[..., RunConfig]) -> None:
    full, candidate = estimate(make_run(), Prompts(20, 4, 10)).sizes
    assert (candidate.title, candidate.experts, candidate.active) == ("prune", 2, 2)
    assert candidate.parameters is not None and full.parameters is not None
    assert candidate.parameters < full.parameters
    with Store.open("sqlite://") as store, pytest.raises(UserError, match="can begin with random, leftmost"):
        finished(store, make_run(phases=[PHASES[0] | {"init": ["reap"]}]))


def test_a_kind_without_coordinates_has_nothing_to_optimise(make_run: Callable[..., RunConfig]) -> None:
    phases = [{"kind": "prune", "evaluations": 3, "initial": 1, "strategy": "nevergrad:OnePlusOne"}]
    with Store.open("sqlite://") as store, pytest.raises(UserError, match=r"no coordinates.*use strategy evolution"):
        finished(store, make_run(phases=phases, window=1))


def test_a_kind_is_small() -> None:
    assert len(Path(toy_kind.__file__).read_text().splitlines()) <= 60
    folders = {Path(inspect.getfile(kind.section)).parent for kind in KINDS.values()}
    assert max(len(list(folder.glob("[!_]*.py"))) for folder in folders) <= 5
