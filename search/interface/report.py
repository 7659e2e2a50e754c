"""What shows a search: its picture, and the page about it, as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.scales import ScaleName
from moevolve.evaluators.text_files import writing_into
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.drawing import check_format, drawing, save
from moevolve.search.genomes.contract.base import Genome
from moevolve.search.genomes.registry import figures_for
from moevolve.search.genomes.repaired import base_genome
from moevolve.search.interface.parameters import SearchRef
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.final_table import FinalTable, build_final_table
from moevolve.search.loop.scores import full_fitness
from moevolve.search.report.fitness import draw_fitness
from moevolve.search.running.candidates import find_candidate
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualRecord

if TYPE_CHECKING:
    from moevolve.search.drawing import Figure

# Width of the figure in inches.
_WIDTH = 8.0


@record
class PlotRequest(Request):
    """Draw a search: scores over evaluations, and the searched parameters of one individual (matrices, masks ...).

    Raises:
        UserError: the search has nothing to draw yet, or the file can't be written.
        StoreError: the store, search or individual doesn't exist.
    """

    search: SearchRef
    path: Annotated[Path, about("Picture to write (.png, .svg, .pdf)."), Flag("-o --output")]
    _: KW_ONLY
    individual: Annotated[
        str | None, about("Draw this individual's genome instead of the best one's.", max_length=LONGEST_NAME + 20)
    ] = None

    def answer(self, store: StoreReader) -> None:
        check_format(self.path)
        search = store.search(self.search)
        history = store.history(search.id)
        config = parse_stored_config(search.config, search.name)
        imported = f"{search.name}:0" if config.is_imported else None
        reference = self.individual or imported or build_final_table(store, search, config, history).winner
        genome = None if reference is None else find_candidate(store, reference, weights=False).genome
        full = full_fitness(store, search)
        scale = store.scales(search.id).fitness
        picture = draw_search(search.name, history, full, genome, reference or "", scale)
        with writing_into(self.path.parent):
            save(picture, self.path)


def draw_search(
    title: str,
    history: Sequence[IndividualRecord],
    full: float | None,
    genome: Genome | None,
    genome_label: str = "",
    scale: ScaleName = "percent",
) -> Figure:
    """Draw one figure: the fitness curve on top and the searched parameters of a genome below; either may be missing.

    Args:
        title: Title of the figure.
        history: All individuals of the search, in order.
        full: Fitness of the unedited model.
        genome, genome_label: Genome to draw, and its name in the figure.
        scale: Scale that fitness is shown on.

    Raises:
        UserError: nothing was evaluated yet and no genome can be drawn.
    """
    above = any(row.fitness is not None for row in history)
    drawn = None if genome is None else base_genome(genome)
    drawn = None if drawn is None or not figures_for(drawn).subject else drawn
    if not above and drawn is None:
        raise UserError(f"{title}: no evaluated individual to plot yet")
    heights = [4.0] * above + ([] if drawn is None else [0.4 + figures_for(drawn).height(drawn)])
    with drawing(sum(heights), _WIDTH) as figure:
        figure.suptitle(title)
        parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        if above:
            draw_fitness(parts[0].subplots(), history, full, scale)
        if drawn is not None:
            parts[-1].suptitle(f"{figures_for(drawn).subject} of {genome_label}", fontsize="medium")
            figures_for(drawn).draw(parts[-1], drawn)
        return figure


@record
class ReportRequest(Request):
    """Write a page about a search: scores, figures, lineage, cost, how to repeat it. Nothing is evaluated.

    The answer is the final table as the page has it.

    Raises:
        UserError: the file can't be written.
        StoreError: the store or search doesn't exist.
    """

    search: SearchRef
    path: Annotated[Path, about("HTML file to write."), Flag("-o --output", "FILE")]

    def answer(self, store: StoreReader) -> FinalTable:
        from moevolve.search.report.contents import gather
        from moevolve.search.report.page import render_page

        contents = gather(store, self.search)
        with writing_into(self.path.parent):
            self.path.write_text(render_page(contents), encoding="utf-8")
        return contents.standings
