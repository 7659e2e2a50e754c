"""Pages for shrinking: a form that starts a shrink, and what becomes of a search's winner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal, get_args, get_origin
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.interface.request import default_of, fields_of, flag_of, one_line_errors, option_names
from moevolve.search.report.rendering import handle
from moevolve.search.server.dependencies import SearchPath, ServerDep, ServerState
from moevolve.search.server.pages.launching import started_searches
from moevolve.search.server.pages.rendering import render, render_part
from moevolve.search.server.shrinks import SHRINK_OPTIONS, RemoteShrinkRequest, ShrinkState, start_shrink, state_of
from moevolve.search.server.uploads import list_files
from moevolve.search.shrink.goal import AmountKind
from moevolve.search.shrink.request import ShrinkRequest
from moevolve.search.shrink.result import result_of
from moevolve.store.errors import NotFoundError
from moevolve.store.records import ExportRecord, SearchRecord
from moevolve.workers.export.servers import loads_in

# Parameters that are always shown.
_FIRST = ("repair", "time", "custom_code")
routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class TypedShrink(BaseModel):
    """Contents of the form as it is sent. Extra fields are further parameters of a shrink, empty for their defaults."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, str]
    name: str
    model: str = ""
    data: str | list[str] = []
    tasks: str | list[str] = []
    keep: AmountKind
    amount: str


@dataclass(frozen=True, slots=True)
class OptionField:
    """A form field for one parameter.

    Attributes:
        label: Its name as an option of the command, without dashes.
        hint: Its description, which names others like `label`.
        kind: Type of the field.
        choices: Values of a parameter that has few.
        example: Text of its default, or the form of its value; empty if there is neither.
    """

    name: str
    label: str
    hint: str
    kind: Literal["checkbox", "number", "text"]
    choices: tuple[str, ...]
    example: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An export of a search's winner, and the programs that load it; none if its folder isn't on this machine."""

    export: ExportRecord
    programs: tuple[str, ...]


@routes.get("/shrink")
def show_shrink(request: Request, server: ServerDep) -> HTMLResponse:
    """Return the form of a shrink."""
    settings = server.settings
    taken = {one.search.name for one in server.listings.summaries()} | {job.name for job in server.processes.jobs()}
    return render(
        request,
        "shrink.jinja",
        started=started_searches(server),
        ready=settings.exports is not None and bool(settings.models),
        name=next(name for name in (f"small-{number}" for number in count(1)) if name not in taken),
        models=sorted(settings.models),
        files=list_files(settings),
        upload_mb=None if settings.uploads is None else settings.upload_mb,
        tasks=list_tasks(),
        amounts=[_field(name) for name in get_args(AmountKind)],
        first=[_field(name) for name in _FIRST],
        further=[_field(name) for name in SHRINK_OPTIONS if name not in (*get_args(AmountKind), *_FIRST)],
    )


@routes.get("/shrink/files")
def show_files(request: Request, server: ServerDep) -> HTMLResponse:
    """Return the files that a shrink may name."""
    files = list_files(server.settings)
    return render_part(request, "shrink_files", "Files for", "a shrink", "/shrink", files=files)


@routes.post("/shrink")
async def take_form(server: ServerDep, typed: TypedShrink) -> HTMLResponse:
    """Start the shrink described by the form."""
    given: dict[str, object] = {name: text.strip() for name, text in typed.__pydantic_extra__.items() if text.strip()}
    given |= {"name": typed.name.strip(), "model": typed.model, typed.keep: typed.amount.strip()}
    given |= {"data": _listed(typed.data), "tasks": _listed(typed.tasks)}
    with one_line_errors():
        asked = RemoteShrinkRequest.model_validate(given)
    job = await start_shrink(asked, server)
    return HTMLResponse("", headers={"hx-redirect": f"/shrinks/{quote(job.name, '')}"})


@routes.get("/shrinks/{name}")
def show_state(request: Request, server: ServerDep, name: SearchPath) -> HTMLResponse:
    """Show a shrink's progress and results; the name may be that of one of its searches."""
    state = state_of(server, name)
    return render(request, "shrink_state.jinja", **shrink_context(server, state))


@routes.get("/searches/{search}/checkpoint")
def show_checkpoint(request: Request, server: ServerDep, search: SearchPath) -> HTMLResponse:
    """Return the exports of a search's winner, and the shrink that made the search."""
    record = server.store.search(search)
    here = f"/searches/{handle(record)}"
    context = checkpoint_context(server, record)
    return render_part(request, "checkpoint", "Checkpoint of", record.name, here, search=record, **context)


def shrink_context(server: ServerState, state: ShrinkState) -> dict[str, object]:
    """Return the variables of `shrink_part.jinja`."""
    record, stored = state.record, {one.search.name for one in server.listings.summaries()}
    # Its final table reads many rows. The record's own changes are no events of a search.
    read = None if record is None else partial(result_of, server.store, record)
    result = None if read is None else server.listings.cached(f"result of {record!r}", read)
    trials = [] if record is None else [(trial, trial.search in stored) for trial in record.sizes]
    searched = None if record is None or record.search not in stored else record.search
    return {"shrink": state, "result": result, "trials": trials, "searched": searched}


def checkpoint_context(server: ServerState, search: SearchRecord) -> dict[str, object]:
    """Return the variables of `checkpoint_part.jinja`."""
    found: dict[str, object] = {"shrink": None}
    with suppress(NotFoundError):
        found = shrink_context(server, state_of(server, search.name))
    return found | {"checkpoints": list(_checkpoints(server, search))}


def _checkpoints(server: ServerState, search: SearchRecord) -> Iterator[Checkpoint]:
    if search.winner is None:
        return
    for export in server.store.individual(f"{search.id}:{search.winner}").exports:
        programs: tuple[str, ...] = ()
        with suppress(UserError, OSError):  # the folder is on another machine, or gone
            programs = loads_in(Path(export.path), export.form)
        yield Checkpoint(export, programs)


def _listed(typed: str | list[str]) -> list[str]:
    return [typed] if isinstance(typed, str) else typed


def _field(name: str) -> OptionField:
    """Return the form field of a parameter of a shrink."""
    field = fields_of(ShrinkRequest)[name]
    kinds = get_args(field.annotation) or (field.annotation,)
    number = int in kinds or float in kinds
    default = default_of(field, None)
    return OptionField(
        name,
        option_names(name, field)[0].lstrip("-"),
        re.sub(r"`|--(?=[a-z])", "", field.description or "").replace("repeatable", "several with blanks between them"),
        "checkbox" if bool in kinds else "number" if number else "text",
        next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ()),
        str(default) if number and default is not None else flag_of(field).metavar or "",
    )
