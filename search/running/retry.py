"""Evaluating again what failed by nobody's fault but workers' and time's."""

from __future__ import annotations

from moevolve.search.loop.final_table import FinalTable
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.requests.running import RetryRequest
from moevolve.search.running.execute import check_goes_on, execute
from moevolve.search.running.lease_heartbeat import held
from moevolve.search.running.observer import Observer
from moevolve.search.running.resume import changed_setup
from moevolve.store.repository import Store


def retry(store: Store, request: RetryRequest, observer: Observer) -> FinalTable | None:
    """See `RetryRequest`."""
    setup = changed_setup(store, request)
    observer.on_begin(setup.config)
    failures, later = take_back_failures(setup, store)
    if not failures:
        observer.on_note("nothing to retry: no individual failed by fault of a worker or of time")
        return None
    observer.on_note(f"failures to retry: {failures}, later individuals to make again: {later}")
    return execute(setup, store, observer)


def take_back_failures(setup: SearchSetup, store: Store) -> tuple[int, int]:
    """Take a search back to before its failures that no candidate is to blame for: of workers, and of time.

    These individuals are pending again. Those that were made in sight of such a failure are removed, since with other
    scores before them they may come out otherwise; their evaluations stay in the store.

    Returns:
        How many failures were taken back, and how many later individuals are made again.

    Raises:
        UserError: it was cancelled.
        LeaseHeldError: a driver runs it.
    """
    with held(store, setup.search_id) as lease:
        check_goes_on(store, lease)
        history = store.history(setup.search_id)
        blameless = [row.index for row in history if row.status == "failed" and row.failure_kind != "candidate"]
        if not blameless:
            return 0, 0
        schedule, span = setup.schedule, range(setup.schedule.total)
        first = next((index for index in span if schedule.visible(index) > blameless[0]), schedule.total)
        store.retry(lease, first)
    return len(blameless), sum(row.index >= first for row in history)
