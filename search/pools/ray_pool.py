"""A pool of worker actors on Ray: it keeps them busy, replaces lost ones, and bounds each candidate's attempts."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from moevolve.evaluators.errors import FailureKind, UserError
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import WorkersSection
from moevolve.search.pools.base import PoolError
from moevolve.search.pools.ray_actor import ModelProbe, kill, node_alive, out_of_reach, reason_of, worker_actor
from moevolve.search.pools.ray_cluster import start_ray
from moevolve.workers.contract.capacity import NeededMemory, NoRoomError
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.contract.messages import ROUND, EvaluationReply, EvaluationRequest, WorkerInfo
from moevolve.workers.contract.settings import EngineConfig, ModelConfig

log = logging.getLogger(__name__)

# Number of workers that a candidate may kill or keep too long before it fails: one may be chance, such as memory that
# another program took.
_MAX_DEATHS = 3

# Number of workers that a candidate may lose to lost nodes before it fails. Losing a node is no fault of the candidate,
# so the number is far above `_MAX_DEATHS`; only a cluster that loses nodes all the time reaches it.
_MAX_LOSSES = 10

# Number of failed starts in a row, on every worker, after which the pool gives up: one may be chance, such as a GPU
# that another process is just leaving.
_FAILED_STARTS = 3

_PAUSE_S = 1.0
# First and longest pause before a worker that failed to start is started again; each is twice the one before. So a node
# that recovers is used within a minute, and a broken one loads no checkpoint over and over.
_LONGEST_PAUSE_S = 60.0

# Interval at which the wait for a calibration calls its `check`, as often as a lease is renewed.
_CHECK_S = 1.0

# Number of candidates that a worker is supposed to have repaired still, so that it gets their other splits first.
_RECENT = 8

# Key of a calibration's attempts, in place of a request's ticket.
_CALIBRATION = "the calibration"

# The statistics to measure, and the splits whose prompts are run.
_CalibrationJob = tuple[Measurement, tuple[PreparedSplit, ...]]


@dataclass(eq=False)
class _Seat:
    """A worker's place in the pool: its actor, from creation to loss, and what that is doing.

    Attributes:
        actor: Ray's handle; None until the actor may be created.
        start_at: Monotonic time at which the actor may be created.
        failed_starts: Number of failed starts in a row.
        no_room: Error of the last start, if there was too little memory.
        pending: Ray's reference to the present call's result: the actor's node, the loaded worker, or a reply.
        node, host: Ray's node id and the host name of the actor; empty until Ray has found room for it.
        info: Description of the worker; None until its model is loaded.
        requests: Requests under evaluation, on the same splits.
        recent: Phenotype hashes of its latest requests, whose repairs the worker may still have.
        job: Calibration in progress, if any.
        since: Monotonic time at which the present call began.
    """

    actor: Any = None
    start_at: float = 0.0
    failed_starts: int = 0
    no_room: NoRoomError | None = None
    pending: ray.ObjectRef | None = None
    node: str = ""
    host: str = ""
    info: WorkerInfo | None = None
    requests: tuple[EvaluationRequest, ...] = ()
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=_RECENT))
    job: _CalibrationJob | None = None
    since: float = field(default_factory=time.monotonic)

    @property
    def busy(self) -> bool:
        return bool(self.requests) or self.job is not None

    def wait_for(self, pending: ray.ObjectRef) -> None:
        """Begin a call whose result is the reference."""
        self.pending, self.since = pending, time.monotonic()


class RayPool:
    """A pool of workers that are Ray actors.

    A worker that dies, reports a fault of its own (`WorkerFault`) or exceeds `timeout_s` is replaced, and its candidate
    is evaluated again. This counts as an attempt of the candidate, unless the worker's node is lost or out of reach.
    After `_MAX_DEATHS` attempts the candidate fails, with the kind `worker` or `timeout`. Lost nodes have a bound of
    their own, which only a broken cluster reaches. A calibration is attempted again likewise.

    A worker that can't start, or hasn't loaded its model `timeout_s` after Ray has found room for it, is started
    again after a growing pause. Meanwhile the pool works with those that are ready. If none is ready and every start
    fails, it gives up. Workers that no node has room for wait in Ray.

    Args:
        workers: Number of workers, their resources and time limits.
        model: Checkpoint that every worker loads.
        engine: Settings of the workers' engines.
        splits: Prepared splits by fingerprint; each worker fetches them once.
        worker: Makes the worker in its actor's process; None makes an `EvaluationWorker` (tests inject faults).
        needed: Memory that a worker must find before it loads the model; None skips the check.
        probe: Source of the first worker's actor.
        fits: Folder of fitted layers that workers on the same machine share; None for none.

    `poll` raises NoRoomError if no worker is ready and every worker that got a node has found too little memory.
    """

    def __init__(
        self,
        workers: WorkersSection,
        model: ModelConfig,
        engine: EngineConfig,
        splits: Mapping[str, PreparedSplit],
        worker: Callable[..., object] | None = None,
        needed: NeededMemory | None = None,
        probe: ModelProbe | None = None,
        fits: Path | None = None,
    ) -> None:
        start_ray(workers)
        self._workers = workers
        self._splits: dict[str, ray.ObjectRef] = {}
        # Those that need all layers of a candidate at once.
        self._decoded: set[str] = set()
        self.add_splits(splits)
        self._actor_class = worker_actor(workers, worker)
        self._first = None if probe is None else probe.take()
        self._load_args = (model, engine, needed, fits)
        self._queue: deque[EvaluationRequest] = deque()
        # By ticket: workers that died or were replaced during the request, and workers lost with their nodes.
        self._deaths: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._failed: list[EvaluationReply] = []
        # The calibration that waits for a worker, and the finished one.
        self._job: _CalibrationJob | None = None
        self._calibrated: bytes | None = None
        self._count = workers.least
        self._seats: list[_Seat] = []
        self._resize_now()

    def add_splits(self, splits: Mapping[str, PreparedSplit]) -> None:
        for fingerprint in splits.keys() - self._splits.keys():
            split = splits[fingerprint]
            self._splits[fingerprint] = ray.put(split)
            if FITNESSES[split.fitness].decodes(split.max_new_tokens):
                self._decoded.add(fingerprint)

    def submit(self, request: EvaluationRequest) -> None:
        self._queue.append(request)
        # A worker that runs one layer at a time gets what is submitted until the next poll, together.
        if not any(seat.info is not None and seat.info.by_layer for seat in self._seats):
            self._dispatch()

    def poll(self, timeout: float) -> list[EvaluationReply]:
        self._dispatch()
        pending = {seat.pending: seat for seat in self._seats if seat.pending is not None}
        replies: list[EvaluationReply] = []
        if pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=timeout)
            more, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0) if ready else ([], [])
            for reference in more:
                replies += self._collect(pending[reference])
        elif not self._failed:
            time.sleep(timeout)
        self._check_time_limits()
        self._resize_now()
        self._dispatch()
        replies += self._failed
        self._failed = []
        return replies

    def calibrate(
        self,
        measurement: Measurement,
        splits: tuple[PreparedSplit, ...],
        check: Callable[[], object] = lambda: None,
    ) -> bytes:
        """Calibrate on the first free worker, while others load."""
        replies: list[EvaluationReply] = []
        self._job, self._calibrated = (measurement, splits), None
        self._dispatch()
        try:
            while self._calibrated is None:
                check()
                replies += self.poll(_CHECK_S)
            return self._calibrated
        finally:
            self._job = self._calibrated = None
            self._pop_attempts(_CALIBRATION)
            self._failed = replies + self._failed
            for seat in [seat for seat in self._seats if seat.job is not None]:  # the calibration was interrupted
                self._replace(seat, _Seat())

    @property
    def ready(self) -> int:
        """Number of workers whose model is loaded."""
        return sum(seat.info is not None for seat in self._seats)

    def resize(self, count: int, at_once: bool = False) -> None:
        """Change the number of workers: those without a loaded model stop first, which is no candidate's attempt."""
        self._count = count
        if at_once:
            for seat in [seat for seat in self._seats if seat.requests][count:]:
                self._queue.extendleft(reversed(seat.requests))
                seat.requests, seat.pending = (), None
        self._resize_now()

    def close(self) -> None:
        for actor in (self._first, *(seat.actor for seat in self._seats)):
            kill(actor)
        self._first, self._seats = None, []

    def _resize_now(self) -> None:
        """Stop idle surplus workers, add missing ones, and create the actors whose pause is over."""
        idle = sorted((seat for seat in self._seats if not seat.busy), key=lambda seat: seat.info is not None)
        for seat in idle[: max(0, len(self._seats) - self._count)]:
            kill(seat.actor)
            self._seats.remove(seat)
        self._seats += [_Seat() for _ in range(self._count - len(self._seats))]
        for seat in self._seats:
            if seat.actor is None and seat.start_at <= time.monotonic():
                seat.actor = self._new_actor()
                seat.wait_for(seat.actor.place.remote())

    def _new_actor(self) -> ActorHandle:
        actor, self._first = self._first, None
        return actor or self._actor_class.remote()

    def _dispatch(self) -> None:
        free = [seat for seat in self._seats if seat.info is not None and not seat.busy]
        if free and self._job is not None:
            seat, *free = free
            seat.job, self._job = self._job, None
            seat.wait_for(seat.actor.calibrate.remote(*seat.job))
        while free and self._queue:
            request, seat = self._next(free)
            seat.requests = self._round(request, seat, -(-len(self._queue) // len(free)))
            free.remove(seat)
            taken = {each.ticket for each in seat.requests}
            self._queue = deque(each for each in self._queue if each.ticket not in taken)
            seat.recent.extend(each.edit.phenotype_hash for each in seat.requests)
            references = [self._splits[key] for key in request.fingerprints]
            seat.wait_for(seat.actor.evaluate_refs.remote(seat.requests, references))

    def _round(self, request: EvaluationRequest, seat: _Seat, most: int) -> tuple[EvaluationRequest, ...]:
        """Return a request with those that a worker evaluates together with it, one layer at a time.

        A candidate that was evaluated when a worker was lost is evaluated alone, so that others don't fail with it.
        """
        assert seat.info is not None

        def tried(each: EvaluationRequest) -> bool:
            return self._deaths[each.ticket] + self._losses[each.ticket] > 0

        if not seat.info.by_layer or tried(request) or self._decoded.intersection(request.fingerprints):
            return (request,)
        elsewhere = self._elsewhere(seat)
        others = [
            each
            for each in self._queue
            if each is not request
            and each.fingerprints == request.fingerprints
            and not tried(each)
            and each.edit.phenotype_hash not in elsewhere
        ]
        return (request, *others[: min(most, ROUND) - 1])

    def _next(self, free: Sequence[_Seat]) -> tuple[EvaluationRequest, _Seat]:
        """Return a queued request and a free worker, so that few candidates are repaired anew.

        The worker may still have the candidate's repair; or else, if possible, no other one has.
        """
        having = {candidate: seat for seat in reversed(free) for candidate in seat.recent}
        for request in self._queue:
            if (seat := having.get(request.edit.phenotype_hash)) is not None:
                return request, seat
        elsewhere = self._elsewhere(free[0])
        new = (each for each in self._queue if each.edit.phenotype_hash not in elsewhere)
        return next(new, self._queue[0]), free[0]

    def _elsewhere(self, seat: _Seat) -> set[str]:
        """Candidates whose repairs other workers may still have, and this one hasn't."""
        return {candidate for other in self._seats for candidate in other.recent}.difference(seat.recent)

    def _collect(self, seat: _Seat) -> list[EvaluationReply]:
        """Take the result of a seat's finished call, or replace its worker if the call failed."""
        try:
            value = ray.get(seat.pending)
        except RayError as error:
            if seat.job is not None and isinstance(error, RayTaskError):
                if isinstance(error.cause, UserError):
                    raise UserError(str(error.cause)) from error
                raise PoolError(f"{_CALIBRATION} failed: {reason_of(error)}") from error
            self._replace_lost(seat, error)
            return []
        seat.pending = None
        if not seat.node:
            seat.node, seat.host = value
            seat.wait_for(seat.actor.load.remote(*self._load_args))
            return []
        if seat.info is None:
            seat.info, seat.failed_starts = value, 0
            return []
        if seat.job is not None:
            seat.job, self._calibrated = None, value
            return []
        seat.requests = ()
        return [replace(reply, attempts=self._pop_attempts(reply.ticket) + 1) for reply in value]

    def _replace_lost(self, seat: _Seat, error: Exception) -> None:
        """Replace a worker that is lost or at fault, and attempt its candidate or calibration again or fail it."""
        fresh = _Seat()
        if seat.info is None:
            fresh = self._after_failed_start(seat, error)
        elif seat.requests:
            for request in reversed(seat.requests):
                self._retry_or_fail(request, seat.info, error)
        elif seat.job is not None:
            if (reason := self._reason_to_give_up(_CALIBRATION, seat.info, error)) is not None:
                raise PoolError(f"{_CALIBRATION} failed: it {reason}") from error
            self._job = seat.job
        self._replace(seat, fresh)

    def _replace(self, seat: _Seat, fresh: _Seat) -> None:
        # A worker that is at fault or out of reach must not return and hold resources; killing a dead one is harmless.
        kill(seat.actor)
        self._seats[self._seats.index(seat)] = fresh

    def _after_failed_start(self, seat: _Seat, error: Exception) -> _Seat:
        """Return the replacement of a worker whose model isn't loaded, after a pause.

        Raises:
            NoRoomError: No worker is ready, and all that got a node have found too little memory.
            UserError: No worker is ready, and the model can't be loaded: on this machine, for a calibration, or several
                times on every worker.
            PoolError: No worker is ready, and all have failed to start several times for other reasons.
        """
        lost = out_of_reach(error) or (seat.node != "" and not node_alive(seat.node))
        seat.failed_starts += not lost
        cause = error.cause if isinstance(error, RayTaskError) else None
        seat.no_room = cause if isinstance(cause, NoRoomError) else None
        if seat.no_room is not None and not self.ready and all(each.no_room for each in self._seats if each.node):
            raise NoRoomError(str(seat.no_room)) from error
        refused = not self.ready and seat.no_room is None and isinstance(cause, UserError)
        if refused and (self._job is not None or self._workers.cluster is None):
            raise UserError(str(cause)) from error  # another start wouldn't change what is wrong with the model
        if not self.ready and all(each.failed_starts >= _FAILED_STARTS for each in self._seats):
            raise UserError(str(cause)) if refused else PoolError(f"workers can't start: {reason_of(error)}") from error
        pause = min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(seat.failed_starts - 1, 16)) if seat.failed_starts else 0.0
        log.warning(
            "worker %d of %d can't start%s: %s; tried again in %.0f s, %d are ready meanwhile",
            self._seats.index(seat) + 1,
            len(self._seats),
            seat.host and f" on {seat.host}",
            reason_of(error),
            pause,
            self.ready,
        )
        return _Seat(start_at=time.monotonic() + pause, failed_starts=seat.failed_starts, no_room=seat.no_room)

    def _retry_or_fail(self, request: EvaluationRequest, info: WorkerInfo, error: Exception) -> None:
        """Queue the request of a lost worker again, or fail it after too many attempts."""
        ticket = request.ticket
        failure = self._reason_to_give_up(ticket, info, error)
        if failure is None:
            self._queue.appendleft(request)
            return
        kind: FailureKind = "timeout" if isinstance(error, TimeoutError) else "worker"
        tries = self._pop_attempts(ticket)
        self._failed.append(EvaluationReply(ticket, {}, failure, 0.0, info.name, kind, attempts=tries))

    def _reason_to_give_up(self, ticket: str, info: WorkerInfo, error: Exception) -> str | None:
        """Count a lost worker; the reason not to attempt its work again, if there is one."""
        lost = out_of_reach(error) or not node_alive(info.node)
        (self._losses if lost else self._deaths)[ticket] += 1
        log.warning("worker %s was lost evaluating %s: %s", info.name, ticket, reason_of(error))
        if self._deaths[ticket] >= _MAX_DEATHS:
            what = "outran its time" if isinstance(error, TimeoutError) else "killed its worker"
            return f"{what} {self._deaths[ticket]} times, last: {reason_of(error)}"
        if self._losses[ticket] >= _MAX_LOSSES:
            return f"lost its worker {self._losses[ticket]} times, last: {reason_of(error)}"
        return None

    def _pop_attempts(self, ticket: str) -> int:
        """Return the number of failed attempts of a request that has ended; its counts are removed."""
        return self._deaths.pop(ticket, 0) + self._losses.pop(ticket, 0)

    def _check_time_limits(self) -> None:
        """Replace workers whose evaluation or start exceeds the time limit; PoolError if none is ready in time."""
        now, workers, limit = time.monotonic(), self._workers, self._workers.timeout_s
        late = [seat for seat in self._seats if now - seat.since > limit * max(1, len(seat.requests))]
        if late and all(seat in late and seat.info is None for seat in self._seats):
            why = "the model loads slowly"
            if not any(seat.node for seat in late):
                why = f"the cluster has no room for num_cpus={workers.num_cpus:g}, num_gpus={workers.num_gpus:g}"
            raise PoolError(f"no worker was ready after {limit:g} s (workers.timeout_s): {why}")
        if any(seat.job is not None for seat in late):
            raise PoolError(
                f"measuring the model before the search took longer than {limit:g} s; raise workers.timeout_s, or "
                "measure on fewer tokens (genome.calibration_tokens)"
            )
        for seat in late:
            if seat.requests or (seat.info is None and seat.node):
                what = "evaluation took longer" if seat.info is not None else "the model took longer to load"
                self._replace_lost(seat, TimeoutError(f"{what} than workers.timeout_s = {limit:g}"))
