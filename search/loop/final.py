"""The end of a search: the evaluations that the final table needs."""

from __future__ import annotations

from moevolve.evaluators.types import Split
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.final_table import auxiliary_entries, random_draws, winner_of
from moevolve.search.loop.setup import SearchSetup
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualRecord
from moevolve.workers.contract.messages import EvaluationRequest


class Finaliser:
    """Evaluates the leaders and the entries of the final table; stored evaluations are reused."""

    def __init__(self, setup: SearchSetup, store: StoreReader, cache: EvaluationCache) -> None:
        self._setup = setup
        self._store = store
        self._cache = cache

    def run(self) -> None:
        """Score the leaders on `dev`, then the table's entries on the other splits, and record new evaluations."""
        setup, final = self._setup, self._setup.config.final
        leaders = self._store.best_of_search(setup.search_id, max(1, final.rerank))
        if final.rerank:
            self._cache.settle([self._request(row, "dev") for row in leaders])
        search, history = self._store.search(setup.search_id), self._store.history(setup.search_id)
        winner, _ = winner_of(self._store, search, setup.config)
        # Only leaders are scored on dev: another individual could outrank the winner in listings.
        single = [row for _, row in auxiliary_entries(setup.config, history, winner)]
        single += [] if winner is None else [winner]
        draws = [row for row in random_draws(setup.config, history) if row.status == "ok"]
        splits: tuple[Split, ...] = ("search", "test") if final.test else ("search",)
        requests = [setup.request(None, setup.scored_on(split)) for split in splits]
        requests += [self._request(row, split) for row in (*draws, *single) for split in splits]
        if setup.held_out:
            genomes = (setup.space.from_bytes(row.genome) for row in single)
            held_out = tuple(item.ref for item in setup.held_out)
            requests += [setup.request(genome, held_out) for genome in (None, *genomes)]
        self._cache.settle(requests)

    def _request(self, row: IndividualRecord, split: Split) -> EvaluationRequest:
        return self._setup.request(self._setup.space.from_bytes(row.genome), self._setup.scored_on(split))
