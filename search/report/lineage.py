"""The lineage of an individual as a picture: ancestors by order of creation and score."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.evaluators.scales import SCALES
from moevolve.search.drawing import GREY, INK, MANY_MARKS, PHASE_COLOURS, RED, drawing
from moevolve.search.report.fitness import label_scores, legend_above
from moevolve.store.records import LineageGraph, LineageNode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LABELS = 12
"""Most individuals of the main line that are labelled."""


def main_line(graph: LineageGraph) -> list[int]:
    """Follow the better parents of an individual back to one without parents; return their indices, oldest first.

    The better of two parents has the higher fitness, or is the younger one if they tie.
    """
    nodes = {node.index: node for node in graph.nodes}
    parents: dict[int, list[LineageNode]] = {}
    for parent, child in graph.edges:
        parents.setdefault(child, []).append(nodes[parent])
    line = [graph.root]
    while line[-1] in parents:
        line.append(max(parents[line[-1]], key=lambda node: (node.fitness or 0.0, node.index)).index)
    return line[::-1]


def lineage_figure(graph: LineageGraph, root: str) -> Figure:
    """Draw ancestors as dots over the order of creation, an edge to each child, and the main line in bold.

    Args:
        graph: The individual and its ancestors.
        root: Label of the individual in the legend.
    """
    from matplotlib.collections import LineCollection

    scale = SCALES[graph.scale]
    shown = {node.index: scale.value(node.fitness) for node in graph.nodes if node.fitness is not None}
    nodes = {node.index: node for node in graph.nodes if node.index in shown}
    line = main_line(graph)
    with drawing(3.2) as figure:
        axes = figure.subplots()
        pairs = [(nodes[one], nodes[two]) for one, two in graph.edges if one in nodes and two in nodes]
        ends = [[(node.index, shown[node.index]) for node in pair] for pair in pairs]
        many = len(ends) > MANY_MARKS
        axes.add_collection(LineCollection(ends, colors=GREY, linewidths=0.6, alpha=0.6, zorder=1, rasterized=many))
        phases = list(dict.fromkeys(node.phase for node in graph.nodes))
        for phase, colour in zip(phases, PHASE_COLOURS, strict=False):
            some = [node for node in nodes.values() if node.phase == phase]
            scores = [shown[node.index] for node in some]
            axes.scatter(
                [node.index for node in some], scores, s=16, color=colour, label=phase, zorder=3, rasterized=many
            )
        known = [nodes[index] for index in line if index in nodes]
        scores = [shown[node.index] for node in known]
        axes.plot([n.index for n in known], scores, color=INK, linewidth=1.4, zorder=2, label="better parents")
        if graph.root in nodes:
            axes.plot(graph.root, shown[graph.root], "*", markersize=11, color=RED, zorder=4, label=root)
        for node in _labelled(known):
            axes.annotate(
                str(node.index),
                (node.index, shown[node.index]),
                xytext=(0, 8 if node.index == graph.root else 5),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                zorder=5,
            )
        axes.margins(x=0.06, y=0.14)
        axes.set_xlabel("individual (in order of creation)")
        label_scores(axes, scale, "\non the search split")
        axes.grid(alpha=0.25)
        legend_above(axes)
        return figure


def _labelled(line: list[LineageNode]) -> list[LineageNode]:
    """Choose nodes of a line that are far enough apart for labels, from the youngest back."""
    if not line:
        return []
    reach = max(1, line[-1].index - line[0].index)
    chosen = [line[-1]]
    for node in reversed(line[:-1]):
        if chosen[-1].index - node.index >= reach / _LABELS:
            chosen.append(node)
    return chosen
