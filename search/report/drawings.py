"""The figures of a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moevolve.search.figures.fitness import fitness_figure, size_figure
from moevolve.search.figures.lineage import lineage_figure
from moevolve.search.figures.style import to_svg
from moevolve.search.genomes.registry import figures_for
from moevolve.search.genomes.repaired import bare
from moevolve.search.operations.analyse import figures_of
from moevolve.search.report.contents import Contents
from moevolve.search.requests.answers import Analysis
from moevolve.search.text import percent

if TYPE_CHECKING:
    from moevolve.search.figures.style import Figure


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure on the page.

    Attributes:
        title: its heading.
        caption: what is to be seen.
        svg: the figure itself, an `<svg>` element.
    """

    title: str
    caption: str
    svg: str = field(repr=False)


def drawings_of(contents: Contents) -> dict[str, list[Drawing]]:
    """Figures by the section they belong to: `course`, `searched`, `lineage`, `experts`; empty ones left out."""
    found: dict[str, list[Drawing]] = {}
    if any(row.fitness is not None for row in contents.history):
        found["course"] = [_course(contents), _sizes(contents)]
    searched = _searched(contents)
    if searched is not None:
        found["searched"] = [searched]
    if contents.graph is not None and contents.graph.edges:
        count = len(contents.graph.nodes)
        caption = f"{_best(contents)} and the {count - 1} individuals it descends from, joined to their children."
        found["lineage"] = [_drawing("lineage", "Ancestors", caption, lineage_figure(contents.graph, "best found"))]
    if contents.analysis is not None:
        found["experts"] = _experts(contents.analysis)
    return found


def _drawing(name: str, title: str, caption: str, figure: Figure) -> Drawing:
    return Drawing(title, caption, to_svg(figure, name, f"{title}. {caption}"))


def _best(contents: Contents) -> str:
    return contents.standings.winner or "nothing"


def _course(contents: Contents) -> Drawing:
    scored = [row for row in contents.history if row.fitness is not None]
    top = max(row.fitness or 0.0 for row in scored)
    caption = f"Every individual's score on the search split, in order of creation; the highest is {percent(top)} %"
    caption += "." if contents.full is None else f", the full model has {percent(contents.full)} %."
    return _drawing("course", "Fitness over the search", caption, fitness_figure(contents.history, contents.full))


def _sizes(contents: Contents) -> Drawing:
    winner = contents.standings.winner
    scored = {row.index for row in contents.history if row.fitness is not None}
    best = None if winner is None else int(winner.rpartition(":")[2])
    best = best if best in scored else None
    figure = size_figure(contents.history, contents.full, best)
    caption = "Score against parameters, of the whole model and of what one token uses, for every individual."
    return _drawing("sizes", "Score against size", caption, figure)


def _searched(contents: Contents) -> Drawing | None:
    """What was searched, of the best individual."""
    if contents.subject is None or contents.subject.genome is None:
        return None
    genome = bare(contents.subject.genome)
    figures = figures_for(genome)
    if not figures.draws(genome, contents.start):
        return None
    figure, caption = figures.page(genome, contents.start)
    return _drawing("matrices", f"{figures.subject.capitalize()} of {_best(contents)}", caption, figure)


def _experts(analysis: Analysis) -> list[Drawing]:
    titles = {
        "usage": "Experts at work, all layers",
        "activations": "Activations per expert",
        "together": "Experts that are active together",
        "words": "Experts by word",
        "mixing": "Mixing matrices at work",
    }
    return [
        _drawing(f"experts-{name}", titles[name], caption, figure)
        for name, (figure, caption) in figures_of(analysis).items()
    ]
