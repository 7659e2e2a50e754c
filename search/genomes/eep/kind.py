"""The genome kind `eep`, with the costs of its candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import comb

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import GenomeKind
from moevolve.search.genomes.contract.costs import FitOutline, GenomeCosts
from moevolve.search.genomes.contract.phases import PhaseConfig, divides_neurons
from moevolve.search.genomes.eep.allocation import ActiveBudget, WidthBudget
from moevolve.search.genomes.eep.baselines import BASELINES, expert_recipes
from moevolve.search.genomes.eep.figures import EepFigures
from moevolve.search.genomes.eep.space import EepSection, EepSpace
from moevolve.workers.contract.edits import ROW_TOKENS, PerTaskRecipe, combined, recipe_parts
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.methods.eep.edit import ExpertsRecipe


class EepCosts(GenomeCosts[EepSpace]):
    """Costs of EEP candidates.

    Routers run over all n experts; a continuous mapping is applied to their scores, or, in logits space, folded into
    the router.
    """

    def counts(self, phase: str) -> tuple[int, int, int, int]:
        return self.space.retained, self.space.active, *self.space.parameters(one_hot=phase != "merge")

    def distinct_candidates(self, phase: str) -> int | None:
        if phase != "prune":
            return None
        subsets = self.space.subsets
        groups = subsets.routing_groups
        return comb(subsets.experts // groups, subsets.retained // groups) ** (groups * self.space.groups)

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """Kept experts are copied if merged, repaired, or on the host; of shared experts, repairs copy one matrix."""
        facts, total = self.outline.facts, 0
        if repaired:
            total += len(facts.moe_layers) * facts.shared_neurons * self.outline.hidden * facts.dtype_bytes
        if host or repaired or "merge" in phases:
            total += self.outline.experts_bytes * self.space.retained // self.space.experts
        return total

    def calibration_bytes(self, longest: int) -> int:
        """Baselines need more memory than the thresholds of dynamic skipping."""
        # Imported here because it imports torch, which most users of genomes don't need.
        from moevolve.workers.methods.eep.calibrate_experts import measuring_bytes
        from moevolve.workers.profiling.activations import expert_row_bytes

        outline, facts = self.outline, self.outline.facts
        row_bytes = expert_row_bytes(outline.hidden, outline.intermediate, facts.dtype_bytes)
        tokens = max(longest, ROW_TOKENS)  # short sequences share a row of the batch
        parts = (part.inner if isinstance(part, PerTaskRecipe) else part for part in recipe_parts(self.space.recipe))
        recipes = [part for part in parts if isinstance(part, ExpertsRecipe)]
        return max((measuring_bytes(each, facts, outline.hidden, row_bytes, tokens) for each in recipes), default=0)

    def fitted_maps(self, uneven: bool) -> tuple[tuple[FitOutline, ...], ...]:
        """The output projections of a layer's experts are fitted together."""
        routed = self.outline.facts.moe_layers
        return tuple((self._fit(uneven),) if layer in routed else () for layer in range(self.outline.layers))

    def _fit(self, uneven: bool) -> FitOutline:
        space, neurons = self.space, self.outline.intermediate
        width = WidthBudget.of(space).widest if uneven or space.neuron_share is not None else neurons
        share, pool = ActiveBudget.of(space).most / space.retained, space.experts * neurons
        dense = self.outline.facts.shared_neurons
        return FitOutline(space.retained * width + dense, space.retained, share, pool, dense)


def _space(section: EepSection, facts: ModelFacts, phases: Sequence[PhaseConfig]) -> EepSpace:
    """Make a space whose recipe includes the measurements for the phases and their baselines."""
    others = [position for position, phase in enumerate(phases) if phase.kind not in ("allocate", "repair")]
    searched = {"neuron_share": "kept experts other widths", "mean_active": "layers their own number of active experts"}
    for name, what in searched.items():
        if getattr(section, name) is not None and others:
            raise UserError(
                f"genome.{name}: only allocate phases give {what}, and phases.{others[0]} is a "
                f"{phases[others[0]].kind} phase; use an allocate phase, or leave {name} out"
            )
    divided = any(map(divides_neurons, phases))
    for position, phase in enumerate(phases):
        filled = phase.repair is not None and phase.repair.neurons is not None
        if not filled and (section.neuron_share is not None or (divided and phase.kind == "repair")):
            raise UserError(
                f"phases.{position}.repair.neurons: kept experts have other widths (genome.neuron_share, or widths of "
                "an allocate phase), which only neurons of all experts fill; set it, or {}"
            )
    space = EepSpace.of(section, facts)
    return replace(space, recipe=combined(*expert_recipes(space, section, phases), space.recipe))


EEP = GenomeKind(
    section=EepSection,
    make_space=_space,
    costs=EepCosts,
    figures=EepFigures(),
    baselines=BASELINES,
    repairable=True,
    recombinable=True,
    baseline_settings={"genome.groups": "per_layer"},
)
