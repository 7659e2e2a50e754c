"""A pool of worker actors on Ray: keeps them busy, replaces the dead, bounds every candidate's tries."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_cluster import start_ray
from moevolve.workers.config import ALL_SHORTCUTS, EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.messages import EvaluationReply, EvaluationRequest, FailureKind
from moevolve.workers.methods.base import CalibrationRecipe, Edit, LayeredEdit
from moevolve.workers.worker import EvaluationWorker, WorkerInfo

log = logging.getLogger(__name__)

_MAX_LOSSES = 10
"""Workers a candidate may lose to nodes that go away before it is given up."""

_OVERTAKEN = 4
"""How often later candidates may be taken before the first in the queue, which everything may soon wait for."""

_CANDIDATES = 64
"""Candidates of a worker that are taken into account; what older ones left is mostly gone."""

_LOOK_AHEAD = 32
"""Waiting candidates among which is chosen."""


class Recent:
    """What one worker evaluated lately, to find the waiting candidate that suits it.

    A worker starts candidates from hidden states that others left (`moevolve.workers.engine.reuse`): the one with most
    of its first layers in common with earlier ones takes least. Who evaluates what changes no result.
    """

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


@dataclass
class _Slot:
    """One worker actor and what it is doing."""

    actor: Any
    starting: Any
    info: WorkerInfo | None = None
    request: EvaluationRequest | None = None
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
        self._actor_args = (model, engine, shortcuts, workers.reuse_bytes, workers.count != 1)
        self._queue: deque[EvaluationRequest] = deque()
        # By ticket: workers that died or were retired under a request, those that nodes took along, and how often
        # later requests went first.
        self._deaths: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._overtaken: Counter[str] = Counter()
        self._failed: list[EvaluationReply] = []
        self._failed_starts = 0
        self._count = workers.least
        self._slots = [self._start() for _ in range(self._count)]

    def add_splits(self, splits: Mapping[str, PreparedSplit]) -> None:
        for fingerprint in splits.keys() - self._splits.keys():
            self._splits[fingerprint] = ray.put(splits[fingerprint])

    def submit(self, request: EvaluationRequest) -> None:
        self._queue.append(request)
        self._dispatch()

    def poll(self, timeout: float) -> list[EvaluationReply]:
        pending = {slot.pending: slot for slot in self._slots if slot.pending is not None}
        replies: list[EvaluationReply] = []
        if pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=timeout)
            more, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0) if ready else ([], [])
            for reference in more:
                replies += self._collect(pending[reference])
        elif not self._failed:
            time.sleep(timeout)
        self._expire()
        self._fit()
        self._dispatch()
        replies += self._failed
        self._failed = []
        return replies

    @property
    def ready(self) -> int:
        """Workers whose model is loaded."""
        return sum(slot.info is not None for slot in self._slots)

    def resize(self, count: int, at_once: bool = False) -> None:
        """See `Pool`. Workers that aren't loaded yet go first; candidates aren't charged for a worker that goes."""
        self._count = count
        if at_once:
            for slot in [slot for slot in self._slots if slot.request is not None][count:]:
                assert slot.request is not None
                self._queue.appendleft(slot.request)
                slot.request = slot.result = None
        self._fit()

    def close(self) -> None:
        for slot in self._slots:
            ray.kill(slot.actor)
        self._slots = []

    def _fit(self) -> None:
        """Have as many workers as wanted, or on the way there as few as are evaluating something."""
        idle = sorted((slot for slot in self._slots if slot.request is None), key=lambda slot: slot.info is not None)
        for slot in idle[: max(0, len(self._slots) - self._count)]:
            ray.kill(slot.actor)
            self._slots.remove(slot)
        self._slots += [self._start() for _ in range(self._count - len(self._slots))]

    def _start(self) -> _Slot:
        actor = self._actor_class.remote(*self._actor_args)
        return _Slot(actor, actor.node_info.remote())

    def _dispatch(self) -> None:
        for slot in self._slots:
            if not self._queue:
                return
            if slot.info is None or slot.request is not None:
                continue
            request = slot.request = self._next_for(slot)
            slot.result = slot.actor.evaluate_refs.remote(request, self._refs(request))
            slot.started_at = time.monotonic()

    def _refs(self, request: EvaluationRequest) -> list[Any]:
        """A request's splits in Ray's object store."""
        return [self._splits[key] for key in request.fingerprints]

    def _next_for(self, slot: _Slot) -> EvaluationRequest:
        """Take the waiting candidate that can start from most of what the worker keeps."""
        first = self._queue[0].ticket
        if not self._workers.reuse_bytes or self._overtaken[first] >= _OVERTAKEN:
            place = 0
        else:
            place = slot.recent.best(request.edit for request in self._queue)
        self._overtaken[first] += place > 0
        request = self._queue[place]
        del self._queue[place]
        slot.recent.add(request.edit)
        return request

    def _collect(self, slot: _Slot) -> list[EvaluationReply]:
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
        assert slot.request is not None and isinstance(value, EvaluationReply)
        slot.request = slot.result = None
        return [replace(value, attempts=self._tries(value.ticket) + 1)]

    def _bury(self, slot: _Slot, error: Exception) -> None:
        """Replace a worker that is dead or at fault, and decide what becomes of its candidate."""
        if slot.info is None:
            self._failed_starts += 1
            if self._failed_starts > 2 * max(1, self._count):
                raise PoolError(f"workers can't start: {reason_of(error)}") from error
        elif slot.request is not None:
            self._charge(slot.request, slot.info, error)
        # Harmless if it is dead; one at fault, or that only can't be reached, must not come back and hold resources.
        ray.kill(slot.actor)
        fresh = self._start()
        slot.actor, slot.starting, slot.started_at = fresh.actor, fresh.starting, fresh.started_at
        slot.info = slot.request = slot.result = None
        slot.recent = Recent()

    def _charge(self, request: EvaluationRequest, info: WorkerInfo, error: Exception) -> None:
        """Count a worker's end against its candidate or its node, and evaluate the candidate again or let it fail."""
        # A broken connection is the first sign of a lost node, long before the cluster declares the node dead.
        lost = isinstance(error, ActorUnavailableError | ObjectLostError) or not node_alive(info.node)
        ticket = request.ticket
        (self._losses if lost else self._deaths)[ticket] += 1
        log.warning("worker %s was lost evaluating %s: %s", info.name, ticket, reason_of(error))
        kind: FailureKind = "timeout" if isinstance(error, TimeoutError) else "worker"
        if self._deaths[ticket] >= self._workers.max_attempts:
            what = "outran its time" if kind == "timeout" else "killed its worker"
            failure = f"{what} {self._deaths[ticket]} times, last: {reason_of(error)}"
        elif self._losses[ticket] >= _MAX_LOSSES:
            failure = f"lost its worker {self._losses[ticket]} times, last: {reason_of(error)}"
        else:
            self._queue.appendleft(request)
            return
        tries = self._tries(ticket)
        self._failed.append(EvaluationReply(ticket, {}, failure, 0.0, info.name, kind, attempts=tries))

    def _tries(self, ticket: str) -> int:
        """How often a request that has ended was tried in vain; nothing more will be asked about it."""
        self._overtaken.pop(ticket, None)
        return self._deaths.pop(ticket, 0) + self._losses.pop(ticket, 0)

    def _expire(self) -> None:
        """Kill workers whose evaluation outran its limit, and give up when no worker gets ready in time."""
        now = time.monotonic()
        limit = self._workers.timeout_s
        for slot in self._slots:
            if slot.request is not None and now - slot.started_at > limit:
                self._bury(slot, TimeoutError(f"evaluation took longer than timeout_s = {limit:g}"))
        waited = now - min((slot.started_at for slot in self._slots), default=now)
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


def actor_class(worker: type[EvaluationWorker]) -> type:
    """The worker with what only an actor needs: its node's id, and splits fetched once from the object store."""

    class Actor(worker):  # type: ignore[misc, valid-type]
        def node_info(self) -> WorkerInfo:
            return self.info(ray.get_runtime_context().get_node_id())

        def evaluate_refs(self, request: EvaluationRequest, references: list[Any]) -> EvaluationReply:
            return self.evaluate(request, self.fetched(request, references))

        def fetched(self, request: EvaluationRequest, references: list[Any]) -> tuple[PreparedSplit, ...]:
            known = self.__dict__.setdefault("known_splits", {})
            for key, reference in zip(request.fingerprints, references, strict=True):
                if key not in known:
                    known[key] = ray.get(reference)
            return tuple(known[key] for key in request.fingerprints)

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
