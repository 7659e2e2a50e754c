"""The final table of a search, apart from `queries.py` since its imports would slow listings down."""

from __future__ import annotations

from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.final_table import FinalTable, build_final_table
from moevolve.search.requests.searches import FinalTableRequest
from moevolve.store.reader import StoreReader


def final_table(store: StoreReader, request: FinalTableRequest) -> FinalTable:
    """See `FinalTableRequest`."""
    record = store.search(request.search)
    config = parse_stored_config(record.config)  # parsed first, to fail before all individuals are read
    return build_final_table(store, record, config, store.history(record.id))
