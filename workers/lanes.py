"""Lanes: evaluations that run by turns and wait for each other where they want the model.

Each evaluation is ordinary code on a thread of its own, but only one thread runs at a time, handed the turn and handing
it back, so nothing they share needs a lock and their order is fixed. Where an evaluation would run the model it asks
for a pass instead, and stands still until whoever leads the lanes gives the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from torch import Tensor

from moevolve.workers.forward import Forward, PassRequest


class _Left(BaseException):
    """The lane is given up; not an `Exception`, so that nobody takes it for the candidate's fault."""


class Lane:
    """One evaluation.

    Attributes:
        place: its number.
        request: the pass it waits for; None once it is over.
    """

    def __init__(self, place: int, work: Callable[[Lane], None]) -> None:
        """Start, and run up to the first pass.

        Args:
            place: its number.
            work: the evaluation, which is given its lane to ask for passes.
        """
        self.place = place
        self.request: PassRequest | None = None
        self._asked: SimpleQueue[PassRequest | None] = SimpleQueue()
        self._given: SimpleQueue[Tensor | BaseException] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=f"lane-{place}", daemon=True)
        self._thread.start()
        self.request = self._asked.get()

    def give(self, outcome: Tensor | BaseException) -> None:
        """Give the result of the pass it waits for, or what to raise instead, and let it run up to the next."""
        self._given.put(outcome)
        self.request = self._asked.get()

    def leave(self) -> None:
        """End it if it isn't over; whatever comes of it is dropped."""
        while self.request is not None:
            self.give(_Left())
        self._thread.join()

    def finish(self) -> None:
        """Raise what the evaluation raised, once it is over."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def ask(self, request: PassRequest) -> Tensor:
        """Wait for a pass. Called from within the work."""
        self._asked.put(request)
        outcome = self._given.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _run(self, work: Callable[[Lane], None]) -> None:
        try:
            work(self)
        except BaseException as error:
            self._error = error
        finally:
            self._asked.put(None)


class LaneForward(Forward):
    """A forward whose passes are asked of a lane.

    Attributes:
        lane: whose turn it is used in; set it before.
    """

    def __init__(self, forward: Forward) -> None:
        """Stand for a forward of the same model."""
        self.__dict__.update(forward.__dict__)
        self.lane: Lane | None = None

    def run(self, request: PassRequest) -> Tensor:
        """See `Forward.run`."""
        if self.lane is None:
            raise ValueError("there is no lane to ask")
        return self.lane.ask(request)
