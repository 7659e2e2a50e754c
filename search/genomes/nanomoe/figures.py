"""Drawings of how a search changed NanoMoE's mixing matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moevolve.search.drawing import MAX_ROWS, WIDE, blocks_figure, draw_blocks, shown_note
from moevolve.search.genomes.contract.kind import GenomeFigures
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.nanomoe.space import NanoMoeGenome

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure


class NanoMoeFigures(GenomeFigures[NanoMoeGenome]):
    """One number per block and layer; plain low rank has none."""

    subject = "mixing matrices"

    def has_figure(self, genome: NanoMoeGenome, start: NanoMoeGenome | None) -> bool:
        return bool(genome.mixing.size)

    def page(self, genome: NanoMoeGenome, start: NanoMoeGenome | None) -> tuple[Figure, str]:
        caption = "How far the search moved each block of the mixing matrices from where it started."
        caption += shown_note(len(genome.space.layers), 3 * MAX_ROWS, "linear layers")
        return blocks_figure(*_mixing(genome)), caption

    def outline(self, genome: NanoMoeGenome) -> GenomeOutline:
        form, change = genome.space.form, mixing_change(genome) if genome.mixing.size else np.zeros(1)
        mixed = f"{form.variant}, {form.blocks} blocks" if genome.mixing.size else "none (low rank)"
        settings = (("mixing", mixed), ("rank", str(form.rank)), ("linear layers", str(len(genome.space.layers))))
        return GenomeOutline((*settings, ("mean change of a block", f"{np.abs(change).mean():.3f}")))

    def draw(self, figure: Any, genome: NanoMoeGenome, start: NanoMoeGenome | None, label: str) -> None:
        names, blocks, neutral, what = _mixing(genome)
        figure.suptitle(f"{self.subject} of {label}", fontsize="medium")
        columns = min(len(blocks), WIDE)
        image, grid = draw_blocks(figure, names, blocks, neutral, columns, min(2, -(-len(blocks) // columns)))
        figure.colorbar(image, ax=grid.ravel().tolist(), shrink=0.8, label=what)


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
    size: NDArray[np.float64] = np.sqrt((change**2).mean(axis=-1))
    return size


def _mixing(genome: NanoMoeGenome) -> tuple[list[str], NDArray[np.float64], float | None, str]:
    """Names of layers, values of blocks, neutral value and label for `blocks_figure`."""
    names, signed = [layer.name for layer in genome.space.layers], genome.space.form.variant == "I"
    label = "change of the mixing coefficient" if signed else "root mean square change of the block"
    return names, mixing_change(genome), 0.0 if signed else None, label
