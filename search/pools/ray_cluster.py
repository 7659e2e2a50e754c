"""Starting Ray on this machine, or joining a cluster."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
from typing import Any

import ray

# Ray has no public names for these: its processes, whether it listens on loopback only, the variable in which a job
# finds its own runtime environment, and the CPUs that a container may use.
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.utils import get_num_cpus

from moevolve.evaluators.errors import DRIVER_HOST, UserError, opening
from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.base import PoolError
from moevolve.workers.contract.capacity import CAPACITY
from moevolve.workers.contract.settings import WORKER_ENV

# Time limit for connecting to a cluster's address; Ray itself would try for minutes.
_ANSWER_S = 10.0

_HINT = (
    "this machine must be one of its nodes (`ray start --address HEAD:PORT` makes it one, and `ray job submit` runs "
    "the command on one), and for a cluster with a token RAY_AUTH_MODE=token and the token must be set here (`auto` "
    "does that, for a cluster that this machine is in)"
)

_ROOM = (
    "its files go to a folder with room and a short path, which RAY_TMPDIR can name, and its token into the home, "
    "which HOME can name; on a busy machine, try again"
)

# Exit code of a process whose Ray on this machine has died, and what it says.
RAYLET_DIED = 4
_RAYLET_GONE = (
    "error: Ray's raylet on this machine was killed, for want of memory perhaps, so that this process has to end, too; "
    "everything evaluated so far is in the store: resume the search, or give the same command again"
)

# The `workers.cluster` that was asked for, by the address of the Ray that this process then started or joined.
_asked: dict[str, str | None] = {}


def start_ray(workers: WorkersSection) -> None:
    """Start Ray on this machine, or join the cluster `workers.cluster`, unless this process is in a Ray already.

    A process is in one Ray at a time, and later searches use it as it is. On this machine Ray gets all CPUs, or as many
    as the first workers reserve if that is more, so that a search may get more workers later.

    Raises:
        UserError: Ray can't be started on this machine, or a worker needs more than it has.
        PoolError: The cluster can't be reached or refuses the connection, or this process is in another one.
    """
    if not ray.is_initialized():
        _init_ray(workers)
        _asked[ray.get_runtime_context().gcs_address] = workers.cluster
    here, address = ray.get_runtime_context().gcs_address, workers.cluster
    is_local = _asked.get(here, "") is None
    if address not in (None, here, _asked.get(here)) and (address != "auto" or is_local):
        raise PoolError(
            f"this process is in the Ray at {here} already, and can't join the one at {address}: use another process, "
            "or call ray.shutdown() first"
        )
    # No node is ever added to this machine, unlike to a cluster, so that the worker would wait in vain.
    for name, wanted in (("CPU", workers.num_cpus), ("GPU", workers.num_gpus)) if is_local else ():
        has = ray.cluster_resources().get(name, 0.0)
        if has < wanted:
            raise UserError(
                f"workers.num_{name.lower()}s={wanted:g}: Ray has {has:g} {name}s on this machine; set it to {has:g}, "
                "or workers.address to a cluster whose nodes have them, or call ray.shutdown() before another search"
            )


def _end_with_raylet() -> None:
    """Wait for the end of Ray's raylet, and end this process with a line, as Ray would a moment later without a word.

    A raylet that `ray.shutdown` ends was in use no longer.
    """
    node: Any = ray_worker._global_node  # noqa: SLF001
    node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.wait()
    if ray.is_initialized() and ray_worker._global_node is node:  # noqa: SLF001
        sys.stderr.write(f"{_RAYLET_GONE}\n")
        sys.stderr.flush()
        os._exit(RAYLET_DIED)


def _init_ray(workers: WorkersSection) -> None:
    # Ray installs its own SIGTERM handlers, which end the process with a stack trace.
    before, clusters = signal.getsignal(signal.SIGTERM), ray_constants.ENABLE_RAY_CLUSTER
    options: dict[str, object]
    address = workers.cluster
    named = f"{'workers.address' if workers.address else 'RAY_ADDRESS'} {address}"
    here = "" if workers.address else "; to run on this machine, set workers.address to local, or unset RAY_ADDRESS"
    if address is None:
        cpus = max(int(get_num_cpus()), math.ceil(workers.least * workers.num_cpus))
        # Workers have an environment of their own: processes that Ray starts ahead of need would never be theirs.
        settings: dict[str, object] = {"enable_worker_prestart": False, "prestart_worker_first_driver": False}
        # With Ray's 15 a worker has a thirtieth of a core beside any other program, and no plan of time holds. With 0
        # another Ray doesn't start within its 30 seconds beside a few workers.
        settings["worker_niceness"] = 5
        options = {"address": "local", "include_dashboard": False, "num_cpus": cpus, "_system_config": settings}
    else:
        if address != "auto":
            host, _, port = address.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
            except (OSError, OverflowError, ValueError) as error:
                raise PoolError(f"{named}: no Ray cluster answers there: {error}{here}") from None
        options = {"address": address}
    local = address is None
    failed = "Ray can't be started on this machine" if local else f"{named}: can't join this Ray cluster"
    try:
        ray_constants.ENABLE_RAY_CLUSTER = clusters and not local  # without clusters Ray listens on loopback only
        variables = {**WORKER_ENV, DRIVER_HOST: socket.gethostname()}
        if CAPACITY in os.environ:
            variables[CAPACITY] = os.environ[CAPACITY]
        environment: dict[str, object] = {"env_vars": variables}
        job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR) or "{}")
        with (
            opening(failed, _ROOM if local else f"{_HINT}{here}"),
            tempfile.TemporaryDirectory(prefix="moevolve-") as empty,
        ):
            # Workers get an empty working directory: the driver's would be on their `sys.path`, where our folder
            # `kernels` could shadow the package of that name which `transformers` imports. In a Ray job they get a copy
            # of the job's own directory, which Ray doesn't let a driver replace.
            if "working_dir" not in (job.get("runtime_env") or {}):
                environment["working_dir"] = empty
            ray.init(
                runtime_env=environment,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
        if local:
            threading.Thread(target=_end_with_raylet, name="raylet", daemon=True).start()
    except UserError as error:
        if local:
            raise
        raise PoolError(str(error)) from error  # the cluster may be back later
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        # Python sets signal handlers in the main thread only; in other threads Ray has changed none.
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)
