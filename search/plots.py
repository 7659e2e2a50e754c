"""One picture of a search: score over evaluations, and what was searched of one individual."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.figures.course import draw_course
from moevolve.search.figures.dense import draw_dense, draws
from moevolve.search.figures.matrices import draw_eep_matrices, spread
from moevolve.search.figures.style import check_format, drawing
from moevolve.search.genomes.base import Genome
from moevolve.search.genomes.eep_genome import EepGenome
from moevolve.store.records import HistoryRow

_MAX_GROUPS = 8


def plot_search(
    path: Path,
    title: str,
    history: Sequence[HistoryRow],
    full: float | None,
    genome: Genome | None,
    genome_label: str = "",
    start: Genome | None = None,
) -> None:
    """Write one figure: the course of the search on top, what was searched of `genome` below.

    Args:
        path: image file; its suffix chooses the format (png, svg, pdf).
        title: above the figure.
        history: the search's individuals in order.
        full: fitness of the unedited model, drawn as a line.
        genome: individual of which it is drawn; None leaves it out.
        genome_label: how to name it.
        start: the genome that the search started from, if its kind has one.

    Raises:
        UserError: nothing was evaluated yet, the suffix names no known format, or the file can't be written.
    """
    if not any(row.fitness is not None for row in history):
        raise UserError(f"{title}: no evaluated individual to plot yet")
    columns = len(spread(genome.space.groups, _MAX_GROUPS)) if isinstance(genome, EepGenome) else 0
    below_too = genome is not None and (columns > 0 or draws(genome, start))
    with drawing(4.0 + 3.6 * below_too, max(8.0, 2.0 * columns)) as figure:
        check_format(figure, path)
        figure.suptitle(title)
        heights = [4.0, 3.6] if below_too else [4.0]
        course, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        draw_course(course.subplots(), history, full)
        if isinstance(genome, EepGenome):
            draw_eep_matrices(below[0], genome, genome_label)
        elif genome is not None and below_too:
            draw_dense(below[0], genome, start, genome_label)
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise UserError(f"{path}: can't be written: {error.strerror or error}") from error
