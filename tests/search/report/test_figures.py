"""What figures show, by their data: nothing here looks at pixels."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
from search_samples import HISTORY, history_row

from moevolve.search.drawing import BLUE, INK, spread, to_svg
from moevolve.search.report import fitness
from moevolve.store.records import LineageGraph, LineageNode


def line(axes: Any, label: str) -> list[tuple[float, float]]:
    (found,) = [each for each in axes.lines if each.get_label() == label]
    return [(round(float(x), 6), round(float(y), 6)) for x, y in zip(*found.get_data(), strict=True)]


def dots(axes: Any, label: str) -> list[list[float]]:
    (found,) = [each for each in axes.collections if each.get_label() == label]
    return np.round(found.get_offsets(), 6).tolist()


def test_the_fitness_curve_shows_every_score_and_the_best_so_far() -> None:
    (axes,) = fitness.fitness_figure(HISTORY, 0.8, "percent").axes
    assert dots(axes, "prune") == [[0, 40], [2, 60]] and dots(axes, "merge") == [[3, 50], [4, 70]]
    assert line(axes, "best so far") == [(0, 40), (2, 60), (3, 60), (4, 70)]
    assert [index for index, _ in dots(axes, "failed")] == [1]
    assert {y for _, y in line(axes, "full model")} == {80}
    assert axes.get_xlabel() and axes.get_ylabel() == "score in %\non the search split"


def test_perplexities_fall() -> None:
    (axes,) = fitness.fitness_figure(HISTORY, 0.8, "perplexity").axes
    assert dots(axes, "prune") == [[0, 2.5], [2, round(1 / 0.6, 6)]]
    assert line(axes, "best so far")[-1] == (4, round(1 / 0.7, 6)) and line(axes, "full model")[0][1] == 1.25
    assert axes.get_yscale() == "log" and "perplexity (ppl), lower is better" in axes.get_ylabel()


def node(index: int, fitness: float | None, phase: str = "prune") -> LineageNode:
    return LineageNode(index, 0, phase, "mutation", "ok", fitness, "")


GRAPH = LineageGraph(
    "id",
    "demo",
    9,
    (node(0, 0.3), node(1, 0.5), node(2, 0.4), node(5, 0.5), node(7, 0.6, "merge"), node(9, 0.7, "merge")),
    ((0, 5), (1, 5), (2, 7), (5, 7), (7, 9)),
)


def test_the_main_line_goes_from_better_parent_to_better_parent() -> None:
    assert [node.index for node in GRAPH.main_line] == [1, 5, 7, 9]
    tied = LineageGraph("id", "demo", 3, (node(0, 0.5), node(1, 0.5), node(3, 0.6)), ((0, 3), (1, 3)))
    assert [node.index for node in tied.main_line] == [1, 3]


def test_panels_are_spread_over_all_layers() -> None:
    assert [spread(*each).tolist() for each in ((3, 6), (32, 4), (1, 4))] == [[0, 1, 2], [0, 10, 21, 31], [0]]


def test_an_svg_takes_the_colours_of_its_page_and_refers_to_itself_only() -> None:
    figure = fitness.fitness_figure(HISTORY, 0.8, "percent")
    text = to_svg(figure, "one", 'a "b" & <c>')
    root = ET.fromstring(text)
    assert root.get("role") == "img" and root.get("aria-label") == 'a "b" & <c>'
    assert root.get("viewBox") and root.get("width") is None and root.get("height") is None
    assert INK not in text and BLUE.lower() not in text and "currentColor" in text and "var(--figure-blue" in text
    ids = {element.get("id") for element in root.iter() if element.get("id")}
    assert ids and all(each.startswith("one-") for each in ids)
    links = [value[1:] for e in root.iter() for key, value in e.attrib.items() if key.endswith("href")]
    assert links and set(links) <= ids
    assert to_svg(figure, "one", 'a "b" & <c>') == text, "the same figure gives the same text"


def test_a_page_does_not_grow_with_a_long_search() -> None:
    rows = [history_row(index, "tune", (index % 97) / 100) for index in range(6_000)]
    figure = fitness.fitness_figure(rows, None, "percent")
    (scatter,) = [each for each in figure.axes[0].collections if each.get_label() == "tune"]
    assert scatter.get_rasterized() and len(scatter.get_offsets()) == len(rows)
    assert len(to_svg(figure, "long", "")) < 300_000
