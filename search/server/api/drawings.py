"""What people look at: the course of a search as points, its picture, its report."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi.responses import HTMLResponse, Response

from moevolve.search.server.api.parameters import LimitQuery, SearchPath
from moevolve.search.server.courses import MOST_POINTS, Course
from moevolve.search.server.guard import DOCUMENT_POLICY
from moevolve.search.server.problems import READS
from moevolve.search.server.service import ServiceDep
from moevolve.store.reader import StoreReader

PictureForm = Literal["svg", "png", "pdf"]
IndividualQuery = Annotated[str | None, Query(max_length=220, description="Whose genome; default: the best's.")]
_PICTURES: dict[PictureForm, str] = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}
_HEADERS = {"content-security-policy": DOCUMENT_POLICY}

routes = APIRouter(tags=["drawings"], responses=READS)


@routes.get("/searches/{search}/course")
def read_course(
    service: ServiceDep,
    search: SearchPath,
    points: Annotated[int, Query(ge=1, le=MOST_POINTS, description="At most so many.")] = MOST_POINTS,
) -> Course:
    """Fitness over individuals, down-sampled."""
    return service.courses.course(service.store.search(search).id, points)


@routes.get("/searches/{search}/report", response_class=HTMLResponse)
async def read_report(service: ServiceDep, search: SearchPath, limit: LimitQuery = 5) -> HTMLResponse:
    """The page that `moevolve report` writes."""
    return HTMLResponse(await service.drawings.run(_report, service.store, search, limit), headers=_HEADERS)


@routes.get(
    "/searches/{search}/plot",
    response_class=Response,
    responses={200: {"content": {kind: {} for kind in _PICTURES.values()}, "description": "The picture."}},
)
async def draw(
    service: ServiceDep, search: SearchPath, form: PictureForm = "svg", individual: IndividualQuery = None
) -> Response:
    """The picture that `moevolve plot` draws."""
    picture = await service.drawings.run(_picture, service.store, search, form, individual)
    return Response(picture, media_type=_PICTURES[form], headers=_HEADERS)


def _report(store: StoreReader, search: str, limit: int) -> str:
    # Not sooner: it loads what draws.
    from moevolve.search.report.contents import gather
    from moevolve.search.report.page import render_page

    return render_page(gather(store, search, limit))


def _picture(store: StoreReader, search: str, form: PictureForm, individual: str | None) -> bytes:
    from moevolve.search.service.plot import plot_stored

    with TemporaryDirectory() as folder:
        path = Path(folder) / f"plot.{form}"
        plot_stored(store, search, path, individual)
        return path.read_bytes()
