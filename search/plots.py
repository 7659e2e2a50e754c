"""One picture of a search: score over evaluations, and the matrices of an EEP genome as heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.figures.course import draw_course
from moevolve.search.figures.matrices import draw_eep_matrices, spread
from moevolve.search.figures.style import check_format, drawing
from moevolve.search.genomes.eep_genome import EepGenome
from moevolve.store.records import HistoryRow

_MAX_GROUPS = 8


def plot_search(
    path: Path,
    title: str,
    history: Sequence[HistoryRow],
    full: float | None,
    genome: EepGenome | None,
    genome_label: str = "",
) -> None:
    """Write one figure: the course of the search on top, the matrices of `genome` below.

    Args:
        path: image file; its suffix chooses the format (png, svg, pdf).
        title: above the figure.
        history: the search's individuals in order.
        full: fitness of the unedited model, drawn as a line.
        genome: individual whose matrices are drawn; None leaves them out.
        genome_label: how to name it.

    Raises:
        UserError: nothing was evaluated yet, the suffix names no known format, or the file can't be written.
    """
    if not any(row.fitness is not None for row in history):
        raise UserError(f"{title}: no evaluated individual to plot yet")
    columns = 0 if genome is None else len(spread(genome.space.groups, _MAX_GROUPS))
    with drawing(4.0 + 3.6 * bool(columns), max(8.0, 2.0 * columns)) as figure:
        check_format(figure, path)
        figure.suptitle(title)
        heights = [4.0, 3.6] if columns else [4.0]
        course, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        draw_course(course.subplots(), history, full)
        if genome is not None:
            draw_eep_matrices(below[0], genome, genome_label)
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise UserError(f"{path}: can't be written: {error.strerror or error}") from error
