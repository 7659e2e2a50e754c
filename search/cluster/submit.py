"""Sending a search's driver to a cluster, and reading what it writes there."""

from __future__ import annotations

import hashlib
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.cluster.ray_jobs import LIMIT_BYTES, Job, JobServer, Label, is_loopback
from moevolve.search.cluster.shipping import RUN, pack
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord
from moevolve.store.session import without_password

_FILE = "sqlite:///"
_CONNECT_S = 5
_LAUNCH = ("python", "-m", "moevolve.search.cli", "launch")


@dataclass(frozen=True, slots=True)
class Submitted:
    """A search whose driver runs, or will run, on a cluster.

    Attributes:
        id: of the search, and of its first job there.
        name: of the search.
        cluster: where it was sent.
        job: that runs it; None if none is needed.
        new: whether this call sent it.
        status: of the search, as the store has it; None if it isn't there yet, or the store isn't reached from here.
    """

    id: str
    name: str
    cluster: str
    job: str | None
    new: bool
    status: str | None


def submit(
    config: RunConfig, cluster: str, search_id: str | None, insecure: bool = False, shared_paths: bool = False
) -> Submitted:
    """Send a search to a cluster, where it is launched; or resumed, if it stopped there before it came to its end.

    It may be repeated: a search that is in the store or on the cluster already is not sent again. The store tells what
    became of a search, Ray only whether a driver has been sent that isn't in the store yet.

    Args:
        config: what to search.
        cluster: URL of its job server.
        search_id: of the search; None makes one of the configuration and its name.
        insecure: as `JobServer` has it.
        shared_paths: as `pack` has it.

    Raises:
        UserError: another search has the id or the name, the store or a path isn't for a cluster, or the cluster can't
            be had.
    """
    server = JobServer(cluster, insecure)
    config = config.model_copy(update={"store": _reachable(config.store, server.url)})
    label = Label(search_id or _made_id(config), config.name, config.config_hash)
    status, needed = _recorded(config, label)
    jobs = server.jobs(label.search)
    for job in jobs:
        _same(job, label)
    alive = next((job for job in jobs if not job.ended), None)
    if alive is not None or not needed:
        return Submitted(label.search, label.name, server.url, alive.id if alive else None, False, status)
    job_id = label.search if not jobs else f"{label.search}-{len(jobs) + 1}"
    # A shell that stayed in between would keep Ray's SIGTERM to itself; the store is the configuration's.
    command = ["exec", "env", "-u", "MOEVOLVE_STORE", "-u", "MOEVOLVE_SERVER", *_LAUNCH, RUN, "--id", label.search]
    with tempfile.TemporaryDirectory(prefix="moevolve-") as folder:
        shipment = pack(config, Path(folder), shared_paths, LIMIT_BYTES)
        new = server.submit(job_id, label, shlex.join(command), shipment.files, shipment.modules, shipment.env)
    if not new:
        for job in server.jobs(label.search):
            _same(job, label)
    return Submitted(label.search, label.name, server.url, job_id, new, status)


def logs(cluster: str, search: str, follow: bool, insecure: bool = False) -> Iterator[str]:
    """What the latest driver of a search wrote on a cluster, in pieces; with `follow` until it ends.

    Raises:
        UserError: the cluster can't be had, or knows no job of that search.
    """
    server = JobServer(cluster, insecure)
    jobs = server.jobs(search)
    if not jobs:
        raise UserError(
            f"{server.url} knows no job of search {search}: it wasn't sent there, or the head was restarted since; "
            "`moevolve show` and `moevolve searches` tell what is in the store"
        )
    return server.follow(jobs[-1].id) if follow else iter([server.logs(jobs[-1].id)])


def _made_id(config: RunConfig) -> str:
    """An id that the same request always gets."""
    content = "\n".join((config.name, config.config_hash, without_password(config.store)))
    return hashlib.sha256(content.encode()).hexdigest()[:10]


def _reachable(store: str, cluster: str) -> str:
    """The store's URL as the driver needs it."""
    if not store.startswith("sqlite"):
        return store
    if not is_loopback(cluster) or not store.startswith(_FILE):
        raise UserError(
            f"store {store}: a SQLite file can't be used from {cluster}; give a database that the cluster and this "
            "machine reach: --store postgresql://USER@HOST/NAME"
        )
    return _FILE + str(Path(store.removeprefix(_FILE)).resolve())


def _recorded(config: RunConfig, label: Label) -> tuple[str | None, bool]:
    """What the store knows of the search: its status, and whether it needs a driver."""
    try:
        with StoreReader.open(_briefly(config.store)) as store:
            found, named = _search(store, label.search), _search(store, label.name)
            if found is None and named is None:
                return None, True
            driven = found is not None and store.control(found.id).alive
    except StoreError:  # not made yet, or not reached from here: then the driver finds out
        return None, True
    where = without_password(config.store)
    if named is not None and named.id != label.search:
        raise UserError(
            f"search {label.name} is in {where} already, with id {named.id}; choose another name with --name, "
            f"or say --id {named.id} if it is this one"
        )
    assert found is not None
    if (found.name, parse_stored_config(found.config).config_hash) != (label.name, label.config_hash):
        raise UserError(
            f"the id {label.search} is that of search {found.name} in {where}, which has another configuration"
        )
    return found.status, not driven and found.status not in ("finished", "cancelled")


def _briefly(store: str) -> str:
    """The store's URL, for who doesn't wait long for a database that may be out of reach."""
    if store.startswith("sqlite") or "connect_timeout=" in store:
        return store
    return f"{store}{'&' if '?' in store else '?'}connect_timeout={_CONNECT_S}"


def _search(store: StoreReader, key: str) -> SearchRecord | None:
    try:
        return store.search(key)
    except StoreError:
        return None


def _same(job: Job, label: Label) -> None:
    if job.label != label:
        raise UserError(
            f"the id {label.search} is that of search {job.label.name} on this cluster, which has another configuration"
        )
