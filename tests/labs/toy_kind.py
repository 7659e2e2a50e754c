"""A whole genome kind: a run of neighbouring experts in every layer, of which only the first one is searched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.arrays import BYTES, ArrayGenome, ArraySpace, Shape, inherited
from moevolve.search.genomes.contract.base import Description, GenomeSection, Offspring, offspring_of
from moevolve.search.genomes.contract.kind import GenomeKind
from moevolve.workers.contract.facts import active_parameters, parameters_after
from moevolve.workers.methods.eep.edit import EepEdit


class RunsSection(GenomeSection):
    parts: ClassVar[str] = "neighbours"
    phase_kinds: ClassVar[tuple[str, ...]] = ("prune",)
    kind: Literal["runs"] = "runs"
    length: int = 2


@dataclass(frozen=True, eq=False, repr=False)
class RunsGenome(ArrayGenome):
    space: RunsSpace
    firsts: NDArray[np.uint8] = field(metadata=BYTES)

    def express(self) -> EepEdit:
        kept = self.firsts[:, None] + np.arange(self.space.length)
        matrices = np.eye(self.space.facts.experts, dtype=np.float32)[kept]
        return EepEdit(matrices, matrices, min(self.space.facts.active, self.space.length))


@dataclass(frozen=True)
class RunsSpace(ArraySpace[RunsGenome]):
    kind, genome_type = "runs", RunsGenome
    length: int

    @property
    def shapes(self) -> dict[str, Shape]:
        return {"firsts": (len(self.facts.moe_layers),)}

    def sample(self, rng: np.random.Generator, phase: Any) -> Offspring[RunsGenome]:
        drawn = rng.integers(self.facts.experts - self.length + 1, size=len(self.facts.moe_layers))
        return Offspring(self.genome(firsts=drawn), "random", ())

    def breed(self, rng: np.random.Generator, phase: Any, parents: tuple[RunsGenome, ...]) -> Offspring[RunsGenome]:
        child = inherited(rng, parents, len(self.facts.moe_layers))["firsts"]
        child[rng.integers(len(child))] = rng.integers(self.facts.experts - self.length + 1)
        return offspring_of(self.genome(firsts=child), parents)

    def describe(self, genome: RunsGenome) -> Description:
        facts, kept, active = self.facts, self.length, min(self.facts.active, self.length)
        sizes = parameters_after(facts, kept), active_parameters(facts, kept, active), facts.parameters
        return Description(kept, active, *sizes, facts.active_parameters, f"from {genome.firsts.tolist()}")


RUNS = GenomeKind(RunsSection, lambda section, facts, phases: RunsSpace(section.length, facts=facts))
