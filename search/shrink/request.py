"""Making a smaller checkpoint of a checkpoint and files of requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moevolve.search.interface.request import record
from moevolve.search.running.observer import SILENT, Observer
from moevolve.search.shrink.parameters import ShrinkParameters
from moevolve.search.text import clock

if TYPE_CHECKING:
    from moevolve.search.shrink.result import ShrinkPlan, ShrinkResult


@record
class ShrinkRequest(ShrinkParameters):
    """Make a smaller checkpoint of a mixture of experts or a dense model, for what your files of requests ask for.

    Choose settings for this machine, search, and export the winner with a page of its costs. It is an ordinary
    search in the store. Giving the same request again continues it.

    Raises:
        UserError: a file of requests is malformed, the model can't be had, fits in no way, can't be made so small or
            is that small already, its answers are mostly wrong, the time is too short, or the folder is taken.
        StoreError: the store can't be opened, or the search was cancelled.
        PoolError: no worker can be started; giving the same request again continues the search.
        ExportError: the checkpoint failed its verification, or is larger than asked.
        ProfileError: the process that times the new checkpoint has ended; it is written all the same.
    """

    def answer(self, *, observer: Observer = SILENT) -> ShrinkResult | ShrinkPlan:
        begun = time.monotonic()
        # What takes seconds to import comes last: what is wrong in a request is reported at once.
        from moevolve.search.shrink.goal import read_goal

        goal = read_goal(self)
        if goal.seconds is not None:
            observer.on_note(f"--time {self.time}: everything is to end by {clock(goal.seconds)}")
        observer.on_stage("starting")
        from moevolve.search.shrink.record import known_record, known_store
        from moevolve.search.shrink.settings import refuse_wrong_settings

        refuse_wrong_settings(goal)
        with known_store(goal) as store:
            known_record(goal, store)

        from moevolve.search.shrink.shrink import shrink

        return shrink(goal, observer, begun)


def refuse_wrong(request: ShrinkParameters) -> None:
    """Raise UserError if a request contradicts itself or the model's config.json."""
    from moevolve.search.shrink.goal import read_goal
    from moevolve.search.shrink.settings import refuse_wrong_settings

    refuse_wrong_settings(read_goal(request))
