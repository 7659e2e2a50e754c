"""The genome kind `capacity`, with the costs of its candidates."""

from __future__ import annotations

from collections.abc import Sequence

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.capacity.baselines import BASELINES
from moevolve.search.genomes.capacity.figures import CapacityFigures
from moevolve.search.genomes.capacity.space import CapacitySection, CapacitySpace
from moevolve.search.genomes.contract.base import GenomeKind
from moevolve.search.genomes.experts.costs import ExpertsCosts
from moevolve.search.settings.phases import PhaseConfig, divides_neurons
from moevolve.workers.contract.facts import ModelFacts


class CapacityCosts(ExpertsCosts[CapacitySpace]):
    """Costs of candidates with the mean capacity in all layers."""

    def token_flops(self, phase: str) -> int:
        # Of equally many neurons, few wide experts have the most that a token uses.
        space, facts = self.space.keeping(self.space.fewest), self.outline.facts
        active = space.actives.mean
        fewer = facts.active - active + active * space.saved_neurons / (space.layers * facts.expert_neurons)
        return self.outline.token_flops - sum(int(fewer * each.expert) for each in self.outline.layers)

    def counts(self, phase: str) -> tuple[int, int, int, int]:
        return self.space.retained, self.space.active, *self.space.parameters()

    def largest_layer(self, uneven: bool) -> tuple[int, int]:
        resized = uneven or self.space.neuron_share is not None
        return self.space.widths.largest if resized else self.outline.intermediate, self.space.actives.most


def _space(section: CapacitySection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> CapacitySpace:
    """Make a space for phases that fill experts of other widths than the original ones."""
    divided = any(map(divides_neurons, phases))
    for position, phase in enumerate(phases):
        filled = phase.repair is not None and phase.repair.neurons is not None
        if not filled and (section.neuron_share is not None or (divided and phase.kind == "repair")):
            raise UserError(
                f"phases.{position}.repair.neurons: kept experts have other widths (genome.neuron_share, or searched "
                "widths), which only neurons of all experts fill; set it, or {}"
            )
    return CapacitySpace.of(section, facts)


CAPACITY = GenomeKind(
    section=CapacitySection,
    make_space=_space,
    costs=CapacityCosts,
    figures=CapacityFigures(),
    baselines=BASELINES,
    repairable=True,
    recombinable=True,
)
