"""Starting things on the server's machine: searches, going on with them, exports. All of it by names it knows."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from moevolve.evaluators.errors import UserError
from moevolve.search.requests.parameters import ExportForm, ModelDevice, ModelDtype
from moevolve.search.running.steer import unpaused
from moevolve.search.server.api.parameters import RefPath, SearchPath
from moevolve.search.server.drivers import Launch
from moevolve.search.server.planning import LaunchRequest, Plan, make_plan, resolve, status_of
from moevolve.search.server.problems import WRITES
from moevolve.search.server.service import ServiceDep


class ExportRequest(BaseModel):
    """How to export: without `form`, as `stock` where that is exact; without `device` or `dtype`, as the search ran."""

    model_config = ConfigDict(extra="forbid")
    form: ExportForm = None
    device: ModelDevice = None
    dtype: ModelDtype = None


routes = APIRouter(tags=["launching"], responses=WRITES)


@routes.get("/configurations")
def list_configurations(service: ServiceDep) -> list[str]:
    """Names of run files that can be launched."""
    return sorted(service.settings.run_files())


@routes.get("/models")
def list_models(service: ServiceDep) -> list[str]:
    """Names of checkpoints that a launch may have in place of its run file's."""
    return sorted(service.settings.models)


@routes.get("/launches")
def list_launches(service: ServiceDep) -> list[Launch]:
    """What was started since the server was, and what became of it."""
    return service.drivers.launches()


@routes.post("/searches", status_code=HTTPStatus.ACCEPTED)
def launch(service: ServiceDep, asked: LaunchRequest) -> Launch:
    """Launch a search on the server's machine. Asking for the same again starts nothing new."""
    launching = resolve(asked, service.settings)
    status_of(service.store, launching.config)
    return service.drivers.start(launching.config.name, launching.arguments)


@routes.post("/searches/check")
def check(service: ServiceDep, asked: LaunchRequest) -> Plan:
    """What would be launched, and what that takes; starts nothing and loads no weights."""
    return make_plan(asked, service)


@routes.post("/searches/{search}/resume", status_code=HTTPStatus.ACCEPTED)
def resume(service: ServiceDep, search: SearchPath) -> Launch | None:
    """Let a paused search go on where it runs (null), or continue one that nobody runs, here."""
    record = service.store.search(search)
    if unpaused(service.writer, record.id):
        return None
    if record.status in ("finished", "cancelled"):
        raise UserError(f"search {record.name} is {record.status}")
    address = [] if service.settings.address is None else ["--address", service.settings.address]
    return service.drivers.start(record.name, ["resume", record.name, *address])


@routes.post("/individuals/{ref}/export", status_code=HTTPStatus.ACCEPTED)
def export(service: ServiceDep, ref: RefPath, asked: ExportRequest) -> Launch:
    """Write an individual as a checkpoint into the server's folder for exports."""
    if service.settings.exports is None:
        raise UserError("this server has no folder for exports; see `exports` in its settings")
    found = service.store.individual(ref)
    target = service.settings.exports.resolve() / found.ref.replace(":", "-")
    given = asked.model_dump(exclude_none=True).items()
    options = [word for name, value in given for word in (f"--{name}", value)]
    return service.drivers.start(found.ref, ["export", found.ref, str(target), *options])
