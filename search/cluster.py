"""Start Ray on this machine, or join a cluster."""

from __future__ import annotations

import logging
import math
import signal
import socket
import tempfile
import threading
from typing import Any

import ray
from ray.exceptions import RayError

from moevolve.search.config import WorkersSection
from moevolve.search.pool import PoolError
from moevolve.workers.generation import WORKER_ENV

_REACH_S = 10.0
"""Seconds a cluster has to take a connection."""


def start_ray(workers: WorkersSection) -> None:
    """Start Ray on this machine, or join the cluster at `workers.address`.

    Workers get an empty working directory of their own: the driver's would otherwise stand on their `sys.path`, where
    our folder `kernels` could shadow the package of that name which `transformers` imports.

    Raises:
        PoolError: the cluster can't be reached.
    """
    if ray.is_initialized():
        return
    local: dict[str, Any] = {}
    # Ray takes SIGTERM for itself, in Python and below it, and dies of it with a stack trace.
    before = signal.getsignal(signal.SIGTERM)
    _check_reachable(workers.address)
    if workers.address is None:
        local = {"num_cpus": max(1, math.ceil(workers.count * workers.num_cpus)), "include_dashboard": False}
    try:
        with tempfile.TemporaryDirectory(prefix="moevolve-") as empty:
            ray.init(
                address=workers.address or "local",
                runtime_env={"working_dir": empty, "env_vars": dict(WORKER_ENV)},
                log_to_driver=False,
                logging_level=logging.ERROR,
                **local,
            )
    except (ConnectionError, RayError, ValueError) as error:
        raise PoolError(f"workers.address {workers.address}: can't join this Ray cluster: {error}") from error
    finally:
        _handle(signal.SIGTERM, before)


def _handle(number: signal.Signals, handler: Any) -> None:
    """Set a signal's handler back; only the main thread can, and only it had one changed."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(number, handler)


def _check_reachable(address: str | None) -> None:
    """Knock at `host:port`, because Ray itself goes on trying for minutes; `auto` and the like name no host."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise PoolError(f"workers.address {address}: nothing answers there: {error}") from error
