"""Submitting a search's driver to a cluster, and reading its logs there."""

from __future__ import annotations

import hashlib
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.records import short_repr
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.pools.ray_jobs import LIMIT_BYTES, JobLabel, JobServer, is_loopback
from moevolve.search.pools.shipping import RUN, pack
from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord
from moevolve.store.session import without_password

_FILE = "sqlite:///"
_CONNECT_TIMEOUT_S = 5
"""Longest wait for the database, which often can't be reached from here: then the cluster's driver reports it."""
_COMMAND = ("python", "-m", "moevolve.search.cli", "launch")


@dataclass(frozen=True, slots=True)
class Submitted:
    """A search whose driver runs, or will run, on a cluster.

    Attributes:
        id: Id of the search, and of its first job.
        cluster: URL of the cluster's job server.
        store: URL of the store that the search's results go to, without its password.
        job: Id of the job that runs the search; None if none is needed.
        new: True if this call submitted the job.
        status: Status of the search in the store; None if it isn't stored yet, or the store can't be reached from here.
    """

    __repr__ = short_repr

    id: str
    name: str
    cluster: str
    store: str
    job: str | None
    new: bool
    status: str | None


def submit(
    config: RunConfig, cluster: str, search_id: str | None, insecure: bool = False, shared_paths: bool = False
) -> Submitted:
    """Submit a search to a cluster, which launches it, or resumes it if it stopped there before its end.

    The call can be repeated: nothing is submitted if the search is finished or a driver runs it. The state of a search
    comes from the store; Ray is only asked for drivers that aren't in the store yet.

    Args:
        cluster: URL of the cluster's job server.
        search_id: Id of the search; None derives one from the configuration and its name.
        insecure: See `JobServer`.
        shared_paths: See `pack`.

    Raises:
        UserError: another search has the id or the name, the cluster can't use the store or a path, or the cluster
            can't be reached.
    """
    server = JobServer(cluster, insecure)
    config = config.model_copy(update={"store": _store_for(config.store, server.url)})
    where = without_password(config.store)
    if search_id is None:  # it depends only on the request, so that the call can be repeated
        content = f"{config.name}\n{config.config_hash}\n{where}"
        search_id = hashlib.sha256(content.encode()).hexdigest()[:10]
    label = JobLabel(search_id, config.name, config.config_hash)
    status, needed = _stored_state(config, label)
    jobs = server.jobs(label.search)
    for job in jobs:
        if job.label != label:
            raise UserError(f"the id {label.search} is that of another search on this cluster: {job.label.name}")
    alive = next((job for job in jobs if not job.ended), None)
    if alive is not None or not needed:
        return Submitted(label.search, label.name, server.url, where, alive.id if alive else None, False, status)
    job_id = label.search if not jobs else f"{label.search}-{len(jobs) + 1}"
    # `exec`, because a shell in between wouldn't pass on Ray's SIGTERM. Store and server come from the configuration.
    command = ["exec", "env", "-u", "MOEVOLVE_STORE", *_COMMAND, RUN, "--id", label.search]
    with tempfile.TemporaryDirectory(prefix="moevolve-") as folder:
        environment = pack(config, Path(folder), shared_paths, LIMIT_BYTES)
        new = server.submit(job_id, label, shlex.join(command), environment)  # False after another request just now
    return Submitted(label.search, label.name, server.url, where, job_id, new, status)


def logs(cluster: str, search: str, follow: bool, insecure: bool = False) -> Iterator[str]:
    """Yield the output of a search's latest driver on a cluster, with `follow` until the driver ends.

    Raises:
        UserError: the cluster can't be reached, or has no job for the search.
    """
    server = JobServer(cluster, insecure)
    jobs = server.jobs(search)
    if not jobs:
        raise UserError(
            f"{server.url} knows no job of search {search}: it wasn't sent there, or the head was restarted since; "
            "`moevolve show` and `moevolve searches` tell what is in the store"
        )
    return server.follow(jobs[-1].id) if follow else iter([server.logs(jobs[-1].id)])


def _store_for(store: str, cluster: str) -> str:
    """The store's URL for a driver on the cluster."""
    if not store.startswith("sqlite"):
        return store
    if not is_loopback(cluster) or not store.startswith(_FILE):
        raise UserError(
            f"store {store}: a SQLite file can't be used from {cluster}; give a database that the cluster and this "
            "machine reach: --store postgresql://USER@HOST/NAME"
        )
    return _FILE + str(Path(store.removeprefix(_FILE)).resolve())


def _stored_state(config: RunConfig, label: JobLabel) -> tuple[str | None, bool]:
    """The status of the search in the store, and whether it needs a driver."""
    url = config.store
    if not url.startswith("sqlite") and "connect_timeout=" not in url:
        url += f"{'&' if '?' in url else '?'}connect_timeout={_CONNECT_TIMEOUT_S}"
    try:
        with StoreReader.open(url) as store:
            found, named = _find(store, label.search), _find(store, label.name)
            if found is None and named is None:
                return None, True
            driven = found is not None and store.control(found.id).alive
    except StoreError:  # not made yet, or not reachable from here: the driver will report it
        return None, True
    where = without_password(config.store)
    if named is not None and named.id != label.search:
        raise UserError(
            f"search {label.name} is in {where} already, with id {named.id}; choose another name with --name, "
            f"or say --id {named.id} if it is this one"
        )
    assert found is not None
    if (found.name, parse_stored_config(found.config).config_hash) != (label.name, label.config_hash):
        raise UserError(f"the id {label.search} is that of search {found.name} in {where}, with other settings")
    return found.status, not driven and found.status not in ("finished", "cancelled")


def _find(store: StoreReader, key: str) -> SearchRecord | None:
    try:
        return store.search(key)
    except StoreError:
        return None
