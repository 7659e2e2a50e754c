"""A search's final table; not in `queries.py`, since it needs imports that listings shouldn't wait for."""

from __future__ import annotations

from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.final_table import FinalTable, build_final_table
from moevolve.search.requests import StandingsRequest
from moevolve.store.reader import StoreReader


def final_table(store: StoreReader, request: StandingsRequest) -> FinalTable:
    """See `StandingsRequest`."""
    record = store.search(request.search)
    config = parse_stored_config(record.config)  # fails before all individuals are read
    return build_final_table(store, record, config, store.history(record.id))
