"""Pages for launching searches: the run files, a form for each, and the searches started before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.files import load_run_config
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

_JOBS = 20
"""Number of started searches on a page, the latest."""
_LOG_LINES = 20
"""Number of lines of a log that are shown while its search starts."""
_SETTING = re.compile(r"\s*(?P<key>[^=\s]+)\s*=\s*(?P<value>.*?)\s*")

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class TypedLaunch(BaseModel):
    """Contents of the form as it is sent. Extra fields are settings, named by their dotted paths.

    Attributes:
        model, tasks: Names; empty for the run file's.
        further: Further settings as lines `KEY = VALUE`.
        check: Present if the form was sent by the button that only checks.
    """

    model_config = ConfigDict(extra="allow")
    configuration: str
    name: str = ""
    model: str = ""
    tasks: str | list[str] = []
    further: str = ""
    check: str | None = None


@dataclass(frozen=True, slots=True)
class RunFile:
    """One of the server's run files; one without a configuration can't be launched because of its fault."""

    name: str
    config: RunConfig | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class FormField:
    """A form field for one setting.

    Attributes:
        setting: Dotted path of the setting.
        given: Value in the run file.
        minimum: Smallest allowed value of an integer field; None for a field of another type.
    """

    setting: str
    label: str
    given: str
    hint: str = ""
    minimum: int | None = None


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
            return "starting" if self.is_arriving or self.job.asked else "running"
        if self.job.asked in ("stopped", "cancelled"):
            return "stopped"
        return "finished" if self.job.exit_code == 0 else "failed"

    @property
    def remark(self) -> str | None:
        """A line that explains the state; None if there is nothing to add."""
        if self.job.running:
            return {None: None, "paused": "pauses then"}.get(self.job.asked, "asked to end")
        return {"stopped": "while it started", "failed": f"with code {self.job.exit_code}"}.get(self.state)

    @property
    def tone(self) -> Tone:
        """CSS class of the state."""
        if self.job.running:
            return "live"
        if self.job.asked in ("stopped", "cancelled"):
            return "quiet"
        return "good" if self.job.exit_code == 0 else "bad"


@routes.get("/launch")
def show_launch(request: Request, server: ServerDep, configuration: NameQuery = "") -> HTMLResponse:
    """The list of run files, or the form of one."""
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
    names = chain([given.name], (f"{given.name}-{number}" for number in count(2)))
    return render(
        request,
        "launch_form.jinja",
        started=started,
        configuration=configuration,
        given=given,
        settings=settings_text(given.canonical_json()),
        name=next(name for name in names if name not in taken),
        models=sorted(server.settings.models),
        tasks=list_tasks(),
        fields=list(_fields(given)),
        settable=LAUNCH_SETTINGS,
    )


@routes.post("/launch")
async def take_form(request: Request, server: ServerDep, typed: TypedLaunch) -> HTMLResponse:
    """Launch the search described by the form, or show what would be launched."""
    asked = await run_in_threadpool(_asked, typed, server)
    if typed.check is not None:
        return render(request, "launch_plan.jinja", plan=await plan_launch(asked, server))
    job = await run_in_threadpool(start_launch, asked, server)
    return arrival_page(request, server, job.name, job)


@routes.get("/launch/arrival")
def show_arrival(request: Request, server: ServerDep, name: NameQuery) -> HTMLResponse:
    """State of a launch. Once its search is in the store, the browser is redirected to the search's page."""
    found = search_or_launch(server, name)
    if found is None or isinstance(found, Job):
        return arrival_page(request, server, name, found)
    page = f"/searches/{handle(found)}" if isinstance(found, SearchRecord) else f"/shrinks/{quote(found.name, '')}"
    return HTMLResponse("", headers={"hx-redirect": page})


@routes.get("/launch/started")
def show_started(request: Request, server: ServerDep) -> HTMLResponse:
    """Searches that this server started."""
    return render(request, "started.jinja", started=started_searches(server))


def arrival_page(request: Request, server: ServerState, name: str, job: Job | None) -> HTMLResponse:
    """Render the state of a process that starts a search, until the search is in the store.

    A job of None was started by an earlier server, and possibly still runs.
    """
    lines = server.processes.log(name).splitlines()[-_LOG_LINES:]
    return render(request, "launch_arrival.jinja", name=name, job=job, log="\n".join(lines))


def search_or_launch(server: ServerState, name: str) -> SearchRecord | ShrinkState | Job | None:
    """Return the search of a name, or before that is stored, the shrink or the process that starts it.

    None stands for a process that an earlier server started, and that possibly still runs.

    Raises:
        NotFoundError: There is none of these.
    """
    try:
        return server.store.search(name)
    except NotFoundError:
        with suppress(NotFoundError):
            return state_of(server, name)
        if server.processes.knows(name):
            return server.processes.job(name)
        if not server.processes.log(name):
            raise
        return None


def _fields(given: RunConfig) -> Iterator[FormField]:
    """Fields for the settings that most launches change."""
    experts = getattr(given.genome, "experts", None)
    if experts is not None:
        yield FormField("genome.experts", "experts", str(experts), "per layer", 1)
    yield FormField("seed", "seed", str(given.seed), "of all randomness", 0)
    yield FormField("workers.count", "workers", str(given.workers.count), "a number, or auto")


def _asked(typed: TypedLaunch, server: ServerState) -> RemoteLaunchRequest:
    """The launch request in a form, with the settings that differ from the run file's.

    Raises:
        NotFoundError: the server has no such run file.
        UserError: a line of the further settings is malformed, or a value isn't valid.
    """
    config, _ = resolve(RemoteLaunchRequest(configuration=typed.configuration), server.settings)
    overrides = {}
    for field in _fields(config):
        value = str((typed.model_extra or {}).get(field.setting, field.given)).strip()
        if value != field.given:
            overrides[field.setting] = _plain(value)
    tasks = [typed.tasks] if isinstance(typed.tasks, str) else typed.tasks
    with one_line_errors():
        return RemoteLaunchRequest.model_validate(
            {
                "configuration": typed.configuration,
                "name": typed.name.strip(),
                "model": typed.model or None,
                "tasks": tasks or None,
                "overrides": overrides | dict(_further(typed.further)),
            }
        )


def _further(text: str) -> Iterator[tuple[str, object]]:
    """Parse settings and their values from lines `KEY = VALUE`.

    Raises:
        UserError: a line has another form.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        found = _SETTING.fullmatch(line)
        if found is None:
            raise UserError(f"further settings, line {number}: expected KEY = VALUE, for example genome.experts = 4")
        key, value = found["key"], _plain(found["value"])
        if found["value"].startswith(("[", "{")):
            raise UserError(
                f"further settings, line {number}: lists and mappings are set entry by entry, for example {key}.0 = ..."
            )
        yield key, value


def _plain(text: str) -> object:
    """The value of a JSON number, boolean, null or string; any other text unchanged."""
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def started_searches(server: ServerState) -> list[StartedSearch]:
    """Searches that this server started, the latest first."""
    jobs = [job for job in server.processes.jobs() if job.command != "export"][: -_JOBS - 1 : -1]
    known = {one.search.name: one.search for one in server.listings.summaries()} if jobs else {}
    return [StartedSearch(job, known.get(job.name)) for job in jobs]
