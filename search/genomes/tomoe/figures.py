"""Drawings of the widths of ToMoE's experts per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moevolve.search.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, drawing, spread
from moevolve.search.genomes.contract.kind import GenomeFigures
from moevolve.search.genomes.contract.outline import GenomeOutline, LayerOutline
from moevolve.search.genomes.tomoe.space import ToMoeGenome
from moevolve.workers.methods.tomoe.edit import ToMoeEdit

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure


class ToMoeFigures(GenomeFigures[ToMoeGenome]):
    """Neurons per layer of one expert, of the union of all, and of the network; with masked heads their dimensions too.

    Source: ToMoE (arXiv 2501.15316), Fig. 4, 5a and 7.
    """

    subject = "widths"
    weights = "router's softmax"

    def has_figure(self, genome: ToMoeGenome, start: ToMoeGenome | None) -> bool:
        return True

    def page(self, genome: ToMoeGenome, start: ToMoeGenome | None) -> tuple[Figure, str]:
        edit = genome.express()
        caption = "Neurons that one expert keeps in each layer, and that any expert keeps."
        if edit.heads is not None:
            caption += " Below, the dimensions of a head that queries and keys keep, and values for a token."
        with drawing(2.6 if edit.heads is None else 4.4) as figure:
            _draw(figure, edit)
            columns = 3 if edit.heads is None else 2
            figure.legend(loc="outside upper center", ncols=columns, columnspacing=1.2, handlelength=1.6)
            return figure, caption

    def outline(self, genome: ToMoeGenome) -> GenomeOutline:
        labels = ("neurons per expert", "query and key dimensions", "value dimensions")
        full = np.array(genome.space.budget.full_widths)
        factors = np.array((1, 2, 1))[: len(full)]  # query and key dimensions are kept in pairs
        layers = [LayerOutline(i, (), tuple(row)) for i, row in enumerate((genome.widths * factors).tolist())]
        terms = genome.terms
        settings = [
            ("budget", f"{genome.space.section.budget:.0%} of the parameters active"),
            ("coverage", f"{terms.coverage.mean():.1%} of the neurons in some expert"),
            ("balance", f"{terms.balance_term:+.2f} (0: all experts are used equally)"),
        ]
        sizes = tuple(zip(labels, (full * factors).tolist(), strict=False))
        return GenomeOutline(tuple(settings), sizes=sizes, layers=tuple(layers))

    def draw(self, figure: Any, genome: ToMoeGenome, start: ToMoeGenome | None, label: str) -> None:
        figure.suptitle(f"{self.subject} of {label}", fontsize="medium")
        _draw(figure, genome.express())
        figure.legend(loc="outside right upper")


def _draw(figure: Any, edit: ToMoeEdit) -> None:
    layers, panels = np.arange(edit.layers), 1 if edit.heads is None else 2
    axes = figure.subplots(panels, 1, squeeze=False, sharex=True)[:, 0]
    unions = edit.kept.any(axis=1).sum(axis=1)
    axes[0].bar(layers, unions, width=0.75, color=GREEN, alpha=0.45, label="any expert (union)")
    axes[0].bar(layers, edit.widths, width=0.5, color=BLUE, label="one expert (width)")
    axes[0].axhline(edit.width, color=GREY, linestyle="--", linewidth=1.2, label="whole network")
    axes[0].set_ylabel("neurons")
    axes[0].set_ylim(0, edit.width * 1.05)
    if edit.heads is not None:
        whole = edit.heads.head_dim
        pairs = 2 * edit.heads.pairs.sum(axis=1)
        axes[1].bar(layers - 0.2, pairs, width=0.38, color=ORANGE, label="queries and keys")
        axes[1].bar(layers + 0.2, edit.heads.active, width=0.38, color=PURPLE, label="values and outputs")
        axes[1].axhline(whole, color=GREY, linestyle="--", linewidth=1.2)
        axes[1].set_ylabel("head dimensions")
        axes[1].set_ylim(0, whole * 1.05)
    axes[-1].set_xlabel("layer")
    axes[-1].set_xticks(spread(edit.layers, 12))
