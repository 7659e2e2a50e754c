"""Start Ray on this machine, or join a cluster."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import tempfile
import threading
from typing import Any

import ray
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.utils import get_num_cpus
from ray.exceptions import GetTimeoutError, RayError

from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.shares import Node
from moevolve.workers.contract.capacity import CAPACITY
from moevolve.workers.contract.settings import WORKER_ENV

_ANSWER_S = 10.0
"""Seconds in which something has to listen at a cluster's address."""

_HINT = (
    "; this machine must be one of its nodes (`ray start --address HEAD:PORT` makes it one; --submit sends the search "
    "to one), and for a cluster with a token RAY_AUTH_MODE=token and the token must be set here"
)

_brought: dict[str | None, str | None] = {}
"""Sessions of Ray that this process is in by our doing, and not its user's; with `workers.address` of who wanted in."""

_users: set[object] = set()
"""Who uses Ray in this process now."""


def start_ray(workers: WorkersSection, user: object) -> None:
    """Start Ray on this machine, or join the cluster at `workers.address`.

    A process is in one Ray at a time. If that isn't the one that is wanted, or too small, it is left for another if it
    was started here and nobody uses it any more. On this machine it gets as many CPUs as there are, or as are needed to
    begin with, so that a search may have more workers later on.

    Workers get an empty working directory of their own: the driver's would otherwise stand on their `sys.path`, where
    our folder `kernels` could shadow the package of that name which `transformers` imports. A driver that is a Ray job
    has one that was made for it, and its workers have a copy.

    Args:
        workers: what is to have room.
        user: who needs it, until `leave_ray`.

    Raises:
        PoolError: the cluster can't be reached, or doesn't let us in, or this process is in another one.
    """
    if ray.is_initialized():
        _leave_unfit(workers)
    if not ray.is_initialized():
        _users.clear()
        _enter(workers)
        _brought[cluster_name()] = workers.address
    _users.add(user)


def leave_ray(user: object) -> None:
    """Use Ray no more; others in this process may."""
    _users.discard(user)


def _leave_unfit(workers: WorkersSection) -> None:
    """Leave the Ray that this process is in if workers want another one.

    Raises:
        PoolError: it is in use, or its user's.
    """
    session, address = cluster_name(), workers.address
    ours = session in _brought
    local = ours and _brought[session] is None
    here, cpus = ray.get_runtime_context().gcs_address, ray.cluster_resources().get("CPU", 0.0)
    if address is not None:
        fits = address in (here, _brought.get(session)) or (address == "auto" and not local)
    else:
        fits = not ours or (local and cpus >= _cpus_needed(workers))
    if fits:
        return
    if not ours or _users:
        raise PoolError(
            f"this process is in the Ray at {here} already, with {cpus:g} CPUs, and can't have another one for "
            f"workers.address {address or 'null'} with num_cpus={_cpus_needed(workers)}: use another process, or call "
            f"ray.shutdown() {'when its search has ended' if ours else 'first'}"
        )
    ray.shutdown()
    del _brought[session]


def _cpus_needed(workers: WorkersSection) -> int:
    """CPUs that a Ray of this machine alone must have."""
    return max(1, math.ceil(workers.least * workers.num_cpus))


def _enter(workers: WorkersSection) -> None:
    # Ray takes SIGTERM for itself, in Python and below it, and dies of it with a stack trace.
    before = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any]
    if workers.address is None:
        cpus = max(int(get_num_cpus()), _cpus_needed(workers))
        options = {"address": "local", "include_dashboard": False, "num_cpus": cpus}
    else:
        if workers.address != "auto":
            _check_listens(workers.address)
        options = {"address": workers.address}
    try:
        with tempfile.TemporaryDirectory(prefix="moevolve-") as empty:
            ray.init(
                runtime_env={"env_vars": {**WORKER_ENV, **_capacity()}}
                | ({} if _has_folder() else {"working_dir": empty}),
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
    except (ConnectionError, RayError, RuntimeError, ValueError) as error:
        said = str(error).strip().split("\n", 1)[0]
        raise PoolError(f"workers.address {workers.address}: can't join this Ray cluster: {said}{_HINT}") from error
    finally:
        _handle(signal.SIGTERM, before)


def _capacity() -> dict[str, str]:
    """What workers may take of their devices, where this process's environment says so."""
    return {CAPACITY: os.environ[CAPACITY]} if CAPACITY in os.environ else {}


def cluster_name() -> str | None:
    """What tells the cluster that this process has joined from others; None if it has joined none."""
    node = ray._private.worker.global_worker.node  # noqa: SLF001 - the session's name is public in later versions only
    return None if node is None else str(node.session_name)


def cluster_nodes() -> list[Node] | None:
    """What the nodes of the cluster have, used or not; None if its head doesn't answer."""
    try:
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    except (GetTimeoutError, RayError):
        return None
    return [Node(has.get("CPU", 0.0), has.get("GPU", 0.0)) for has in alive]


def _check_listens(address: str) -> None:
    """Refuse an address where nothing listens, which Ray would try for minutes; it is asked for `auto` itself.

    Raises:
        PoolError: nothing listens there, or it isn't HOST:PORT.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, OverflowError, ValueError) as error:
        raise PoolError(f"workers.address {address}: no Ray cluster answers there: {error}") from None


def _has_folder() -> bool:
    """Whether this process is a Ray job with a working directory, in whose place Ray takes no other."""
    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR) or "{}")
    return "working_dir" in (job.get("runtime_env") or {})


def _handle(number: signal.Signals, handler: Any) -> None:
    """Set a signal's handler back; only the main thread can, and only it had one changed."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(number, handler)
