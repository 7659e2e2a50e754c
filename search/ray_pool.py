"""A pool of worker actors on Ray: keeps them busy, replaces the dead, bounds every candidate's tries."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.affinity import Recent
from moevolve.search.cluster import start_ray
from moevolve.search.config import WorkersSection
from moevolve.search.pool import Completion, PoolError
from moevolve.search.ray_actors import actor_class, node_alive, reason_of
from moevolve.search.sharing import Sharing, can_share, fellows
from moevolve.workers.actor import EvaluationWorker, WorkerInfo
from moevolve.workers.calibration.base import CalibrationRecipe
from moevolve.workers.config import ALL_SHORTCUTS, POPULATION_SIZES, EngineConfig, ModelConfig, Shortcuts
from moevolve.workers.messages import EvaluationReply, EvaluationRequest, PopulationChoice

log = logging.getLogger(__name__)

_MAX_LOSSES = 10
"""Workers a candidate may lose to nodes that go away before it is given up."""

_OVERTAKEN = 4
"""How often later candidates may be taken before the first in the queue, which everything may soon wait for."""


@dataclass(eq=False)
class _Task:
    """A request and its tries; `suspect`: its worker died with others aboard, so that it goes alone from then on."""

    request: EvaluationRequest
    deaths: int = 0
    losses: int = 0
    overtaken: int = 0
    suspect: bool = False

    @property
    def attempts(self) -> int:
        return self.deaths + self.losses + self.suspect + 1


@dataclass
class _Slot:
    """One worker actor and what it is doing."""

    actor: Any
    starting: Any
    info: WorkerInfo | None = None
    tasks: list[_Task] = field(default_factory=list)
    result: Any = None
    started_at: float = field(default_factory=time.monotonic)
    recent: Recent = field(default_factory=Recent)

    @property
    def pending(self) -> Any:
        """The object reference this slot is waiting for, if any."""
        return self.starting if self.info is None else self.result


class RayPool:
    """The pool on Ray.

    A worker's death is counted against the candidate it was evaluating only if the worker's node is still alive; after
    `max_attempts` such deaths the candidate fails with that reason. A node that is lost or out of reach counts against
    nobody, up to a bound that only a broken cluster reaches. With `engine.population` a worker gets several candidates
    that share passes; if it dies, that counts against none of them, and they are evaluated again one by one. With
    `auto`, how many is chosen before the first that can share is sent, by the worker that is free then (`sharing`).

    Args:
        workers: how many, and what each reserves.
        model: checkpoint every worker loads.
        engine: how prompts are run.
        splits: prepared splits by fingerprint; shipped to each worker once.
        worker: the actor's class (tests inject faults through a subclass).
        shortcuts: which ways to compute less the workers take.
        in_flight: most candidates that there are at once, for all workers; None if unknown.
    """

    def __init__(
        self,
        workers: WorkersSection,
        model: ModelConfig,
        engine: EngineConfig,
        splits: Mapping[str, PreparedSplit],
        worker: type[EvaluationWorker] = EvaluationWorker,
        shortcuts: Shortcuts = ALL_SHORTCUTS,
        in_flight: int | None = None,
    ) -> None:
        start_ray(workers)
        self._workers = workers
        self.sharing = Sharing(engine.population)
        # Larger passes would leave other workers without candidates.
        self._most = POPULATION_SIZES[-1] if in_flight is None else max(1, in_flight // workers.count)
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
            if slot.info is None or slot.tasks or not self._settle(slot, slot.info):
                continue
            slot.tasks = self._next_for(slot)
            requests = tuple(task.request for task in slot.tasks)
            slot.result = slot.actor.evaluate_refs.remote(requests, self._refs(requests[0]), self.sharing.chosen)
            slot.started_at = time.monotonic()

    def _settle(self, slot: _Slot, info: WorkerInfo) -> bool:
        """Have it settled how many share a pass before the first that can is sent; False if the worker was lost."""
        if not self.sharing.is_open:
            return True
        first = next((task.request for task in self._queue if can_share(task.request)), None)
        if first is None:
            return True

        def measure() -> PopulationChoice:
            answer = slot.actor.choose_refs.remote(first, self._refs(first), self._most)
            choice: PopulationChoice = ray.get(answer, timeout=self._workers.timeout_s)
            return choice

        try:
            self.sharing.settle(info.hardware, measure)
        except (RayActorError, RayTaskError, GetTimeoutError) as error:
            log.warning("worker %s couldn't measure engine.population: %s", info.name, reason_of(error))
            self.sharing.give_up(info.hardware, reason_of(error))
            self._bury(slot, error)
            return False
        return True

    def _refs(self, request: EvaluationRequest) -> list[Any]:
        """A request's splits in Ray's object store."""
        return [self._splits[key] for key in request.splits]

    def _next_for(self, slot: _Slot) -> list[_Task]:
        """Take the waiting candidate that can start from most of what the worker keeps, or several to share passes."""
        first = self._queue[0]
        if self.sharing.size > 1:
            return self._party()
        if not self._workers.reuse_bytes or first.overtaken >= _OVERTAKEN:
            place = 0
        else:
            place = slot.recent.best(task.request.edit for task in self._queue)
        first.overtaken += place > 0
        task = self._queue[place]
        del self._queue[place]
        slot.recent.add(task.request.edit)
        return [task]

    def _party(self) -> list[_Task]:
        """Take the first in the queue, and those that go along with it."""
        first = self._queue.popleft()
        if first.suspect:
            return [first]
        waiting = [task for task in self._queue if not task.suspect]
        places = fellows(first.request, (task.request for task in waiting), self.sharing.size - 1)
        party = [waiting[place] for place in places]
        for task in party:
            self._queue.remove(task)
        return [first, *party]

    def _collect(self, slot: _Slot) -> list[Completion]:
        """Take a slot's finished reference: a loaded worker, a reply, or a death."""
        try:
            value = ray.get(slot.pending)
        except (RayActorError, RayTaskError) as error:
            self._bury(slot, error)
            return []
        if slot.info is None:
            slot.info = value
            self._failed_starts = 0
            return []
        tasks, slot.tasks, slot.result = slot.tasks, [], None
        return [Completion(reply, task.attempts) for reply, task in zip(value, tasks, strict=True)]

    def _bury(self, slot: _Slot, error: Exception) -> None:
        """Replace a dead worker and decide what becomes of its candidates."""
        if slot.info is None:
            self._failed_starts += 1
            if self._failed_starts > 2 * self._workers.count:
                raise PoolError(f"workers can't start: {reason_of(error)}") from error
        elif slot.tasks:
            self._charge(slot.tasks, slot.info, error)
        # Harmless if it is dead; one that only can't be reached must not come back and hold resources.
        ray.kill(slot.actor)
        fresh = self._start()
        slot.actor, slot.starting, slot.started_at = fresh.actor, fresh.starting, fresh.started_at
        slot.info = slot.result = None
        slot.tasks = []
        slot.recent = Recent()

    def _charge(self, tasks: list[_Task], info: WorkerInfo, error: Exception) -> None:
        # A broken connection is the first sign of a lost node, long before the cluster declares the node dead.
        lost = isinstance(error, ActorUnavailableError) or not node_alive(info.node)
        for task in reversed(tasks):
            if lost:
                task.losses += 1
            elif len(tasks) > 1:
                task.suspect = True
            else:
                task.deaths += 1
            log.warning("worker %s died evaluating %s: %s", info.name, task.request.ticket, reason_of(error))
            if task.deaths >= self._workers.max_attempts:
                failure = f"killed its worker {task.deaths} times, last: {reason_of(error)}"
            elif task.losses >= _MAX_LOSSES:
                failure = f"lost its worker {task.losses} times, last: {reason_of(error)}"
            else:
                self._queue.appendleft(task)
                continue
            reply = EvaluationReply(task.request.ticket, (), failure, 0.0, info.name)
            self._failed.append(Completion(reply, task.attempts - 1))

    def _expire(self) -> None:
        """Kill workers whose evaluation outran its limit, and give up when no worker gets ready in time."""
        now = time.monotonic()
        for slot in self._slots:
            # A pass that several share, or could, takes up to so many times as long.
            times = self.sharing.size if slot.tasks and can_share(slot.tasks[0].request) else 1
            if slot.tasks and now - slot.started_at > times * self._workers.timeout_s:
                limit = f"timeout_s = {self._workers.timeout_s:g}" + (f", {times} times" if times > 1 else "")
                self._bury(slot, TimeoutError(f"evaluation took longer than {limit}"))
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
