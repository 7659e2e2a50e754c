"""The genome kind `nanomoe`: its baseline, what its candidates cost, and how they are drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.search.drawing import MAX_ROWS, Tiles, shown_note, tiles_height
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.genomes.contract.kind import Baseline, GenomeFigures, GenomeKind
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.nanomoe.space import NanoMoeGenome, NanoMoeSection, NanoMoeSpace

if TYPE_CHECKING:
    from moevolve.search.drawing import AnyFigure


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

    def distinct_candidates(self, phase: PhaseConfig) -> int | None:
        return 1 if self.space.form.variant == "low_rank" else None


# Panels side by side.
_COLUMNS = 3


class NanoMoeFigures(GenomeFigures[NanoMoeGenome]):
    """One number per block and layer; plain low rank has none."""

    subject = "mixing matrices"
    squares = True

    def has_figure(self, genome: NanoMoeGenome, start: NanoMoeGenome | None) -> bool:
        return bool(genome.mixing.size)

    def height(self, genome: NanoMoeGenome) -> float:
        return tiles_height(len(genome.space.layers), _COLUMNS, 1.42)

    def draw(self, figure: AnyFigure, genome: NanoMoeGenome, start: NanoMoeGenome | None) -> None:
        names, signed = [layer.name for layer in genome.space.layers], genome.space.form.variant == "I"
        label = "change of the mixing coefficient" if signed else "root mean square change of the block"
        Tiles(names, mixing_change(genome), "input block", "output block", label, signed=signed).draw(figure, _COLUMNS)

    def caption(self, genome: NanoMoeGenome) -> str:
        caption = "How far the search moved each block of the mixing matrices from where it started."
        return caption + shown_note(len(genome.space.layers), _COLUMNS * MAX_ROWS, "linear layers")

    def outline(self, genome: NanoMoeGenome) -> GenomeOutline:
        form, change = genome.space.form, mixing_change(genome) if genome.mixing.size else np.zeros(1)
        mixed = f"{form.variant}, {form.blocks} blocks" if genome.mixing.size else "none (low rank)"
        settings = (("mixing", mixed), ("rank", str(form.rank)), ("linear layers", str(len(genome.space.layers))))
        return GenomeOutline((*settings, ("mean change of a block", f"{np.abs(change).mean():.3f}")))


def mixing_change(genome: NanoMoeGenome) -> NDArray[np.float64]:
    """Return the change of each block of M since the start of the search: float64 [layers, K, K].

    It is signed for variant I; for the others it is the root mean square over the block's parameters.
    """
    change = genome.mixing.astype(np.float64) - genome.space.form.unmixed
    if genome.space.form.variant == "I":
        return change
    if genome.space.form.variant == "III":
        change = np.moveaxis(change, 1, -1)
        change = change.reshape(*change.shape[:3], -1)
    return np.sqrt((change**2).mean(axis=-1))


NANOMOE = GenomeKind(
    section=NanoMoeSection,
    make_space=lambda section, facts, phases: NanoMoeSpace.of(section, facts),
    costs=NanoMoeCosts,
    figures=NanoMoeFigures(),
    baselines=BASELINES,
)
