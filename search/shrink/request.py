"""Making a smaller checkpoint of a checkpoint and files of requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moevolve.search.interface.request import record
from moevolve.search.running.observer import SILENT, Observer
from moevolve.search.shrink.options import ShrinkOptions

if TYPE_CHECKING:
    from moevolve.search.shrink.page import ShrinkPlan, ShrinkResult


@record
class ShrinkRequest(ShrinkOptions):
    """Make a smaller checkpoint of a mixture of experts or a dense model, for what your files of requests ask for.

    Choose settings for this machine, search, and export the winner with a page of what it costs. It is an ordinary
    search in the store. Giving the same request again continues it.

    Raises:
        UserError: a file of requests is malformed, the model can't be had, fits in no way, can't be made so small or
            is smaller already, its answers are mostly wrong, the time is too short, the folder is taken, or the
            winner keeps less of the score than asked; or the checkpoint is complete but can't be pushed.
        StoreError: the store can't be opened, or the search was cancelled.
        PoolError: no worker can be started; giving the same request again continues the search.
        ExportError: the checkpoint failed its verification, or is larger than asked.
    """

    def answer(self, *, observer: Observer = SILENT) -> ShrinkResult | ShrinkPlan:
        from moevolve.search.shrink.budget import budget_of, clock, seconds_of

        begun = time.monotonic()
        budget_of(self)
        if self.time is not None:
            observer.on_note(f"--time {self.time}: everything is to end by {clock(seconds_of(self.time))}")
        observer.on_stage("starting")
        # What takes seconds to import comes last.
        from moevolve.search.shrink.shrink import shrink

        return shrink(self, observer, begun)


def refuse_wrong(request: ShrinkRequest) -> None:
    """Raise the error of a request that is wrong whatever the model and the data are.

    Raises:
        UserError: It names the option that is wrong.
    """
    from moevolve.search.shrink.shrink import checked

    checked(request)
