"""Continuing a stored search."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import changed_config, parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.loop.standings import Standings
from moevolve.search.running.execute import execute, refuse_cancelled
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import set_up
from moevolve.search.service.steer import unpaused
from moevolve.search.service.weights import check_checkpoint
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store


def resume(store: Store, search: str, overrides: Sequence[str], observer: Observer) -> Standings | None:
    """Run a stored search to its end: the population comes out as if it had never stopped.

    One that is paused goes on where it runs.

    Args:
        store: where it is.
        search: name or id.
        overrides: of its settings, `KEY=VALUE`.
        observer: told what happens.

    Returns:
        How it ended; None if it goes on elsewhere.

    Raises:
        UserError: model, tasks or settings are not what the search was launched with.
        CancelledError: it was cancelled.
        StoreError: no such search, or another process runs it.
        PoolError: no worker can be had; the search stays resumable.
        KeyboardInterrupt: the user stopped it; the search stays resumable.
    """
    if unpaused(store, search):
        return None
    setup = changed_setup(store, search, overrides)
    observer.on_begin(setup.config)
    return execute(setup, store, observer)


def changed_setup(store: StoreReader, search: str, overrides: Sequence[str]) -> SearchSetup:
    """The setup of a stored search, with settings changed that may be.

    Raises:
        UserError: as `set_up_stored`, or an override isn't `KEY=VALUE`.
        StoreError: no such search.
    """
    return set_up_stored(store, search, lambda stored: changed_config(stored, overrides, f"search {search}"))


def set_up_stored(
    store: StoreReader, name: str, adjust: Callable[[RunConfig], RunConfig] = lambda config: config
) -> SearchSetup:
    """The setup of a stored search, with settings adjusted that don't change the population.

    Raises:
        UserError: model, tasks or configuration are not what the search was launched with.
        CancelledError: it was cancelled.
        StoreError: no such search.
    """
    record = store.search(name)
    stored = parse_stored_config(record.config)
    if not isinstance(stored, RunConfig):
        raise UserError(f"search {record.name} was imported: there is nothing to resume")
    refuse_cancelled(record)
    config = adjust(stored)
    if (config.config_hash, config.name) != (stored.config_hash, stored.name):
        raise UserError("resume: only `workers` and `final` settings may change; others would make it another search")
    setup = set_up(config, record.id)
    check_checkpoint(config.model.path, setup.facts, record)
    launched = {(task.task, task.split): task.task_fingerprint for task in store.search_tasks(record.id, beside=True)}
    for group in setup.prepared.values():
        for item in group:
            there = launched.get((item.task, item.split))
            if there is None and item.split in ("dev", "test"):
                raise UserError(
                    f"task {item.task}, split {item.split}: search {record.name} was launched without it; set "
                    f"final.{'rerank: 0' if item.split == 'dev' else 'test: false'}, or launch another search"
                )
            if there != item.fingerprint:
                raise UserError(f"task {item.task}, split {item.split}: not the data that search {record.name} ran on")
    return setup
