"""The page of one individual: what `moevolve show` says, what was searched, and where it comes from.

Figures are documents of their own, which pages show as images: drawn when they are looked at, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from moevolve.evaluators.errors import UserError
from moevolve.search.figures.lineage import lineage_figure, main_line
from moevolve.search.figures.style import to_svg
from moevolve.search.genomes.contract.base import Genome
from moevolve.search.genomes.registry import figures_for, part_counts, part_names
from moevolve.search.genomes.repaired import base_genome
from moevolve.search.loop.final_table import score_of
from moevolve.search.operations.subject import Subject, find_subject, start_of
from moevolve.search.server.api.parameters import RefPath
from moevolve.search.server.drivers import Launch
from moevolve.search.server.guard import DOCUMENT_POLICY
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.service import Service, ServiceDep
from moevolve.search.settings.phases import START
from moevolve.store.errors import NotFoundError
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualDetail, IndividualRecord, LineageGraph

if TYPE_CHECKING:
    from moevolve.search.figures.style import Figure

_CHILDREN, _LINE = 25, 40
"""Rows of tables: of children, and of the main line."""
_COLOURS = (
    "<style>svg { color: #16191d; --figure-blue: #0072b2; } @media (prefers-color-scheme: dark) "
    "{ svg { color: #e7eaee; --figure-blue: #56b4e9; } }</style>"
)

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@routes.get("/individuals/{ref}")
def show_individual(request: Request, service: ServiceDep, ref: RefPath) -> HTMLResponse:
    """What it is and what it scored."""
    detail = service.store.individual(ref)
    return render(
        request,
        "individual.jinja",
        detail=detail,
        words=described(detail),
        scores=[(one, score_of(one)) for one in detail.evaluations],
        exports=service.settings.exports is not None,
        launch=_export(service, detail),
    )


@routes.get("/individuals/{ref}/exports")
def show_exports(request: Request, service: ServiceDep, ref: RefPath) -> HTMLResponse:
    """What was exported, and what became of the export that was last asked for from here."""
    detail = service.store.individual(ref)
    return render(request, "exports.jinja", detail=detail, launch=_export(service, detail))


@routes.get("/individuals/{ref}/genome")
def show_genome(request: Request, service: ServiceDep, ref: RefPath) -> HTMLResponse:
    """What was searched, as a picture and in numbers."""
    detail = service.store.individual(ref)
    caption, note, matrices = "", "", {}
    try:
        genome, start = _drawn(service.store, ref)
        figures = figures_for(genome)
        if figures.has_figure(genome, start):
            caption = figures.subject
        else:
            note = "There is nothing to draw of it."
        matrices = figures_for(base_genome(genome)).matrices(base_genome(genome))
    except (UserError, OSError) as error:
        note = f"It can't be drawn: {' '.join(str(error).split())}"
    return render(request, "genome.jinja", detail=detail, caption=caption, note=note, matrices=matrices)


@routes.get("/individuals/{ref}/genome.svg")
async def draw_genome(service: ServiceDep, ref: RefPath) -> Response:
    """The picture of what was searched."""
    return await service.drawings.run(_genome_picture, service.store, ref)


@routes.get("/individuals/{ref}/lineage")
def show_lineage(request: Request, service: ServiceDep, ref: RefPath) -> HTMLResponse:
    """Its main line and its children."""
    detail = service.store.individual(ref)
    graph = service.store.ancestors(ref)
    nodes = {node.index: node for node in graph.nodes}
    line = [nodes[index] for index in main_line(graph)]
    born = [node for node in service.store.descendants(ref, 1).nodes if node.index != graph.root]
    born.sort(key=lambda node: (-(node.fitness or 0.0), node.index))
    return render(
        request,
        "lineage.jinja",
        detail=detail,
        ancestors=len(graph.nodes) - 1,
        scored=_has_picture(graph),
        line=line[-_LINE:],
        skipped=max(0, len(line) - _LINE),
        children=born[:_CHILDREN],
        born=len(born),
    )


@routes.get("/individuals/{ref}/lineage.svg")
async def draw_lineage(service: ServiceDep, ref: RefPath) -> Response:
    """The picture of its ancestors."""
    return await service.drawings.run(_lineage_picture, service.store, ref)


def described(detail: IndividualDetail) -> dict[str, str]:
    """What a page says of an individual's make, in words."""
    kind, record = detail.search.genome_kind, detail.individual
    return {"parts": part_names([kind]), "counts": part_counts(kind, record.experts, record.active)}


def _export(service: Service, detail: IndividualDetail) -> Launch | None:
    """Of the individual, the last that this server was asked for."""
    try:
        return service.drivers.launch(detail.ref)
    except KeyError:
        return None


def _has_picture(graph: LineageGraph) -> bool:
    return bool(graph.edges) and any(node.fitness is not None for node in graph.nodes)


def _drawn(store: StoreReader, ref: str) -> tuple[Genome, Genome | None]:
    """An individual's genome, unrepaired, and that of its search's start.

    Raises:
        UserError, OSError: the model's config isn't there any more.
    """
    subject = find_subject(store, ref, weights=False)
    assert subject.genome is not None
    return base_genome(subject.genome), start_of(subject, _starts(store, subject))


def _starts(store: StoreReader, subject: Subject) -> list[IndividualRecord]:
    """The individual that the search's method starts from, if it has one: phases begin with what `init` names."""
    phases = subject.config.phases
    if not phases or START not in phases[0].named:
        return []
    try:
        return [store.individual(f"{subject.search.id}:{phases[0].named.index(START)}").individual]
    except NotFoundError:
        return []


def _genome_picture(store: StoreReader, ref: str) -> Response:
    genome, start = _drawn(store, ref)
    figures = figures_for(genome)
    if not figures.has_figure(genome, start):
        raise NotFoundError(f"there is nothing to draw of {ref}")
    return _svg_document(figures.page(genome, start)[0], f"{figures.subject} of {ref}")


def _lineage_picture(store: StoreReader, ref: str) -> Response:
    graph = store.ancestors(ref)
    if not _has_picture(graph):
        raise NotFoundError(f"{ref} has no ancestors to draw")
    return _svg_document(lineage_figure(graph, ref), f"{ref} and its {len(graph.nodes) - 1} ancestors by score")


def _svg_document(figure: Figure, description: str) -> Response:
    """A figure as a document that takes the colours of the reader's light or dark screen.

    Args:
        figure: to show.
        description: what is to be seen, for those who can't see it.
    """
    text = to_svg(figure, "figure", description)
    opening, rest = text.split(">", 1)
    return Response(
        f"{opening}>{_COLOURS}{rest}",
        media_type="image/svg+xml",
        headers={"content-security-policy": DOCUMENT_POLICY},
    )
