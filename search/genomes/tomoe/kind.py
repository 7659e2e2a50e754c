"""The genome kind `tomoe`: its baselines, what its candidates cost, and how they are drawn.

Baselines are static masks: all experts of a layer have the same mask, and so have all tokens. They mask neurons only;
with `genome.attention`, heads get the start's masks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.search.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, spread
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.costs import FitOutline, GenomeCosts, down_projection_bytes
from moevolve.search.genomes.contract.kind import Baseline, GenomeFigures, GenomeKind
from moevolve.search.genomes.contract.outline import GenomeOutline, LayerOutline
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.tomoe.space import FLUCTUATION, ToMoeGenome, ToMoeSection, ToMoeSpace
from moevolve.workers.contract.edits import ROW_TOKENS
from moevolve.workers.methods.tomoe.edit import ToMoeEdit

if TYPE_CHECKING:
    from moevolve.search.drawing import AnyFigure


def saliency(space: ToMoeSpace) -> Offspring[ToMoeGenome]:
    """Keep the neurons with the largest mean squared contribution, E[h^2] |column of the output matrix|^2.

    Every layer keeps the same share. This is the criterion of Wanda (arXiv 2306.11695) for whole neurons.
    """
    return Offspring(space.genome(), "saliency", ())


def flap(space: ToMoeSpace) -> Offspring[ToMoeGenome]:
    """Keep the neurons with the largest fluctuations, ranked across layers, or within each if widths are equal.

    Source: FLAP (arXiv 2312.11983), Sec. 3.2 and 3.3: the metric (WIFV) is the sample variance of an activation times
    the squared norm of its output weights, standardised within each layer.

    Departures: in FLAP, whole attention heads compete with neurons; here heads keep their share at the start. FLAP adds
    the mean contribution of removed neurons to the output bias, which a ToMoE edit doesn't have; `repair` compensates
    it in the remaining output weights instead.
    """
    even = space.even_widths[:, 0]
    widths = competing_widths(space.statistics["neuron_fluctuation"], int(even.sum()))
    # Widths are proportional to exp(share). The heads' shares are slightly above 0, since shares are float32 and widths
    # of heads are rounded down.
    shares = np.full(space.shapes["shares"], 1e-6)
    if len(shares):
        shares[:, 0] = np.log(widths / even.mean())
    seeds = np.full(space.shapes["seeds"], FLUCTUATION)
    return Offspring(space.genome(shares=shares, seeds=seeds), "flap", ())


def competing_widths(metric: NDArray[np.floating], total: int) -> NDArray[np.int64]:
    """Count each layer's neurons among the `total` largest metrics, standardised per layer: int64 [layers].

    Args:
        metric: Importance of every neuron, [layers, width].
        total: Number of neurons to keep, at least the number of layers; every layer keeps at least one.
    """
    values = metric.astype(np.float64)
    deviations = values.std(axis=1, ddof=1 if values.shape[1] > 1 else 0, keepdims=True)
    scores = (values - values.mean(axis=1, keepdims=True)) / np.where(deviations > 0, deviations, 1.0)
    # Widths must not depend on the last digits, which differ between machines.
    scores = np.round(scores, 12)
    np.put_along_axis(scores, scores.argmax(axis=1)[:, None], np.inf, axis=1)
    kept = np.argsort(-scores.ravel(), kind="stable")[:total]
    return np.bincount(kept // values.shape[1], minlength=len(values)).astype(np.int64)


BASELINES = {
    "saliency": Baseline(saliency),
    "flap": Baseline(flap),
}


class ToMoeCosts(GenomeCosts[ToMoeSpace]):
    """Costs of ToMoE candidates at the start's widths, whose total is the same in all candidates.

    Value dimensions are counted as in a search's children, whose masks differ between tokens. The start's are the same
    for all tokens and cost less.
    """

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """Count repaired output projections, also of attention with masked heads."""
        if not repaired:
            return 0
        dense, attended = self.space.dense, self._masked * self.space.dense.heads * self.space.dense.head_dim
        return down_projection_bytes(self.outline, dense) * (dense.width + attended) // dense.width

    def calibration_bytes(self, longest: int) -> int:
        """Count the networks' inputs, what a pass takes beside them, and what measuring one network does.

        The last are inputs in float64, their moments, contributions, and a part of these in float64.
        """
        from moevolve.workers.methods.shared.input_statistics import STATISTICS_MEMORY, directions_bytes

        dense, tokens = self.space.dense, self.space.section.calibration_tokens
        inputs = tokens * dense.hidden
        held = self.outline.facts.dtype_bytes * inputs
        held *= min(dense.layers, max(1, STATISTICS_MEMORY // held))
        network = 8 * inputs + 5 * 8 * dense.hidden**2 + 4 * tokens * dense.width + 3 * 8 * ROW_TOKENS * dense.width
        passing = 4 * 8 * max(longest, ROW_TOKENS) * (dense.width + dense.hidden)
        return max(held + passing + network, directions_bytes(dense.hidden, dense.layers) if self._masked else 0)

    def fitted_maps(self) -> tuple[tuple[FitOutline, ...], ...]:
        dense = self.space.dense
        attention = (FitOutline(dense.heads * dense.head_dim, 1, 1.0),) if self._masked else ()
        # A feature is zero only for tokens whose masks drop it, and these differ by feature.
        return ((*attention, FitOutline(dense.width, 1, 1.0)),) * dense.layers

    @property
    def _masked(self) -> bool:
        return self.space.even_widths.shape[1] > 1

    def counts(self, phase: PhaseConfig) -> tuple[int, int, None, int]:
        space = self.space
        return space.section.experts, 1, None, space.active_parameters(space.even_widths)


class ToMoeFigures(GenomeFigures[ToMoeGenome]):
    """Neurons per layer of one expert, of the union of all, and of the network; with masked heads their dimensions too.

    Source: ToMoE (arXiv 2501.15316), Fig. 4, 5a and 7.
    """

    subject = "widths"

    def height(self, genome: ToMoeGenome) -> float:
        return 2.6 if genome.express().heads is None else 4.4

    def draw(self, figure: AnyFigure, genome: ToMoeGenome) -> None:
        edit = genome.express()
        _draw(figure, edit)
        figure.legend(
            loc="outside lower center", ncols=3 if edit.heads is None else 2, columnspacing=1.2, handlelength=1.6
        )

    def caption(self, genome: ToMoeGenome) -> str:
        caption = "Neurons that one expert keeps in each layer, and that any expert keeps."
        if genome.express().heads is not None:
            caption += " Below, the dimensions of a head that queries and keys keep, and values for a token."
        return caption

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


def _draw(figure: AnyFigure, edit: ToMoeEdit) -> None:
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


TOMOE = GenomeKind(
    section=ToMoeSection,
    make_space=lambda section, facts, phases: ToMoeSpace.of(section, facts),
    costs=ToMoeCosts,
    figures=ToMoeFigures(),
    baselines=BASELINES,
    repairable=True,
)
