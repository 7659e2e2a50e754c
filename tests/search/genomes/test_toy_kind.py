"""A genome kind that is defined here, registered by one line, and works everywhere.

It keeps a run of neighbouring experts in every layer, of which only the first one is searched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import Field
from report_lab import finished

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config, parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.estimate import estimate
from moevolve.search.estimate.workload import Prompts
from moevolve.search.genomes.contract.base import (
    Baseline,
    Description,
    GenomeFigures,
    GenomeKind,
    GenomeSection,
    Offspring,
)
from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.registry import KINDS
from moevolve.search.report.style import drawing
from moevolve.search.running.candidates import find_candidate
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import ModelFacts, active_parameters, parameters_after
from moevolve.workers.methods.eep.edit import EepEdit

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class RunsSection(GenomeSection):
    random_title: ClassVar[str] = "random runs"
    parts: ClassVar[str] = "neighbours"
    count_format: ClassVar[str] = "{experts} in a row, {active} at work"
    kind: Literal["runs"]
    length: int = Field(2, ge=1)


@dataclass(frozen=True)
class RunsGenome:
    """The first expert that each layer keeps: [layers]."""

    space: RunsSpace = field(repr=False, compare=False)
    firsts: tuple[int, ...]

    def to_bytes(self) -> bytes:
        return bytes(self.firsts)

    @property
    def content_hash(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def express(self) -> EepEdit:
        space = self.space
        kept = np.array(self.firsts)[:, None] + np.arange(space.length)
        matrices = np.eye(space.facts.experts, dtype=np.float32)[kept]
        return EepEdit(matrices, matrices, min(space.facts.active, space.length), "probs")


@dataclass(frozen=True)
class RunsSpace:
    kind: ClassVar[str] = "runs"
    length: int
    facts: ModelFacts = field(repr=False)
    phase_kinds: ClassVar[tuple[str, ...]] = ("prune",)
    recipe: ClassVar[None] = None

    @property
    def starts(self) -> int:
        return self.facts.experts - self.length + 1

    def calibrated(self, calibration: Calibration) -> RunsSpace:
        return self

    def start(self, phase: PhaseConfig) -> None:
        return None

    def sample(self, rng: np.random.Generator, phase: PhaseConfig) -> Offspring[RunsGenome]:
        return Offspring(self._genome(rng.integers(self.starts, size=len(self.facts.moe_layers))), "random", ())

    def breed(
        self, rng: np.random.Generator, phase: PhaseConfig, parents: tuple[RunsGenome, ...]
    ) -> Offspring[RunsGenome]:
        firsts = list(parents[0].firsts)
        firsts[rng.integers(len(firsts))] = int(rng.integers(self.starts))
        return Offspring(self._genome(firsts), "mutation", (0,))

    def from_bytes(self, data: bytes) -> RunsGenome:
        return self._genome(list(data))

    def flatten(self, genome: RunsGenome, phase: PhaseConfig) -> NDArray[np.float64]:
        return np.array(genome.firsts, dtype=np.float64)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> RunsGenome:
        return self._genome(np.clip(np.rint(vector), 0, self.starts - 1))

    def describe(self, genome: RunsGenome) -> Description:
        active = min(self.facts.active, self.length)
        return Description(
            experts=self.length,
            active=active,
            parameters=parameters_after(self.facts, self.length),
            active_parameters=active_parameters(self.facts, self.length, active),
            parameters_full=self.facts.parameters,
            summary="from " + " ".join(map(str, genome.firsts)),
        )

    def _genome(self, firsts: Any) -> RunsGenome:
        return RunsGenome(self, tuple(int(first) for first in firsts))


class RunsCosts(GenomeCosts[RunsSpace]):
    def counts(self, phase: str) -> tuple[int, int, int, int]:
        found = self.space.describe(self.space._genome([0] * len(self.space.facts.moe_layers)))
        return found.experts, found.active, found.parameters, found.active_parameters

    def distinct_candidates(self, phase: str) -> int:
        return int(self.space.starts ** len(self.space.facts.moe_layers))


class RunsFigures(GenomeFigures[RunsGenome]):
    subject = "runs"

    def page(self, genome: RunsGenome, start: RunsGenome | None) -> tuple[Figure, str]:
        with drawing(2.0) as figure:
            figure.subplots().bar(range(len(genome.firsts)), genome.firsts)
            return figure, "The first neighbour that each layer keeps."

    def draw(self, figure: Any, genome: RunsGenome, start: RunsGenome | None, label: str) -> None:
        figure.suptitle(f"{self.subject} of {label}")
        figure.subplots().bar(range(len(genome.firsts)), genome.firsts)


def _make_space(section: RunsSection, facts: ModelFacts, phases: Any) -> RunsSpace:
    if section.length > facts.experts:
        raise UserError(f"genome.length: {section.length} is more than the model's {facts.experts} experts")
    return RunsSpace(section.length, facts)


def _leftmost(space: RunsSpace) -> Offspring[RunsGenome]:
    return Offspring(space._genome([0] * len(space.facts.moe_layers)), "leftmost", ())


RUNS = GenomeKind(RunsSection, _make_space, RunsCosts, RunsFigures(), {"leftmost": Baseline(_leftmost, ("prune",))})
PHASES: list[dict[str, Any]] = [
    {"kind": "prune", "evaluations": 6, "initial": 4, "init": ["leftmost"]},
    *(
        {"kind": "prune", "evaluations": 3, "initial": 1, "strategy": name}
        for name in ("nevergrad:OnePlusOne", "surrogate")
    ),
]


@pytest.fixture
def make_run(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """A run of the kind, which is registered."""
    monkeypatch.setitem(KINDS, "runs", RUNS)

    def make(**changes: Any) -> RunConfig:
        settings = {"genome": {"kind": "runs"}, "phases": PHASES} | changes
        return load_run_config(tiny.write_run(tmp_path / "run.yaml", "toy", **settings))

    return make


def test_a_configuration_takes_it(make_run: Callable[..., RunConfig]) -> None:
    config = make_run(genome={"kind": "runs", "length": 3})
    assert isinstance(config.genome, RunsSection) and config.genome.length == 3
    assert json.loads(config.canonical_json())["genome"] == {"kind": "runs", "length": 3}
    assert parse_stored_config(config.canonical_json()) == config
    assert config.config_hash != make_run().config_hash
    with pytest.raises(UserError, match=r"genome\.lenght: unknown key"):
        make_run(genome={"kind": "runs", "lenght": 3})
    with pytest.raises(
        UserError, match="genome: rums is unknown; there are eep, capacity, factorllm, tomoe, nanomoe, runs"
    ):
        make_run(genome={"kind": "rums"})


def test_it_is_searched_by_every_strategy_listed_and_drawn(
    make_run: Callable[..., RunConfig], in_process: Any, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'toy.db'}"
    with Store.open(url) as store:
        finished(store, make_run(window=1))
        rows = store.history(store.search("toy").id)
        assert [row.operator for row in rows[:4]] == ["leftmost", "random", "random", "random"]
        assert {"nevergrad:OnePlusOne", "mutation"} <= {row.operator for row in rows}
        assert len(rows) == 12 and all(row.status == "ok" for row in rows)
        genome = find_candidate(store, "toy:0").genome
        assert isinstance(genome, RunsGenome) and genome.firsts == (0, 0, 0, 0)

    def shown(*arguments: str) -> str:
        done = in_process(*arguments, "--store", url)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert "neighbours" in shown("best") and "runs" in shown("searches")
    text = shown("show", "toy:0")
    assert "runs: from 0 0 0 0" in text and "2 in a row, 2 at work" in text
    picture, page = tmp_path / "toy.svg", tmp_path / "toy.html"
    shown("plot", "toy", "-o", str(picture))
    assert "runs of toy:" in picture.read_text()
    shown("report", "toy", "-o", str(page))
    assert "Runs of toy:" in page.read_text() and "The first neighbour that each layer keeps." in page.read_text()


def test_its_costs_are_estimated_and_its_baselines_its_own(make_run: Callable[..., RunConfig]) -> None:
    config = make_run(phases=[{"kind": "prune", "evaluations": 400, "initial": 4}])
    found = estimate(config, Prompts(20, 4, 10))
    full, candidate = found.sizes
    assert (candidate.title, candidate.experts, candidate.active) == ("prune", 2, 2)
    assert candidate.parameters is not None and full.parameters is not None
    assert candidate.parameters < full.parameters
    assert [(each.individuals, each.different) for each in found.phases] == [(400, 81)]
    with Store.open("sqlite://") as store, pytest.raises(UserError, match="can begin with random, leftmost"):
        finished(store, make_run(phases=[PHASES[0] | {"init": ["reap"]}]))
