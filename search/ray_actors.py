"""What the pool on Ray makes of workers: actors, and what it learns of their ends."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.actor import EvaluationWorker, WorkerInfo
from moevolve.workers.messages import EvaluationReply, EvaluationRequest


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
