"""The page of one individual: scores, genome, lineage and exports.

Figures are documents of their own that pages show as images, so that they are drawn only when somebody looks at them.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import Genome
from moevolve.search.genomes.contract.outline import GenomeOutline, outline_rows
from moevolve.search.genomes.registry import figures_for, outline_of, stored_section
from moevolve.search.genomes.repaired import base_genome
from moevolve.search.loop.scores import score_of
from moevolve.search.report.rendering import handle
from moevolve.search.running.candidates import find_candidate
from moevolve.search.server.dependencies import RefPath, ServerDep, ServerState
from moevolve.search.server.pages.rendering import render, render_part, svg_document
from moevolve.search.server.processes import Job
from moevolve.store.errors import NotFoundError
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualDetail

# Rows of the tables of children and of the main line of ancestors.
_CHILDREN, _LINE = 25, 40

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/individuals/{ref}")
def show_individual(request: Request, server: ServerDep, ref: RefPath) -> HTMLResponse:
    """Return one individual and its scores."""
    detail = server.store.individual(ref)
    section = stored_section(detail.search.genome_kind)
    return render(
        request,
        "individual.jinja",
        detail=detail,
        here=_path(detail),
        parts=section.parts,
        counts=section.count_format.format(experts=detail.individual.experts, active=detail.individual.active),
        scores=[(one, score_of(one)) for one in detail.evaluations],
        exports=server.settings.exports is not None,
        job=_export_job(server, detail),
    )


@routes.get("/individuals/{ref}/exports")
def show_exports(request: Request, server: ServerDep, ref: RefPath) -> HTMLResponse:
    """Exports of an individual, and the state of the latest export started from here."""
    # The process first: what it has written is stored by the time it has ended.
    job = _export_job(server, server.store.individual(ref))
    return _part(request, server.store.individual(ref), "exports", "Exports of", job=job)


@routes.get("/individuals/{ref}/genome")
def show_genome(request: Request, server: ServerDep, ref: RefPath) -> HTMLResponse:
    """Return the genome as a figure and as tables."""
    detail = server.store.individual(ref)
    caption, note, outline = "", "", GenomeOutline(())
    try:
        genome = _genome(server.store, ref)
        outline, caption = outline_of(genome), figures_for(base_genome(genome)).subject
    except UserError as error:
        note = f"It can't be drawn: {' '.join(str(error).split())}"
    shown = {"caption": caption, "note": note, "outline": outline}
    return _part(request, detail, "genome", "Genome of", rows=outline_rows(outline), **shown)


@routes.get("/individuals/{ref}/genome.svg")
async def draw_genome(server: ServerDep, ref: RefPath) -> Response:
    """Return the figure of a genome."""

    def draw() -> Response:
        genome = base_genome(_genome(server.store, ref))
        figures = figures_for(genome)
        if not figures.subject:
            raise NotFoundError(f"{ref} has nothing to draw")
        return svg_document(figures.page(genome), f"{figures.subject} of {ref}")

    return await server.drawings.run(draw)


@routes.get("/individuals/{ref}/lineage")
def show_lineage(request: Request, server: ServerDep, ref: RefPath) -> HTMLResponse:
    """Return the main line of ancestors, and the children."""
    detail = server.store.individual(ref)
    graph = server.store.ancestors(ref)
    line = graph.main_line
    born = sorted(server.store.children(ref), key=lambda node: (-(node.fitness or 0.0), node.index))
    return _part(
        request,
        detail,
        "lineage",
        "Lineage of",
        ancestors=len(graph.nodes) - 1,
        line=line[-_LINE:],
        scale=graph.scale,
        skipped=max(0, len(line) - _LINE),
        children=born[:_CHILDREN],
        born=len(born),
    )


def _path(detail: IndividualDetail) -> str:
    return f"/individuals/{handle(detail.search)}:{detail.individual.index}"


def _part(request: Request, detail: IndividualDetail, name: str, what: str, **context: object) -> HTMLResponse:
    """Return a part of the page of an individual as a page of its own."""
    return render_part(request, name, what, detail.ref, _path(detail), detail=detail, **context)


def _export_job(server: ServerState, detail: IndividualDetail) -> Job | None:
    try:
        return server.processes.job(detail.ref)
    except KeyError:
        return None


def _genome(store: StoreReader, ref: str) -> Genome:
    """Return the genome of an individual.

    Raises:
        UserError: the search was stored without the facts of its model.
    """
    genome = find_candidate(store, ref, weights=False).genome
    assert genome is not None
    return genome
