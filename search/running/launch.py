"""Setting up a new search and recording it."""

from __future__ import annotations

import shlex
from importlib.metadata import version

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import SCORED
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.set_up import Call, call_here, set_up
from moevolve.search.running.weights import facts_text
from moevolve.store.errors import NameTakenError, NotFoundError
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord, SearchTaskRecord, new_search_id
from moevolve.store.repository import Store
from moevolve.store.session import without_password
from moevolve.workers.contract.settings import engine_fingerprint


def set_up_new(config: RunConfig, call: Call = call_here) -> SearchSetup:
    """Set up a search that isn't recorded yet, with a new id; see `set_up`."""
    return set_up(config, new_search_id(), call)


def recorded(setup: SearchSetup, store: Store, source: str = "this request", call: Call = call_here) -> SearchSetup:
    """Record a new search, or return the setup of the stored one of its name, which has the same settings.

    For arguments and errors see `launch`; `call` calls what imports torch.
    """
    from moevolve.search.running.resume import set_up_stored  # it imports Ray

    try:
        _record(setup, store)
    except NameTakenError:
        config = setup.config
        refuse_taken(config, store, source)
        return set_up_stored(store, store.search(config.name).id, lambda _: config, call)
    return setup


def register(setup: SearchSetup, store: Store) -> None:
    """Record a new search; UserError if its name is taken."""
    try:
        _record(setup, store)
    except NameTakenError:
        refuse_taken(setup.config, store)


def refuse_taken(config: RunConfig, store: StoreReader, source: str | None = None) -> None:
    """Raise UserError if a store has a search of the configuration's name.

    Args:
        config: The configuration.
        store: The store.
        source: What the configuration is read from, if the search may be one with the same settings.
    """
    try:
        record = store.search(config.name)
    except NotFoundError:
        return
    if source is None:
        store_url = shlex.quote(without_password(config.store))
        raise UserError(
            f"search {config.name} exists in {store_url}: continue it with `moevolve resume {config.name} "
            f"--store {store_url}`, or choose another name with --name"
        )
    if parse_stored_config(record.config, record.name).config_hash != config.config_hash:
        raise UserError(
            f"--or-resume: search {record.name} is in the store with other settings than {source} has now; give "
            f"this one another name with --name, or continue that one with `moevolve resume {record.name}`"
        )


def _record(setup: SearchSetup, store: Store) -> None:
    config = setup.config
    tasks = [
        SearchTaskRecord(item.task, item.split, item.fingerprint, task.weight)
        for split, group in setup.prepared.items()
        if split in SCORED
        for task, item in zip(config.tasks, group, strict=True)
    ]
    record = search_record(config, setup.search_id, setup.facts.fingerprint)
    store.create_search(record, [*tasks, *setup.auxiliary_tasks], facts_text(setup.facts))


def search_record(config: RunConfig, search_id: str, model_fingerprint: str) -> SearchRecord:
    """Return the store's record of a new search."""
    return SearchRecord(
        id=search_id,
        name=config.name,
        config=config.canonical_json(),
        config_hash=config.config_hash,
        model_fingerprint=model_fingerprint,
        model_path=config.model.path,
        engine_fingerprint=engine_fingerprint(config.model, config.engine),
        seed=config.seed,
        genome_kind=config.genome.kind,
        software_version=version("moevolve"),
    )
