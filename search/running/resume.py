"""Continuing a stored search, or retrying its failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import changed_config, override_lines, parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.running.execute import check_not_cancelled, execute, refuse_cancelled
from moevolve.search.running.lease_heartbeat import brief_lease, unpause
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import Call, call_here, set_up
from moevolve.search.running.weights import check_checkpoint
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store


def resume(store: Store, search: str, observer: Observer, overrides: Sequence[str] = ()) -> FinalTable | None:
    """Continue a search and return its final table; None for a paused one, which goes on where it runs.

    Args:
        store: Store of the search.
        search: Name or id of the search.
        observer: Observer of the search.
        overrides: Changes of settings that don't affect the population, as `KEY=VALUE`.

    Raises:
        UserError, CancelledError: as `set_up_stored`.
        StoreError: another process runs the search; it has to be stopped before settings change.
        PoolError: no worker can be had.
    """
    if not overrides and unpause(store, search):
        return None
    with ModelProbe() as probe:
        setup = _changed_setup(store, search, overrides, probe.call)
        observer.on_begin(setup.config)
        return execute(setup, store, observer, probe=probe)


def _changed_setup(store: StoreReader, search: str, overrides: Sequence[str], call: Call) -> SearchSetup:
    # The store's URL may be another than at launch.
    changes = [*override_lines({"store": store.url}), *overrides]
    return set_up_stored(store, search, lambda stored: changed_config(stored, changes, f"search {search}"), call)


def set_up_stored(
    store: StoreReader,
    name: str,
    adjust: Callable[[RunConfig], RunConfig] = lambda config: config,
    call: Call = call_here,
) -> SearchSetup:
    """Return the setup of a stored search, whose model and tasks must be those it was launched with.

    Args:
        store: Store of the search.
        name: Name or id of the search.
        adjust: Changes settings that don't affect the population.
        call: Calls what imports torch.

    Raises:
        UserError: The model, the tasks or other settings have changed since the launch.
        CancelledError: The search was cancelled.
    """
    record = store.search(name)
    stored = parse_stored_config(record.config, record.name)
    if stored.is_imported:
        raise UserError(f"search {record.name} was imported and can't be resumed; launch a new search")
    refuse_cancelled(record)
    config = adjust(stored)
    if (config.config_hash, config.name) != (stored.config_hash, stored.name):
        raise UserError("resume: only `workers`, `final` and `loggers` may change; others would make it another search")
    setup = set_up(config, record.id, call)
    check_checkpoint(config.model.path, setup.facts, record)
    tasks = store.search_tasks(record.id, auxiliary=True)
    launched = {(task.task, task.split): task.task_fingerprint for task in tasks}
    for group in setup.prepared.values():
        for item in group:
            there = launched.get((item.task, item.split))
            if there is None and item.split in ("dev", "test"):
                raise UserError(
                    f"task {item.task}, split {item.split}: search {record.name} was launched without it; set "
                    f"final.{'rerank: 0' if item.split == 'dev' else 'test: false'}, or launch another search"
                )
            if there != item.fingerprint:
                raise UserError(
                    f"task {item.task}, split {item.split}: not the data that search {record.name} ran on: its files "
                    "have changed since; put them back, or launch another search"
                )
    return setup


def retry(store: Store, search: str, observer: Observer, overrides: Sequence[str] = ()) -> FinalTable | None:
    """Evaluate failures of workers and of time again, and later individuals; None if there are none. See `resume`."""
    with ModelProbe() as probe:
        setup = _changed_setup(store, search, overrides, probe.call)
        observer.on_begin(setup.config)
        failures, later = take_back_failures(setup, store)
        if not failures:
            observer.on_note("nothing to retry: no individual failed by fault of a worker or of time")
            return None
        observer.on_note(f"failures to retry: {failures}, later individuals to make again: {later}")
        return execute(setup, store, observer, probe=probe)


def take_back_failures(setup: SearchSetup, store: Store) -> tuple[int, int]:
    """Reset the individuals of a search that failed by fault of a worker or of time.

    They become pending. Individuals that may depend on such a failure are removed, since other scores may change them;
    their evaluations stay in the store.

    Returns:
        The numbers of reset failures and of later individuals to make again.
    """
    with brief_lease(store, setup.search_id) as lease:
        check_not_cancelled(store, lease)
        history = store.history(setup.search_id)
        blameless = [row.index for row in history if row.status == "failed" and row.failure_kind != "candidate"]
        if not blameless:
            return 0, 0
        schedule, span = setup.schedule, range(setup.schedule.total)
        first = next((index for index in span if schedule.visible(index) > blameless[0]), schedule.total)
        store.retry(lease, first)
    return len(blameless), sum(row.index >= first for row in history)
