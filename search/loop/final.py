"""What happens after the last individual: the evaluations that the final table lacks."""

from __future__ import annotations

from collections.abc import Sequence

from moevolve.evaluators.types import Split
from moevolve.search.config.files import parse_stored_config
from moevolve.search.loop.evaluation_cache import EvaluationCache, Job
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.loop.standings import Scorer, drawn, started, winner_of
from moevolve.store.records import HistoryRow
from moevolve.store.repository import Store


class Finaliser:
    """Ends a search whose schedule is through. Everything goes through the cache, so repeating it costs nothing."""

    def __init__(self, setup: SearchSetup, store: Store, cache: EvaluationCache) -> None:
        self._setup = setup
        self._store = store
        self._cache = cache

    def run(self) -> None:
        """Score the leaders on `dev`, then the contestants on the other splits; new evaluations are recorded."""
        setup, final = self._setup, self._setup.config.final
        leaders = self._store.best_of_search(setup.search_id, max(1, final.rerank))
        if final.rerank:
            self._settle([self._job(row, "dev") for row in leaders])
        search, history = self._store.search(setup.search_id), self._store.history(setup.search_id)
        scorer = Scorer(self._store, search, parse_stored_config(search.config))
        winner, _ = winner_of(self._store, search, scorer)
        # The start isn't scored on dev unless it is a leader: it could outrank the winner in listings.
        single = [row for row in (started(history), winner) if row is not None]
        draws = [row for row in drawn(setup.config, history) if row.status == "ok"]
        splits: tuple[Split, ...] = ("search", "test") if final.test else ("search",)
        jobs = [setup.full_job(split) for split in splits]
        jobs += [self._job(row, split) for row in (*draws, *single) for split in splits]
        if setup.held_out:
            genomes = (setup.space.from_bytes(row.genome) for row in single)
            jobs += [setup.held_out_job(genome) for genome in (None, *genomes)]
        self._settle(jobs)

    def _settle(self, jobs: Sequence[Job]) -> None:
        """Evaluate what isn't yet; whatever ends it, what came is in the store afterwards."""
        try:
            for _ in self._cache.run(jobs):
                pass
        finally:
            evaluations = self._cache.unsaved
            if evaluations:
                self._store.record(self._setup.search_id, evaluations=evaluations)
                self._cache.saved(len(evaluations))

    def _job(self, row: HistoryRow, split: Split) -> Job:
        return self._setup.job(self._setup.space.from_bytes(row.genome), split)
