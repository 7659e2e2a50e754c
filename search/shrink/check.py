"""Checks a store for damage, the records of shrinks included."""

from __future__ import annotations

from moevolve.search.interface.request import Request, record
from moevolve.store.reader import StoreReader
from moevolve.store.upkeep.check import CheckReport, check


@record
class CheckRequest(Request):
    """Check a store for damage; exit code 1 if any is found. Writes nothing.

    Raises:
        StoreError: the store doesn't exist.
    """

    def answer(self, store: StoreReader) -> CheckReport:
        from moevolve.search.config.files import parse_stored_config
        from moevolve.search.genomes.registry import stored_section
        from moevolve.search.running.weights import parse_facts
        from moevolve.search.shrink.record import parse_record

        # How text is parsed whose form the store doesn't know, by column.
        forms = {
            "searches.config": lambda text: parse_stored_config(text, "?"),
            "searches.genome_kind": stored_section,
            "searches.model_facts": parse_facts,
            "shrinks.content": parse_record,
        }
        return check(store, forms)
