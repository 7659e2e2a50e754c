"""The genome kind `nanomoe`: its baseline, what its candidates cost, and what listings say of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.genomes.contract.kind import Baseline, GenomeFigures, GenomeKind
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.nanomoe.space import NanoMoeGenome, NanoMoeSection, NanoMoeSpace


def low_rank(space: NanoMoeSpace) -> Offspring[NanoMoeGenome]:
    """Return the best approximation U V of rank r by outputs on calibration rows; all blocks of M are the identity.

    Source: SVD-LLM (arXiv 2403.07378), Sec. 3.2, truncation-aware data whitening. Its updates of the factors to the
    previous layers' errors (Sec. 3.3) are missing: all layers are fitted to the unedited model's inputs. Compared with
    plain low rank, M adds K^2 parameters per layer (variant I) and changes nothing.
    """
    return Offspring(NanoMoeGenome(space, space.unmixed), "low_rank", ())


@dataclass(frozen=True, slots=True)
class _LowRank(Baseline):
    def problem(self, space: NanoMoeSpace) -> str | None:
        if space.tokens is not None and not space.fit:
            return None
        return "is fitted to outputs, without mixing, which needs genome.fit_to: outputs and genome.fit: 0"


BASELINES = {"low_rank": _LowRank(low_rank)}


class NanoMoeCosts(GenomeCosts[NanoMoeSpace]):
    """Costs of NanoMoE candidates, the same for all."""

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """Count the factors of all chosen layers."""
        values = sum(self.space.form.rank * (linear.inputs + linear.outputs) for linear in self.space.layers)
        return self.outline.facts.dtype_bytes * values

    def calibration_bytes(self, longest: int) -> int:
        """Count a weight's decomposition in float64, and its inputs' second moments."""
        from moevolve.workers.methods.shared.input_statistics import STATISTICS_MEMORY

        moments = [8 * linear.inputs**2 for linear in self.space.layers]
        sizes = {(linear.inputs, linear.outputs) for linear in self.space.layers}
        decomposed = max(8 * (inputs * outputs + 4 * min(inputs, outputs) ** 2) for inputs, outputs in sizes)
        if self.space.tokens is None:
            return decomposed
        return min(sum(moments), max(*moments, STATISTICS_MEMORY)) + 2 * decomposed


class NanoMoeFigures(GenomeFigures[NanoMoeGenome]):
    """No drawing, only columns."""

    def outline(self, genome: NanoMoeGenome) -> GenomeOutline:
        form = genome.space.form
        mixed = f"{form.variant}, {form.blocks} blocks" if genome.mixing.size else "none (low rank)"
        settings = (("mixing", mixed), ("rank", str(form.rank)), ("linear layers", str(len(genome.space.layers))))
        return GenomeOutline((*settings, ("mean change of mixing", f"{genome.change:.3f}")))


NANOMOE = GenomeKind(
    section=NanoMoeSection,
    make_space=lambda section, facts, phases: NanoMoeSpace.of(section, facts),
    costs=NanoMoeCosts,
    figures=NanoMoeFigures(),
    baselines=BASELINES,
)
