"""Continuing a stored search."""

from __future__ import annotations

from collections.abc import Callable

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import changed_config, override_lines, parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.requests.running import ResumeRequest
from moevolve.search.running.execute import execute, refuse_cancelled
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import set_up
from moevolve.search.running.steer import unpaused
from moevolve.search.running.weights import check_checkpoint
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store


def resume(store: Store, request: ResumeRequest, observer: Observer) -> FinalTable | None:
    """See `ResumeRequest`.

    Raises:
        KeyboardInterrupt: the user stopped it; the search stays resumable.
    """
    if unpaused(store, request.search):
        return None
    setup = changed_setup(store, request)
    observer.on_begin(setup.config)
    return execute(setup, store, observer)


def changed_setup(store: StoreReader, request: ResumeRequest) -> SearchSetup:
    """The setup of a stored search, with the settings changed that the request changes.

    Raises:
        UserError: as `set_up_stored`, or an override isn't `KEY=VALUE`.
        StoreError: no such search.
    """
    # It is in this store now, whatever the store was called when it was launched.
    changes = [*override_lines({"store": store.url}), *override_lines(request.overrides)]
    if request.address:
        changes += override_lines({"workers.address": request.address})
    where = f"search {request.search}"
    return set_up_stored(store, request.search, lambda stored: changed_config(stored, changes, where))


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
    if stored.is_imported:
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
