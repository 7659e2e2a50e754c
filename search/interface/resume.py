"""Continuing a search, and retrying its failures."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Annotated

from moevolve.search.config.files import override_lines
from moevolve.search.interface.parameters import SETTINGS, SILENT, Overrides, RayAddress, SearchRef, Watcher
from moevolve.search.interface.request import Request, about, record
from moevolve.search.loop.final_table import FinalTable
from moevolve.store.repository import Store


@record
class ResumeRequest(Request):
    """Continue a search from the store; the population comes out as if it had never stopped.

    The answer is its final table. A paused search goes on where it runs, and there is no answer.

    Raises:
        UserError: model, tasks or settings are not what the search was launched with.
        StoreError: there is no such store or search, another process runs it, or it was cancelled.
        PoolError: no worker can be had; try again.
    """

    writes = True
    search: SearchRef
    _: KW_ONLY
    overrides: Annotated[Overrides, about("Change settings of `workers.*` or `final.*`, or `loggers`."), SETTINGS] = ()
    address: RayAddress = None

    def answer(self, store: Store, *, observer: Watcher = SILENT) -> FinalTable | None:
        from moevolve.search.running.resume import resume

        return resume(store, self.search, observer, override_lines(self.overrides), self.address)


@record
class RetryRequest(ResumeRequest):
    """Evaluate individuals again that failed because of workers or time limits, and all later ones that saw them.

    The answer is the search's final table; there is none if there is nothing to retry.

    Raises:
        UserError, StoreError, PoolError: as `resume`.
    """

    def answer(self, store: Store, *, observer: Watcher = SILENT) -> FinalTable | None:
        from moevolve.search.running.resume import retry

        return retry(store, self.search, observer, override_lines(self.overrides), self.address)
