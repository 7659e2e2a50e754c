"""Start Ray on this machine, or join a cluster."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

import ray
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.utils import get_num_cpus
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.exceptions import GetTimeoutError, RayError

from moevolve.search.config.run import WorkersSection
from moevolve.search.pools import ray_knock as knocking
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.shares import Node
from moevolve.workers.capacity import CAPACITY
from moevolve.workers.engine.engine import WORKER_ENV

_PATIENCE_S = 60.0
"""Seconds until knocking is given up; it ends sooner by itself, unless this machine is out of breath."""

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
        found, mode = find_cluster(workers.address)
        options = {"address": found}
        # For good: Ray keeps to what it began with for as long as the process lives.
        os.environ.setdefault(knocking.MODE, mode)
        Config.initialize("")  # has read the environment already
    try:
        with tempfile.TemporaryDirectory(prefix="moevolve-") as empty:
            ray.init(
                runtime_env={"env_vars": {**WORKER_ENV, **_capacity()}}
                | ({} if _has_folder() else {"working_dir": empty}),
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
    except (ConnectionError, RayError, ValueError) as error:
        raise PoolError(
            f"workers.address {workers.address}: can't join this Ray cluster: {error.__cause__ or error}"
        ) from error
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


def find_cluster(address: str) -> tuple[str, str]:
    """A cluster's `host:port`, and how it authenticates: `token` or `disabled`, as RAY_AUTH_MODE has it.

    With an address, Ray sends a token only where RAY_AUTH_MODE tells it to; the cluster knows whether it asks for one.
    The token is where Ray's own tools look for it: RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, or .ray/auth_token in
    the home folder.

    Args:
        address: `host:port` or `auto`.

    Raises:
        PoolError: nothing answers there, it doesn't let us in, or this machine is none of its nodes.
    """
    answer, found = _knock(address)
    where = f"workers.address {address}"
    mode = os.environ.get(knocking.MODE)
    if answer == "nothing there":
        raise PoolError(f"{where}: no Ray cluster answers there: {found}")
    if answer == "no node":
        raise PoolError(
            f"{where}: a Ray cluster answers there, but this machine is no node of it, and drivers run on nodes: run "
            f"`ray start --address {found}` here first, launch on a node, or send the search there with --submit"
        )
    if answer == "open":
        if mode is not None and mode.lower() == "token":
            raise PoolError(
                f"{where}: {knocking.MODE} is token here, but this cluster was started without tokens; "
                f"unset {knocking.MODE}, or start all of its nodes with {knocking.MODE}=token"
            )
        return found, "disabled"
    if mode is not None and mode.lower() != "token":
        raise PoolError(
            f"{where}: this cluster asks for a token, but {knocking.MODE} is {mode!r} here; "
            "set it to token, or unset it"
        )
    if answer == "no token":
        path = os.environ.get("RAY_AUTH_TOKEN_PATH")
        lacks = f"no readable token in RAY_AUTH_TOKEN_PATH={path}" if path else "no token here"
        raise PoolError(
            f"{where}: this cluster asks for a token, and there is {lacks}; copy ~/.ray/auth_token of its head node "
            "to this one, or set RAY_AUTH_TOKEN"
        )
    if answer == "wrong token":
        raise PoolError(
            f"{where}: this cluster refuses the token in {_token_source()}; "
            "take the one that `ray get-auth-token` prints on its head node"
        )
    return found, "token"


def _knock(address: str) -> tuple[str, str]:
    # Without the working directory on `sys.path`, where folders may be named like packages.
    command = [sys.executable, "-P", "-m", knocking.__name__, address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return "nothing there", f"no answer within {_PATIENCE_S:g} s"
    if done.returncode == -signal.SIGALRM:
        return "nothing there", f"something listens, but gives no answer of a Ray head within {knocking.LIMIT_S} s"
    answer = done.stdout.splitlines()[-2:]
    if done.returncode or len(answer) != 2:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        return "nothing there", said[-1]
    return answer[0], answer[1]


def _has_folder() -> bool:
    """Whether this process is a Ray job with a working directory, in whose place Ray takes no other."""
    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR) or "{}")
    return "working_dir" in (job.get("runtime_env") or {})


def _token_source() -> str:
    """Where Ray takes the token from."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    return os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"


def _handle(number: signal.Signals, handler: Any) -> None:
    """Set a signal's handler back; only the main thread can, and only it had one changed."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(number, handler)
