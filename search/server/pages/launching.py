"""Pages for launching searches: the run files, a form for each, and the searches started before."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.files import load_run_config, settings_of
from moevolve.search.config.run import RunConfig
from moevolve.search.interface.request import one_line_errors
from moevolve.search.report.contents import settings_text
from moevolve.search.report.rendering import handle
from moevolve.search.server.dependencies import NameQuery, ServerDep, ServerState
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.pages.views import Tone
from moevolve.search.server.planning import (
    LAUNCH_SETTINGS,
    RemoteLaunchRequest,
    plan_launch,
    resolve,
    start_launch,
)
from moevolve.search.server.processes import Job
from moevolve.search.server.shrinks import ShrinkState, state_of
from moevolve.store.errors import NotFoundError
from moevolve.store.records import SearchRecord

# Number of started searches on a page, the latest.
_JOBS = 20
# Number of lines of a log that are shown while its search starts.
_LOG_LINES = 20

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class TypedLaunch(BaseModel):
    """Contents of the form as it is sent.

    Attributes:
        model, tasks: Names; empty for the run file's.
        settings: Changed settings as lines `KEY=VALUE`.
        check: Present if the form was sent by the button that only checks.
    """

    configuration: str
    name: str = ""
    model: str = ""
    tasks: str | list[str] = []
    settings: str = ""
    check: str | None = None


@dataclass(frozen=True, slots=True)
class RunFile:
    """One of the server's run files; one without a configuration can't be launched because of its fault."""

    name: str
    config: RunConfig | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class StartedSearch:
    """A search or a shrink that this server started, and the search's record once there is one."""

    job: Job
    search: SearchRecord | None

    @property
    def is_arriving(self) -> bool:
        """Whether its process runs, and hasn't recorded a search yet."""
        return self.job.running and self.search is None

    @property
    def state(self) -> str:
        """The state in one word."""
        if self.job.running:
            return "starting" if self.is_arriving else "running"
        if self.job.stopped:
            return "stopped"
        return "finished" if self.job.exit_code == 0 else "failed"

    @property
    def remark(self) -> str | None:
        """A line that explains the state; None if the state says all."""
        if self.job.running:
            return "asked to end" if self.job.stopped else None
        return {"stopped": "while it started", "failed": f"with code {self.job.exit_code}"}.get(self.state)

    @property
    def tone(self) -> Tone:
        """CSS class of the state."""
        if self.job.running:
            return "live"
        if self.job.stopped:
            return "quiet"
        return "good" if self.job.exit_code == 0 else "bad"


@routes.get("/launch")
def show_launch(request: Request, server: ServerDep, configuration: NameQuery = "") -> HTMLResponse:
    """Return the list of run files, or the form of one."""
    started = started_searches(server)
    if not configuration:
        files = []
        for name, path in sorted(server.settings.run_files().items()):
            try:
                files.append(RunFile(name, load_run_config(path)))
            except UserError as error:
                files.append(RunFile(name, None, str(error).removeprefix(f"{path}: ")))
        return render(request, "launch.jinja", files=files, started=started)
    given, _ = resolve(RemoteLaunchRequest(configuration=configuration), server.settings)
    taken = {one.search.name for one in server.listings.summaries()}
    settings = {"genome.experts": getattr(given.genome, "experts", None), "seed": given.seed}
    settings["workers.count"] = given.workers.count
    names = chain([given.name], (f"{given.name}-{number}" for number in count(2)))
    return render(
        request,
        "launch_form.jinja",
        started=started,
        configuration=configuration,
        given=given,
        settings=settings_text(given.canonical_json(), given.name),
        lines=[f"{key}={value}" for key, value in settings.items() if value is not None],
        name=next(name for name in names if name not in taken),
        models=sorted(server.settings.models),
        tasks=list_tasks(),
        settable=LAUNCH_SETTINGS,
    )


@routes.post("/launch")
async def take_form(request: Request, server: ServerDep, typed: TypedLaunch) -> HTMLResponse:
    """Launch the search described by the form, or show what would be launched."""
    asked = _asked(typed)
    if typed.check is not None:
        return render(request, "launch_plan.jinja", plan=await plan_launch(asked, server))
    job = await run_in_threadpool(start_launch, asked, server)
    return arrival_page(request, server, job)


@routes.get("/launch/arrival")
def show_arrival(request: Request, server: ServerDep, name: NameQuery) -> HTMLResponse:
    """Return the state of a launch. Once its search is in the store, the browser is redirected to the search's page."""
    found = search_or_launch(server, name)
    if isinstance(found, Job):
        return arrival_page(request, server, found)
    page = f"/searches/{handle(found)}" if isinstance(found, SearchRecord) else f"/shrinks/{quote(found.name, '')}"
    return HTMLResponse("", headers={"hx-redirect": page})


@routes.get("/launch/started")
def show_started(request: Request, server: ServerDep) -> HTMLResponse:
    """Return the searches that this server started."""
    return render(request, "started.jinja", started=started_searches(server))


def arrival_page(request: Request, server: ServerState, job: Job) -> HTMLResponse:
    """Render the state of a process that starts a search, until the search is in the store."""
    lines = server.processes.log(job.name).splitlines()[-_LOG_LINES:]
    return render(request, "launch_arrival.jinja", job=job, log="\n".join(lines))


def search_or_launch(server: ServerState, name: str) -> SearchRecord | ShrinkState | Job:
    """Return the search of a name, or before that is stored, the shrink or the process of this server that starts it.

    Raises:
        NotFoundError: There is none of these.
    """
    try:
        return server.store.search(name)
    except NotFoundError:
        with suppress(NotFoundError):
            return state_of(server, name)
        if not server.processes.knows(name):
            raise
        return server.processes.job(name)


def _asked(typed: TypedLaunch) -> RemoteLaunchRequest:
    """The launch request in a form; a `UserError` says which setting is malformed, or which value isn't valid."""
    lines = ["=".join(map(str.strip, line.split("=", 1))) for line in typed.settings.splitlines()]
    with one_line_errors():
        return RemoteLaunchRequest.model_validate(
            {
                "configuration": typed.configuration,
                "name": typed.name.strip(),
                "model": typed.model or None,
                "tasks": ([typed.tasks] if isinstance(typed.tasks, str) else typed.tasks) or None,
                "overrides": settings_of([line for line in lines if line and not line.startswith("#")]),
            }
        )


def started_searches(server: ServerState) -> list[StartedSearch]:
    """Return the searches that this server started, the latest first."""
    jobs = [job for job in server.processes.jobs() if job.command != "export"][: -_JOBS - 1 : -1]
    known = {one.search.name: one.search for one in server.listings.summaries()} if jobs else {}
    return [StartedSearch(job, known.get(job.name)) for job in jobs]
