"""A pool of worker actors on Ray: keeps them busy, replaces the dead, bounds every candidate's tries."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.base import Completion, PoolError
from moevolve.search.pools.ray_cluster import start_ray
from moevolve.workers.config import ALL_SHORTCUTS, EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.messages import EvaluationReply, EvaluationRequest, FailureKind
from moevolve.workers.methods.base import CalibrationRecipe, Edit, LayeredEdit
from moevolve.workers.worker import EvaluationWorker, WorkerInfo

_CANDIDATES = 64
"""Candidates of a worker that are taken into account; what older ones left is mostly gone."""

_LOOK_AHEAD = 32
"""Waiting candidates among which is chosen."""


class Recent:
    """What one worker evaluated lately."""

    def __init__(self) -> None:
        self._layers: list[tuple[str, ...]] = []

    def add(self, edit: Edit) -> None:
        """Note a candidate that the worker gets."""
        if isinstance(edit, LayeredEdit):
            self._layers = [*self._layers[1 - _CANDIDATES :], edit.layer_hashes]

    def common(self, edit: Edit) -> int:
        """Leading layers, all but the last, that a candidate has in common with any of them."""
        if not isinstance(edit, LayeredEdit):
            return 0
        own = edit.layer_hashes[:-1]
        return max((_leading(own, other) for other in self._layers), default=0)

    def best(self, waiting: Iterable[Edit]) -> int:
        """Place of the waiting candidate, among the first few, that has most in common; the first of those that tie."""
        shared = [self.common(edit) for edit in islice(waiting, _LOOK_AHEAD)]
        return shared.index(max(shared))


def _leading(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    for count, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return count
    return min(len(one), len(other))


def actor_class(worker: type[EvaluationWorker]) -> type:
    """The worker with what only an actor needs: its node's id, and splits fetched once from the object store."""

    class Actor(worker):  # type: ignore[misc, valid-type]
        def node_info(self) -> WorkerInfo:
            return self.info(ray.get_runtime_context().get_node_id())

        def evaluate_refs(self, request: EvaluationRequest, references: list[Any]) -> EvaluationReply:
            return self.evaluate(request, self.fetched(request, references))

        def fetched(self, request: EvaluationRequest, references: list[Any]) -> tuple[PreparedSplit, ...]:
            known = self.__dict__.setdefault("known_splits", {})
            for key, reference in zip(request.splits, references, strict=True):
                if key not in known:
                    known[key] = ray.get(reference)
            return tuple(known[key] for key in request.splits)

    Actor.__name__ = worker.__name__
    return Actor


def node_alive(node: str) -> bool:
    """Whether a node, by its id, is still of the cluster."""
    try:
        return any(entry["NodeID"] == node and entry["Alive"] for entry in ray.nodes())
    except (RayError, GetTimeoutError):
        return False


def reason_of(error: Exception) -> str:
    """The cause in one line, without Ray's wrapping and traceback."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {cause}" if cause is not None else str(error).strip().splitlines()[-1]
    if isinstance(error, ActorDiedError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line), lines[0])[:500]
    return f"{type(error).__name__}: {error}"


log = logging.getLogger(__name__)

_MAX_LOSSES = 10
"""Workers a candidate may lose to nodes that go away before it is given up."""

_OVERTAKEN = 4
"""How often later candidates may be taken before the first in the queue, which everything may soon wait for."""


@dataclass(eq=False)
class _Task:
    """A request and its tries: workers that died or were retired under it, and those that nodes took along."""

    request: EvaluationRequest
    deaths: int = 0
    losses: int = 0
    overtaken: int = 0

    @property
    def attempts(self) -> int:
        return self.deaths + self.losses + 1


@dataclass
class _Slot:
    """One worker actor and what it is doing."""

    actor: Any
    starting: Any
    info: WorkerInfo | None = None
    task: _Task | None = None
    result: Any = None
    started_at: float = field(default_factory=time.monotonic)
    recent: Recent = field(default_factory=Recent)

    @property
    def pending(self) -> Any:
        """The object reference this slot is waiting for, if any."""
        return self.starting if self.info is None else self.result


class RayPool:
    """The pool on Ray.

    A worker that dies, that finds itself at fault (`WorkerFault`) or that outruns `timeout_s` is replaced, and its
    candidate evaluated again. That is counted against the candidate unless the worker's node is gone; after
    `max_attempts` the candidate fails with that reason, as a failure of kind `worker` or `timeout`. A node that is
    lost or out of reach counts against nobody, up to a bound that only a broken cluster reaches.

    Args:
        workers: how many, and what each reserves.
        model: checkpoint every worker loads.
        engine: how prompts are run.
        splits: prepared splits by fingerprint; shipped to each worker once.
        worker: the actor's class (tests inject faults through a subclass).
        shortcuts: which ways to compute less the workers take.
    """

    def __init__(
        self,
        workers: WorkersSection,
        model: ModelConfig,
        engine: EngineConfig,
        splits: Mapping[str, PreparedSplit],
        worker: type[EvaluationWorker] = EvaluationWorker,
        shortcuts: Shortcuts = ALL_SHORTCUTS,
    ) -> None:
        start_ray(workers)
        self._workers = workers
        self._splits: dict[str, Any] = {}
        self.add_splits(splits)
        self._actor_class: Any = ray.remote(num_cpus=workers.num_cpus, num_gpus=workers.num_gpus)(actor_class(worker))
        self._actor_args = (model, engine, shortcuts, workers.reuse_bytes)
        self._queue: deque[_Task] = deque()
        self._failed: list[Completion] = []
        self._failed_starts = 0
        self._slots = [self._start() for _ in range(workers.count)]

    def add_splits(self, splits: Mapping[str, PreparedSplit]) -> None:
        for fingerprint in splits.keys() - self._splits.keys():
            self._splits[fingerprint] = ray.put(splits[fingerprint])

    def submit(self, request: EvaluationRequest) -> None:
        self._queue.append(_Task(request))
        self._dispatch()

    def poll(self, timeout: float) -> list[Completion]:
        pending = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        completions: list[Completion] = []
        if pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=timeout)
            more, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0) if ready else ([], [])
            for reference in more:
                completions += self._collect(pending[reference])
        self._expire()
        self._dispatch()
        completions += self._failed
        self._failed = []
        return completions

    @property
    def ready(self) -> int:
        """Workers whose model is loaded."""
        return sum(slot.info is not None for slot in self._slots)

    def close(self) -> None:
        for slot in self._slots:
            ray.kill(slot.actor)
        self._slots = []

    def _start(self) -> _Slot:
        actor = self._actor_class.remote(*self._actor_args)
        return _Slot(actor, actor.node_info.remote())

    def _dispatch(self) -> None:
        for slot in self._slots:
            if not self._queue:
                return
            if slot.info is None or slot.task is not None:
                continue
            slot.task = self._next_for(slot)
            request = slot.task.request
            slot.result = slot.actor.evaluate_refs.remote(request, self._refs(request))
            slot.started_at = time.monotonic()

    def _refs(self, request: EvaluationRequest) -> list[Any]:
        """A request's splits in Ray's object store."""
        return [self._splits[key] for key in request.splits]

    def _next_for(self, slot: _Slot) -> _Task:
        """Take the waiting candidate that can start from most of what the worker keeps."""
        first = self._queue[0]
        if not self._workers.reuse_bytes or first.overtaken >= _OVERTAKEN:
            place = 0
        else:
            place = slot.recent.best(task.request.edit for task in self._queue)
        first.overtaken += place > 0
        task = self._queue[place]
        del self._queue[place]
        slot.recent.add(task.request.edit)
        return task

    def _collect(self, slot: _Slot) -> list[Completion]:
        """Take a slot's finished reference: a loaded worker, a reply, or a death."""
        try:
            value = ray.get(slot.pending)
        except RayError as error:
            self._bury(slot, error)
            return []
        if slot.info is None:
            slot.info = value
            self._failed_starts = 0
            return []
        assert slot.task is not None
        completion = Completion(value, slot.task.attempts)
        slot.task = slot.result = None
        return [completion]

    def _bury(self, slot: _Slot, error: Exception) -> None:
        """Replace a worker that is dead or at fault, and decide what becomes of its candidate."""
        if slot.info is None:
            self._failed_starts += 1
            if self._failed_starts > 2 * self._workers.count:
                raise PoolError(f"workers can't start: {reason_of(error)}") from error
        elif slot.task is not None:
            self._charge(slot.task, slot.info, error)
        # Harmless if it is dead; one at fault, or that only can't be reached, must not come back and hold resources.
        ray.kill(slot.actor)
        fresh = self._start()
        slot.actor, slot.starting, slot.started_at = fresh.actor, fresh.starting, fresh.started_at
        slot.info = slot.task = slot.result = None
        slot.recent = Recent()

    def _charge(self, task: _Task, info: WorkerInfo, error: Exception) -> None:
        """Count a worker's end against its candidate or its node, and evaluate the candidate again or let it fail."""
        # A broken connection is the first sign of a lost node, long before the cluster declares the node dead.
        lost = isinstance(error, ActorUnavailableError | ObjectLostError) or not node_alive(info.node)
        if lost:
            task.losses += 1
        else:
            task.deaths += 1
        log.warning("worker %s was lost evaluating %s: %s", info.name, task.request.ticket, reason_of(error))
        kind: FailureKind = "timeout" if isinstance(error, TimeoutError) else "worker"
        if task.deaths >= self._workers.max_attempts:
            what = "outran its time" if kind == "timeout" else "killed its worker"
            failure = f"{what} {task.deaths} times, last: {reason_of(error)}"
        elif task.losses >= _MAX_LOSSES:
            failure = f"lost its worker {task.losses} times, last: {reason_of(error)}"
        else:
            self._queue.appendleft(task)
            return
        reply = EvaluationReply(task.request.ticket, (), failure, 0.0, info.name, kind)
        self._failed.append(Completion(reply, task.attempts - 1))

    def _expire(self) -> None:
        """Kill workers whose evaluation outran its limit, and give up when no worker gets ready in time."""
        now = time.monotonic()
        limit = self._workers.timeout_s
        for slot in self._slots:
            if slot.task is not None and now - slot.started_at > limit:
                self._bury(slot, TimeoutError(f"evaluation took longer than timeout_s = {limit:g}"))
        waited = now - min(slot.started_at for slot in self._slots)
        if not self.ready and waited > self._workers.start_timeout_s:
            raise PoolError(
                f"no worker was ready after {waited:.0f} s: the cluster has no room for "
                f"num_cpus={self._workers.num_cpus:g}, num_gpus={self._workers.num_gpus:g}, or the model loads slowly "
                "(workers.start_timeout_s)"
            )


def calibrate_on_ray(
    workers: WorkersSection,
    model: ModelConfig,
    engine: EngineConfig,
    recipe: CalibrationRecipe,
    splits: tuple[PreparedSplit, ...],
) -> bytes:
    """Make a calibration on a worker of its own; see `EvaluationWorker.calibrate`.

    Raises:
        UserError: the model can't be loaded, or isn't one that the recipe is for.
        PoolError: no worker could be had, or it died.
    """
    start_ray(workers)
    actor: Any = ray.remote(num_cpus=workers.num_cpus, num_gpus=workers.num_gpus)(EvaluationWorker).remote(
        model, engine
    )
    try:
        return bytes(ray.get(actor.calibrate.remote(recipe, splits), timeout=workers.start_timeout_s))
    except (RayActorError, RayTaskError) as error:
        if isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from error
        raise PoolError(f"the calibration failed: {reason_of(error)}") from error
    except GetTimeoutError as error:
        raise PoolError(f"the calibration took longer than {workers.start_timeout_s:g} s (start_timeout_s)") from error
    finally:
        ray.kill(actor)
