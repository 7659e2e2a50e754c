"""The picture of a search: scores over evaluations, and the searched parameters of one individual."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.drawing import DPI, drawing
from moevolve.search.genomes.contract.base import Genome
from moevolve.search.genomes.registry import figures_for
from moevolve.search.genomes.repaired import base_genome
from moevolve.search.loop.final_table import build_final_table
from moevolve.search.loop.scores import full_fitness
from moevolve.search.operations.subject import find_subject, start_of
from moevolve.search.report.fitness import draw_fitness
from moevolve.search.requests.searches import PlotRequest
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualRecord

_WIDTH = 8.0
"""Width of the figure in inches, unless the genome needs more."""


def draw_search(
    form: str,
    title: str,
    history: Sequence[IndividualRecord],
    full: float | None,
    genome: Genome | None,
    genome_label: str = "",
    start: Genome | None = None,
) -> bytes:
    """Draw one figure: the fitness curve on top and the searched parameters of a genome below; either may be missing.

    Args:
        form: Format of the picture: png, svg, pdf.
        title: Title of the figure.
        history: All individuals of the search, in order.
        full: Fitness of the unedited model.
        genome, genome_label: Genome to draw, and its name in the figure.
        start: Genome that the search started from, if its kind has one.

    Raises:
        UserError: nothing was evaluated yet and there is no genome to draw.
    """
    above = any(row.fitness is not None for row in history)
    drawn = None if genome is None else base_genome(genome)
    if drawn is not None and not figures_for(drawn).has_figure(drawn, start):
        drawn = None
    if not above and drawn is None:
        raise UserError(f"{title}: no evaluated individual to plot yet")
    heights = [4.0] * above + [3.6] * (drawn is not None)
    width = _WIDTH if drawn is None else max(_WIDTH, figures_for(drawn).width(drawn))
    picture = BytesIO()
    with drawing(sum(heights), width) as figure:
        figure.suptitle(title)
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        if above:
            draw_fitness(parts[0].subplots(), history, full)
        if drawn is not None:
            figures_for(drawn).draw(parts[-1], drawn, start, genome_label)
        figure.savefig(picture, format=form, dpi=DPI)
    return picture.getvalue()


def picture(store: StoreReader, request: PlotRequest) -> bytes:
    """See `PlotRequest`.

    Raises:
        UserError: as `draw_search`, or the search was stored without the facts of its model.
        StoreError: there is no such search or individual.
    """
    record = store.search(request.search)
    history = store.history(record.id)
    config = parse_stored_config(record.config)
    imported = f"{record.name}:0" if config.is_imported else None
    reference = request.individual or imported or build_final_table(store, record, config, history).winner
    subject = None if reference is None else find_subject(store, reference, weights=False)
    genome, start = (None, None) if subject is None else (subject.genome, start_of(subject, history))
    return draw_search(request.form, record.name, history, full_fitness(store, record), genome, reference or "", start)
