"""A pool of worker actors on Ray: keeps them busy, replaces the dead, bounds every candidate's tries."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_actor import (
    FirstWorker,
    kill,
    no_room,
    node_alive,
    out_of_reach,
    reason_of,
    worker_actor,
)
from moevolve.search.pools.ray_cluster import leave_ray, start_ray
from moevolve.workers.contract.capacity import NeededMemory, NoRoomError
from moevolve.workers.contract.edits import CalibrationRecipe, Edit, LayeredEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest, FailureKind, WorkerInfo
from moevolve.workers.contract.settings import ALL_SHORTCUTS, EngineConfig, ModelConfig, Shortcuts

log = logging.getLogger(__name__)

_MAX_LOSSES = 10
"""Workers a candidate may lose to nodes that go away before it is given up."""

_FAILED_STARTS = 3
"""Starts in a row that fail on every worker before no more are tried."""

_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
"""Until a worker that failed to start is started again: the first time, and at most; every time twice as long."""

_CHECK_S = 1.0
"""How often who waits for a calibration looks whether the search is to go on."""

_CALIBRATION = "the calibration"
"""What a calibration is counted under, in place of a request's ticket."""

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


@dataclass(frozen=True, slots=True)
class _Job:
    """A calibration that is wanted: what is measured, and on whose prompts."""

    recipe: CalibrationRecipe
    splits: tuple[PreparedSplit, ...]


@dataclass(eq=False)
class _Slot:
    """One worker actor and what it is doing.

    Attributes:
        actor: None until it may be started.
        start_at: when that is, by the monotonic clock.
        failed_starts: of this worker, in a row.
        no_room: why its last start was refused, if it was for lack of memory.
        pending: the object reference that it is waiting for, if any: its place, its loaded model, or a reply.
        node, host: where Ray has found room for it; empty until then.
        info: of the loaded worker.
        request: what it evaluates.
        job: the calibration that it makes.
        since: when it began what it does: to wait for room, to load, to evaluate, or to calibrate.
        recent: what it evaluated before.
    """

    actor: Any = None
    start_at: float = 0.0
    failed_starts: int = 0
    no_room: NoRoomError | None = None
    pending: Any = None
    node: str = ""
    host: str = ""
    info: WorkerInfo | None = None
    request: EvaluationRequest | None = None
    job: _Job | None = None
    since: float = field(default_factory=time.monotonic)
    recent: Recent = field(default_factory=Recent)

    @property
    def busy(self) -> bool:
        return self.request is not None or self.job is not None

    def wait_for(self, pending: Any) -> None:
        """Begin what ends with an object reference."""
        self.pending, self.since = pending, time.monotonic()


class RayPool:
    """The pool on Ray.

    A worker that dies, that finds itself at fault (`WorkerFault`) or that outruns `timeout_s` is replaced, and its
    candidate evaluated again. That is counted against the candidate unless the worker's node is gone; after
    `max_attempts` the candidate fails with that reason, as a failure of kind `worker` or `timeout`. A node that is
    lost or out of reach counts against nobody, up to a bound that only a broken cluster reaches. A calibration is tried
    again likewise, and gets `start_timeout_s`, like a model that is loaded.

    A worker that can't start, or isn't loaded `start_timeout_s` after Ray has found room for it, is started again,
    after a pause that grows. The pool goes on with those that are ready; it gives up if none is and no start succeeds.

    Args:
        workers: how many, and what each reserves.
        model: checkpoint every worker loads.
        engine: how prompts are run.
        splits: prepared splits by fingerprint; shipped to each worker once.
        worker: makes the worker, in its actor's process; by default an `EvaluationWorker`, which that process alone
            imports (tests inject faults through a subclass).
        shortcuts: which ways to compute less the workers take.
        needed: memory that each has to find before it loads the model, if that is known.
        first: hands over a process for the first worker.

    `poll` raises NoRoomError where no worker is ready and each that was placed has found too little.
    """

    def __init__(
        self,
        workers: WorkersSection,
        model: ModelConfig,
        engine: EngineConfig,
        splits: Mapping[str, PreparedSplit],
        worker: Callable[..., Any] | None = None,
        shortcuts: Shortcuts = ALL_SHORTCUTS,
        needed: NeededMemory | None = None,
        first: FirstWorker | None = None,
    ) -> None:
        start_ray(workers, self)
        self._workers = workers
        self._splits: dict[str, Any] = {}
        self.add_splits(splits)
        self._actor_class: Any = worker_actor(workers, worker)
        self._first = None if first is None else first.take()
        self._load_args: tuple[Any, ...] = (model, engine, shortcuts, workers.activation_cache_bytes, needed)
        self._queue: deque[EvaluationRequest] = deque()
        # By ticket: workers that died or were retired under a request, those that nodes took along, and how often
        # later requests went first.
        self._deaths: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._overtaken: Counter[str] = Counter()
        self._failed: list[EvaluationReply] = []
        # A calibration that waits for a worker, and one that is made.
        self._job: _Job | None = None
        self._calibrated: bytes | None = None
        self._count = workers.least
        self._slots: list[_Slot] = []
        self._fit()

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

    def calibrate(
        self,
        recipe: CalibrationRecipe,
        splits: tuple[PreparedSplit, ...],
        check: Callable[[], object] = lambda: None,
    ) -> bytes:
        """See `Pool`. The first worker that is free makes it, while others load."""
        replies: list[EvaluationReply] = []
        self._job, self._calibrated = _Job(recipe, splits), None
        self._dispatch()
        try:
            while self._calibrated is None:
                check()
                replies += self.poll(_CHECK_S)
            return self._calibrated
        finally:
            self._job = self._calibrated = None
            self._tries(_CALIBRATION)
            self._failed = replies + self._failed
            for slot in [slot for slot in self._slots if slot.job is not None]:  # it was given up
                self._replace(slot, _Slot())

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
                slot.request = slot.pending = None
        self._fit()

    def close(self) -> None:
        for actor in (self._first, *(slot.actor for slot in self._slots)):
            kill(actor)
        self._first, self._slots = None, []
        leave_ray(self)

    def _fit(self) -> None:
        """Have as many workers as wanted, or on the way there as few as have work; start those due."""
        idle = sorted((slot for slot in self._slots if not slot.busy), key=lambda slot: slot.info is not None)
        for slot in idle[: max(0, len(self._slots) - self._count)]:
            kill(slot.actor)
            self._slots.remove(slot)
        self._slots += [_Slot() for _ in range(self._count - len(self._slots))]
        for slot in self._slots:
            if slot.actor is None and slot.start_at <= time.monotonic():
                slot.actor = self._new_actor()
                slot.wait_for(slot.actor.place.remote())

    def _new_actor(self) -> Any:
        first, self._first = self._first, None
        return first or self._actor_class.remote()

    def _dispatch(self) -> None:
        for slot in self._slots:
            if slot.info is None or slot.busy:
                continue
            if self._job is not None:
                job, self._job = self._job, None
                slot.job = job
                slot.wait_for(slot.actor.calibrate.remote(job.recipe, job.splits))
                continue
            if not self._queue:
                return
            request = slot.request = self._next_for(slot)
            slot.wait_for(slot.actor.evaluate_refs.remote(request, self._refs(request)))

    def _refs(self, request: EvaluationRequest) -> list[Any]:
        """A request's splits in Ray's object store."""
        return [self._splits[key] for key in request.fingerprints]

    def _next_for(self, slot: _Slot) -> EvaluationRequest:
        """Take the waiting candidate that can start from most of what the worker keeps."""
        first = self._queue[0].ticket
        if not self._workers.activation_cache_bytes or self._overtaken[first] >= _OVERTAKEN:
            place = 0
        else:
            place = slot.recent.best(request.edit for request in self._queue)
        self._overtaken[first] += place > 0
        request = self._queue[place]
        del self._queue[place]
        slot.recent.add(request.edit)
        return request

    def _collect(self, slot: _Slot) -> list[EvaluationReply]:
        """Take a slot's finished reference: a place for its worker, a loaded worker, work that is done, or a death.

        Raises:
            UserError: the model that is to be calibrated can't be.
            PoolError: the calibration failed, or no start succeeds.
            NoRoomError: see `RayPool`.
        """
        try:
            value = ray.get(slot.pending)
        except RayError as error:
            if slot.job is not None and isinstance(error, RayTaskError):
                if isinstance(error.cause, UserError):
                    raise UserError(str(error.cause)) from error
                raise PoolError(f"{_CALIBRATION} failed: {reason_of(error)}") from error
            self._bury(slot, error)
            return []
        slot.pending = None
        if not slot.node:
            slot.node, slot.host = value
            slot.wait_for(slot.actor.load.remote(*self._load_args))
            return []
        if slot.info is None:
            slot.info, slot.failed_starts = value, 0
            return []
        if slot.job is not None:
            slot.job, self._calibrated = None, value
            return []
        assert slot.request is not None and isinstance(value, EvaluationReply)
        slot.request = None
        return [replace(value, attempts=self._tries(value.ticket) + 1)]

    def _bury(self, slot: _Slot, error: Exception) -> None:
        """Replace a worker that is dead or at fault, and decide what becomes of its candidate or calibration."""
        fresh = _Slot()
        if slot.info is None:
            fresh = self._after_failed_start(slot, error)
        elif slot.request is not None:
            self._charge(slot.request, slot.info, error)
        elif slot.job is not None:
            if (reason := self._given_up(_CALIBRATION, slot.info, error)) is not None:
                raise PoolError(f"{_CALIBRATION} failed: it {reason}") from error
            self._job = slot.job
        self._replace(slot, fresh)

    def _replace(self, slot: _Slot, fresh: _Slot) -> None:
        # Harmless if it is dead; one at fault, or that only can't be reached, must not come back and hold resources.
        kill(slot.actor)
        self._slots[self._slots.index(slot)] = fresh

    def _after_failed_start(self, slot: _Slot, error: Exception) -> _Slot:
        """What takes the place of a worker that has not come to evaluate anything.

        Raises:
            NoRoomError: no worker is ready, and all that were placed have found too little memory.
            UserError: no worker is ready to calibrate the model, which can't be loaded.
            PoolError: no worker is ready, and all have failed to start again and again.
        """
        lost = out_of_reach(error) or (slot.node != "" and not node_alive(slot.node))
        slot.failed_starts += not lost
        slot.no_room = no_room(error)
        if slot.no_room is not None and not self.ready and all(each.no_room for each in self._slots if each.node):
            raise NoRoomError(str(slot.no_room)) from error
        cause = error.cause if isinstance(error, RayTaskError) else None
        if self._job is not None and not self.ready and slot.no_room is None and isinstance(cause, UserError):
            raise UserError(str(cause)) from error
        if not self.ready and all(each.failed_starts >= _FAILED_STARTS for each in self._slots):
            raise PoolError(f"workers can't start: {reason_of(error)}") from error
        pause = min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(slot.failed_starts - 1, 16)) if slot.failed_starts else 0.0
        log.warning(
            "worker %d of %d can't start%s: %s; tried again in %.0f s, %d are ready meanwhile",
            self._slots.index(slot) + 1,
            len(self._slots),
            slot.host and f" on {slot.host}",
            reason_of(error),
            pause,
            self.ready,
        )
        return _Slot(start_at=time.monotonic() + pause, failed_starts=slot.failed_starts, no_room=slot.no_room)

    def _charge(self, request: EvaluationRequest, info: WorkerInfo, error: Exception) -> None:
        """Evaluate the candidate of a worker that is gone again, or let it fail."""
        ticket = request.ticket
        failure = self._given_up(ticket, info, error)
        if failure is None:
            self._queue.appendleft(request)
            return
        kind: FailureKind = "timeout" if isinstance(error, TimeoutError) else "worker"
        tries = self._tries(ticket)
        self._failed.append(EvaluationReply(ticket, {}, failure, 0.0, info.name, kind, attempts=tries))

    def _given_up(self, ticket: str, info: WorkerInfo, error: Exception) -> str | None:
        """Count a worker's end against what it did or its node; why that isn't tried again, None if it is."""
        lost = out_of_reach(error) or not node_alive(info.node)
        (self._losses if lost else self._deaths)[ticket] += 1
        log.warning("worker %s was lost evaluating %s: %s", info.name, ticket, reason_of(error))
        if self._deaths[ticket] >= self._workers.max_attempts:
            what = "outran its time" if isinstance(error, TimeoutError) else "killed its worker"
            return f"{what} {self._deaths[ticket]} times, last: {reason_of(error)}"
        if self._losses[ticket] >= _MAX_LOSSES:
            return f"lost its worker {self._losses[ticket]} times, last: {reason_of(error)}"
        return None

    def _tries(self, ticket: str) -> int:
        """How often a request that has ended was tried in vain; nothing more will be asked about it."""
        self._overtaken.pop(ticket, None)
        return self._deaths.pop(ticket, 0) + self._losses.pop(ticket, 0)

    def _expire(self) -> None:
        """Replace workers whose evaluation, or loading, outran its limit.

        Raises:
            PoolError: none gets ready in time, or the calibration isn't made in time.
        """
        now, limit = time.monotonic(), self._workers.start_timeout_s
        late = [slot for slot in self._slots if slot.info is None and now - slot.since > limit]
        if late and len(late) == len(self._slots):
            raise PoolError(_none_ready(self._workers, any(slot.node for slot in late)))
        for slot in late:
            if slot.node:
                self._bury(
                    slot, TimeoutError(f"the model took longer to load than workers.start_timeout_s = {limit:g}")
                )
        if any(slot.job is not None and now - slot.since > limit for slot in self._slots):
            raise PoolError(
                f"measuring the model before the search took longer than {limit:g} s; raise workers.start_timeout_s, "
                "or measure on fewer tokens (genome.calibration_tokens)"
            )
        limit = self._workers.timeout_s
        for slot in self._slots:
            if slot.request is not None and now - slot.since > limit:
                self._bury(slot, TimeoutError(f"evaluation took longer than workers.timeout_s = {limit:g}"))


def _none_ready(workers: WorkersSection, placed: bool) -> str:
    why = "the model loads slowly"
    if not placed:
        why = f"the cluster has no room for num_cpus={workers.num_cpus:g}, num_gpus={workers.num_gpus:g}"
    return f"no worker was ready after {workers.start_timeout_s:g} s (workers.start_timeout_s): {why}"
