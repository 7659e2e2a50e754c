"""The page that searches are launched from: run files, a form for each, and what became of what was started."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, ConfigDict, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import list_tasks
from moevolve.search.config.files import as_override, load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.report.contents import settings_text
from moevolve.search.report.rendering import handle
from moevolve.search.server.drivers import Launch
from moevolve.search.server.pages.listings import Listings, ListingsDep
from moevolve.search.server.pages.rendering import render
from moevolve.search.server.pages.views import Tone
from moevolve.search.server.planning import FREE, LaunchRequest, make_plan, request_like, resolve, status_of
from moevolve.search.server.service import Service, ServiceDep
from moevolve.store.errors import NotFoundError
from moevolve.store.records import SearchRecord

_LAUNCHES = 20
"""Lines of a page: of what was started last."""

NameQuery = Annotated[str, Query(max_length=200)]

_WORDS = re.compile(r"\s*(?P<key>[^=\s]+)\s*=\s*(?P<value>.*?)\s*")

routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class TypedLaunch(BaseModel):
    """What is typed into the form: beside what all forms have, a setting by its dotted path for each of its fields.

    Attributes:
        configuration: name of the run file that the form is of.
        name: of the search.
        model: name of a checkpoint that the server has; empty for the run file's.
        tasks: names of tasks; none for the run file's.
        further: lines `KEY = VALUE`.
        check: what the button that only checks sends; None where the search is to be launched.
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
    """A run file of the server's, and why it can't be launched if it has no settings."""

    name: str
    config: RunConfig | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Field:
    """A setting that the form has a field of its own for.

    Attributes:
        setting: its dotted path.
        label: for people.
        given: what the run file says.
        value: what the form begins with.
        hint: what there is to say of it.
        least: for whole numbers; None for others.
    """

    setting: str
    label: str
    given: str
    value: str
    hint: str = ""
    least: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A search that this server started, and its record once there is one."""

    launch: Launch
    search: SearchRecord | None

    @property
    def state(self) -> str:
        """What became of it, in a word or a few."""
        if self.launch.running:
            return "starting" if self.search is None else "runs"
        return "ended well" if self.launch.exit_code == 0 else f"failed with code {self.launch.exit_code}"

    @property
    def tone(self) -> Tone:
        """How the state is marked, beside its words."""
        if self.launch.running:
            return "live"
        return "good" if self.launch.exit_code == 0 else "bad"


@routes.get("/launch")
def show_launch(
    request: Request, service: ServiceDep, listings: ListingsDep, configuration: NameQuery = "", like: NameQuery = ""
) -> HTMLResponse:
    """The run files, or the form of one: that of a name, or that which gives the settings of a search."""
    started = _started(service, listings)
    record = service.store.search(like) if like else None
    asked = LaunchRequest(configuration=configuration) if configuration else None
    if record is not None:
        asked = request_like(record, service.settings)
    if asked is None:
        files = [_read(name, path) for name, path in sorted(service.settings.run_files().items())]
        return render(request, "launch.jinja", files=files, like=record, started=started)
    given = resolve(LaunchRequest(configuration=asked.configuration), service.settings).config
    taken = {one.search.name for one in listings.summaries()}
    fields = list(_fields(given, asked))
    own = {field.setting for field in fields}
    return render(
        request,
        "launch_form.jinja",
        started=started,
        asked=asked,
        like=record,
        given=given,
        settings=settings_text(given.canonical_json()),
        name=_free_name(given.name if record is None else record.name, taken),
        models=sorted(service.settings.models),
        tasks=list_tasks(),
        fields=fields,
        further=[f"{key} = {json.dumps(value)}" for key, value in asked.overrides.items() if key not in own],
        free=FREE,
        server=_address(request),
        changes=[as_override(key, value) for key, value in asked.overrides.items()],
    )


@routes.post("/launch")
def take_form(request: Request, service: ServiceDep, typed: TypedLaunch) -> HTMLResponse:
    """Launch what is typed into the form, or say what would be launched."""
    asked = _asked(typed, service)
    if typed.check is not None:
        return render(request, "launch_plan.jinja", plan=make_plan(asked, service))
    launching = resolve(asked, service.settings)
    status_of(service.store, launching.config)
    launch = service.drivers.start(launching.config.name, launching.arguments)
    return render(request, "launch_arrival.jinja", launch=launch)


@routes.get("/launch/arrival")
def show_arrival(request: Request, service: ServiceDep, name: NameQuery) -> HTMLResponse:
    """What becomes of a launch until there is a search, to whose page it leads then."""
    try:
        launch = service.drivers.launch(name)
    except KeyError:
        raise NotFoundError(f"this server started no search {name!r}") from None
    found = render(request, "launch_arrival.jinja", launch=launch)
    with suppress(NotFoundError):
        found.headers["hx-redirect"] = f"/searches/{handle(service.store.search(name))}"
    return found


@routes.get("/launch/started")
def show_started(request: Request, service: ServiceDep, listings: ListingsDep) -> HTMLResponse:
    """What was started from here."""
    return render(request, "started.jinja", started=_started(service, listings))


def _read(name: str, path: Path) -> RunFile:
    try:
        return RunFile(name, load_run_config(path))
    except UserError as error:
        return RunFile(name, None, str(error).removeprefix(f"{path}: "))


def _fields(given: RunConfig, asked: LaunchRequest) -> Iterator[Field]:
    """The settings that most launches change, with what is asked of them or what the run file says."""

    def field(setting: str, label: str, given: object, hint: str = "", least: int | None = None) -> Field:
        return Field(setting, label, str(given), str(asked.overrides.get(setting, given)), hint, least)

    experts = getattr(given.genome, "experts", None)
    if experts is not None:
        yield field("genome.experts", "experts", experts, "per layer", 1)
    yield field("seed", "seed", given.seed, "of all randomness", 0)
    yield field("workers.count", "workers", given.workers.count, "a number, or auto")
    yield field("workers.priority", "priority", given.workers.priority, "over others on the cluster", -1000)


def _asked(typed: TypedLaunch, service: Service) -> LaunchRequest:
    """What a form asks for: of the settings that it has fields for, those that differ from the run file's.

    Raises:
        NotFoundError, UserError: the server has no such run file, or a line isn't one of a setting.
        RequestValidationError: a value is none.
    """
    unchanged = LaunchRequest(configuration=typed.configuration)
    fields = list(_fields(resolve(unchanged, service.settings).config, unchanged))
    values = {field.setting: str((typed.model_extra or {}).get(field.setting, field.given)).strip() for field in fields}
    given = {field.setting: field.given for field in fields}
    overrides = {key: _plain(value) for key, value in values.items() if value != given[key]}
    tasks = [typed.tasks] if isinstance(typed.tasks, str) else typed.tasks
    asked = {"name": typed.name.strip(), "model": typed.model or None, "tasks": tasks or None}
    try:
        return LaunchRequest.model_validate(
            asked | {"configuration": typed.configuration, "overrides": overrides | dict(_further(typed.further))}
        )
    except ValidationError as error:
        raise RequestValidationError(
            [dict(each) | {"loc": ("body", *each["loc"])} for each in error.errors()]
        ) from None


def _further(text: str) -> Iterator[tuple[str, object]]:
    """Settings and their values, a line each.

    Raises:
        UserError: a line is none of them.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        found = _WORDS.fullmatch(line)
        if found is None:
            raise UserError(f"further settings, line {number}: expected KEY = VALUE, for example genome.experts = 4")
        key, value = found["key"], _plain(found["value"])
        if found["value"].startswith(("[", "{")):
            raise UserError(
                f"further settings, line {number}: lists and mappings are set entry by entry, for example {key}.0 = ..."
            )
        yield key, value


def _plain(text: str) -> object:
    """A number, a truth value, nothing or a quoted text where it is written as one; any other text as it is."""
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def _started(service: Service, listings: Listings) -> list[Started]:
    """Searches that this server started, the latest first."""
    launches = [launch for launch in service.drivers.launches() if launch.command != "export"][: -_LAUNCHES - 1 : -1]
    known = {one.search.name: one.search for one in listings.summaries()} if launches else {}
    return [Started(launch, known.get(launch.name)) for launch in launches]


def _free_name(name: str, taken: Collection[str]) -> str:
    """The name, or it with the first number that makes it one of no search."""
    if name not in taken:
        return name
    return next(other for number in count(2) if (other := f"{name}-{number}") not in taken)


def _address(request: Request) -> str:
    """The server, as the browser calls it."""
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else request.url.scheme
    return f"{scheme}://{request.url.netloc}"
