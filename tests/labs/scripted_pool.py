"""A pool without workers, whose replies arrive as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replies import answer

from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest


class Stopped(Exception):
    """The driver's process is gone."""


def all_of(waiting: Sequence[EvaluationRequest]) -> Sequence[EvaluationRequest]:
    return waiting


def none_of(waiting: Sequence[EvaluationRequest]) -> Sequence[EvaluationRequest]:
    return ()


@dataclass
class ScriptedPool:
    """Replies to requests as a script says.

    Attributes:
        reply: Makes the reply to a request.
        arriving: Chooses the waiting requests, in order of submission, that are answered at a poll.
        stop_at: Number of the poll that raises an error, from 0; None raises none.
        error: Error that this poll raises.
        requests: All requests in order of submission.
        waiting: Requests that aren't answered.
        ready: Further replies that arrive at the next poll.
        delivered: Phenotype hashes of the answered requests, in order of arrival.
        busiest: Largest number of waiting requests.
    """

    reply: Callable[[EvaluationRequest], EvaluationReply] = answer
    arriving: Callable[[Sequence[EvaluationRequest]], Sequence[EvaluationRequest]] = all_of
    stop_at: int | None = None
    error: type[BaseException] = Stopped
    requests: list[EvaluationRequest] = field(default_factory=list)
    waiting: list[EvaluationRequest] = field(default_factory=list)
    ready: list[EvaluationReply] = field(default_factory=list)
    delivered: list[str] = field(default_factory=list)
    busiest: int = 0
    _polls: int = 0

    @property
    def submitted(self) -> list[str]:
        """Phenotype hashes in order of submission."""
        return [request.edit.phenotype_hash for request in self.requests]

    def submit(self, request: EvaluationRequest) -> None:
        self.requests.append(request)
        self.waiting.append(request)
        self.busiest = max(self.busiest, len(self.waiting))

    def poll(self, timeout: float) -> list[EvaluationReply]:
        if self._polls == self.stop_at:
            raise self.error
        self._polls += 1
        answered = self.arriving(self.waiting)
        self.waiting = [request for request in self.waiting if not any(request is one for one in answered)]
        self.delivered += [request.edit.phenotype_hash for request in answered]
        replies, self.ready = [*self.ready, *map(self.reply, answered)], []
        return replies

    def resize(self, count: int, at_once: bool = False) -> None: ...

    def close(self) -> None:
        self.waiting.clear()
