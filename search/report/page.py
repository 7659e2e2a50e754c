"""A report as one HTML file that needs no other file: text, tables and figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moevolve.evaluators.scales import SCALES
from moevolve.evaluators.types import SCORED
from moevolve.search.drawing import to_svg
from moevolve.search.genomes.registry import figures_for
from moevolve.search.report.contents import ReportContents
from moevolve.search.report.fitness import fitness_figure
from moevolve.search.report.rendering import FOLDER, environment

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure

# Number of ancestors listed from the main line: the oldest one and the latest ones.
_LINE = 12


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """A figure with its heading, its caption, and the `<svg>` element itself."""

    title: str
    caption: str
    svg: str = field(repr=False)


def render_page(contents: ReportContents) -> str:
    """Return the page as HTML; the same contents give the same text."""
    line = contents.line
    skipped = max(0, len(line) - _LINE)
    return (
        environment()
        .get_template("report.jinja")
        .render(
            contents=contents,
            search=contents.search,
            figures=_figures(contents),
            splits=SCORED,
            line=line if not skipped else (line[0], *line[skipped + 1 :]),
            skipped=skipped,
            style=(FOLDER / "static" / "style.css").read_text(encoding="utf-8"),
        )
    )


def _figures(contents: ReportContents) -> dict[str, ReportFigure]:
    """Figures by section: `course`, `searched`; a section without one has no entry."""
    found: dict[str, ReportFigure] = {}
    winner, genome, full = contents.standings.winner, contents.genome, contents.full
    scored = {row.index: row.fitness for row in contents.history if row.fitness is not None}
    if scored:
        scale = SCALES[contents.scale]
        caption = f"Every individual's {scale.title} on the search split, in order of creation; the best has "
        caption += scale.phrase(max(scored.values()))
        caption += "." if full is None else f", the full model {scale.phrase(full)}."
        figure = fitness_figure(contents.history, full, contents.scale)
        found["course"] = _figure("course", "Fitness over the search", caption, figure)
    if genome is not None and (figures := figures_for(genome)).subject:
        figure, caption = figures.page(genome), figures.caption(genome)
        title = f"{figures.subject.capitalize()} of {winner}"
        found["searched"] = _figure("matrices", title, caption, figure)
    return found


def _figure(name: str, title: str, caption: str, figure: Figure) -> ReportFigure:
    return ReportFigure(title, caption, to_svg(figure, name, f"{title}. {caption}"))
