"""The Ray actor that holds one worker, and the meaning of Ray's errors about it."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar

import ray

# Ray's public API has the cluster's free resources in sum only; a worker needs room on a single node.
from ray._private.state import available_resources_per_node
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayError,
    RayTaskError,
)

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import RunConfig, WorkersSection
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_cluster import start_ray
from moevolve.workers.checkpoints.files import local_directory
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, WorkerInfo

R = TypeVar("R")

log = logging.getLogger(__name__)

# Most characters of an error that are reported: a few lines of a terminal, without a traceback's frames.
_LINE = 500

# Longest wait for room for the first worker before the driver describes the model itself. Ray takes seconds to start a
# process on a node that has room, so after a minute no node has.
_ROOM_S = 60.0


def worker_actor(workers: WorkersSection, worker: Callable[..., object] | None = None) -> ActorClass:
    """Return Ray's actor class of one worker, with the resources that each worker reserves.

    An actor reports its node before it loads the model, so that the pool can tell a worker without room, one that
    loads and one whose node is lost apart. Splits are fetched once from the object store.

    Args:
        workers: Resources of a worker.
        worker: Makes the worker in the actor's process; None makes an `EvaluationWorker`.
    """

    # The class is defined here so that Ray sends its code: workers import nothing for it but the worker, and the driver
    # doesn't import that, nor torch and transformers with it.
    class Actor:
        def __init__(self) -> None:
            self._fetched: Callable[[ray.ObjectRef], PreparedSplit] = cache(ray.get)

        def place(self) -> tuple[str, str]:
            return ray.get_runtime_context().get_node_id(), socket.gethostname()

        def call(self, function: Callable[..., R], *args: object) -> R:
            return function(*args)

        def load(self, *args: Any) -> WorkerInfo:
            self._worker: Any
            if worker is None:
                from moevolve.workers.worker import EvaluationWorker

                self._worker = EvaluationWorker(*args)
            else:
                self._worker = worker(*args)
            return self._worker.info(ray.get_runtime_context().get_node_id())

        def calibrate(self, measurement: Measurement, splits: tuple[PreparedSplit, ...]) -> bytes:
            return bytes(self._worker.calibrate(measurement, splits))

        def evaluate_refs(
            self, requests: tuple[EvaluationRequest, ...], references: list[ray.ObjectRef]
        ) -> list[EvaluationReply]:
            splits = tuple(map(self._fetched, references))
            if len(requests) == 1:
                return [self._worker.evaluate(requests[0], splits)]
            return list(self._worker.evaluate_round(requests, splits))

    Actor.__name__ = Actor.__qualname__ = "EvaluationWorker"  # what Ray's own tools show
    return ray.remote(num_cpus=workers.num_cpus, num_gpus=workers.num_gpus)(Actor)


class ModelProbe:
    """A process that describes a search's model, and then is the first worker of the search's pool.

    So torch is imported once for both, and not by the driver. On a cluster without room for a worker, the process
    reserves nothing and ends with the call, instead of waiting for room. As the first worker it still describes models,
    between evaluations. Functions are called in this process if it has imported torch already, as a notebook may, or if
    no other one can be had.
    """

    def __init__(self) -> None:
        self._actor: ActorHandle | None = None
        self._worker: ActorHandle | None = None
        self._alone = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        kill(self.take())

    def join(self, config: RunConfig) -> None:
        """Join the cluster of a configuration, if it names one.

        Raises:
            UserError: The cluster can't be reached or refuses the connection.
        """
        if config.workers.cluster is not None:
            try:
                start_ray(config.workers)
            except PoolError as error:
                raise UserError(str(error)) from error

    def call(self, function: Callable[..., R], config: RunConfig, *args: object) -> R:
        """Call a function of a configuration, with further arguments, where torch may be imported.

        Raises:
            UserError: The function has raised it, or the model isn't where the configuration says.
        """
        if "torch" in sys.modules or self._alone:
            return function(config, *args)
        if config.workers.cluster is None:  # a cluster's nodes may have folders that this machine doesn't have
            local_directory(config.model)  # a wrong path is refused at once, without waiting for Ray and torch
        try:
            self._start(config)
            reference = self._begin(function, config, *args)
            return ray.get(reference, timeout=config.workers.timeout_s)
        except (PoolError, RayError) as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from error
            # A search is recorded even if no worker is available yet, which its pool reports later.
            log.info("the model is described by the driver: %s", reason_of(error))
            return function(config, *args)

    def gpus(self, config: RunConfig) -> int:
        """Number of GPUs that workers of a configuration can have on this machine, or on the cluster that it joins.

        If that can't be joined, they are this machine's, where functions are then called, too.
        """
        if config.workers.cluster is None:
            local_directory(config.model)
        if not self._alone and (config.workers.cluster is not None or "torch" not in sys.modules):
            try:
                self._start(config)
                return int(ray.cluster_resources().get("GPU", 0))
            except PoolError as error:
                log.info("GPUs are counted on this machine: %s", reason_of(error))
        from moevolve.workers.checkpoints.loading import gpu_count

        return gpu_count()

    def _start(self, config: RunConfig) -> None:
        """Start or join Ray; what has failed once isn't tried again, since the attempt takes up to half a minute."""
        try:
            start_ray(config.workers)
        except PoolError:
            self._alone = True
            raise

    def _begin(self, function: Callable[..., R], config: RunConfig, *args: object) -> ray.ObjectRef:
        """Start the call in another process, and return Ray's reference to its result."""
        workers = config.workers
        if self._worker is not None:
            try:
                ray.get(self._worker.place.remote(), timeout=_ROOM_S)
                return self._worker.call.remote(function, config, *args)
            except ActorDiedError:
                self._worker = None  # its pool has stopped it
        if self._actor is None:
            has_room = workers.cluster is None or any(
                free.get("CPU", 0.0) >= workers.num_cpus and free.get("GPU", 0.0) >= workers.num_gpus
                for free in available_resources_per_node().values()
            )
            if not has_room:  # a worker would wait for resources that others have reserved
                return ray.remote(num_cpus=0)(function).remote(config, *args)
            self._actor = worker_actor(workers).remote()
        ray.get(self._actor.place.remote(), timeout=_ROOM_S)
        return self._actor.call.remote(function, config, *args)

    def take(self) -> ActorHandle | None:
        """Hand over the worker's actor, whose model isn't loaded; None without one."""
        actor, self._actor = self._actor, None
        self._worker = actor or self._worker
        return actor


def kill(actor: ActorHandle | None) -> None:
    """End an actor's process, if there is one."""
    if actor is not None:
        ray.kill(actor)


def out_of_reach(error: Exception) -> bool:
    """True if the connection to an actor broke: the first sign of a lost node, long before Ray declares it dead."""
    return isinstance(error, ActorUnavailableError | ObjectLostError)


def node_alive(node: str) -> bool:
    """Return whether the cluster still has the node of this id."""
    try:
        return any(entry["NodeID"] == node and entry["Alive"] for entry in ray.nodes())
    except (RayError, GetTimeoutError):
        return False


def reason_of(error: Exception) -> str:
    """Return the cause of an error in one line, without Ray's wrapping and traceback."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return _line_of(cause) if cause is not None else str(error).strip().splitlines()[-1]
    if isinstance(error, ActorDiedError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line), lines[0])[:_LINE]
    return _line_of(error)


def _line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LINE]
