"""What happens after the last individual: the evaluations that the final table lacks."""

from __future__ import annotations

from collections.abc import Sequence

from moevolve.evaluators.types import Split
from moevolve.search.config_files import parse_stored_config
from moevolve.search.desk import EvaluationDesk, Job
from moevolve.search.plan import Plan
from moevolve.search.standings import Scorer, drawn, started, winner_of
from moevolve.store.records import HistoryRow
from moevolve.store.repository import Store


class Finaliser:
    """Ends a search whose schedule is through. Everything goes through the desk, so repeating it costs nothing."""

    def __init__(self, plan: Plan, store: Store, desk: EvaluationDesk) -> None:
        self._plan = plan
        self._store = store
        self._desk = desk

    def run(self) -> None:
        """Score the leaders on `dev`, then the contestants on the other splits; new evaluations are recorded."""
        plan, final = self._plan, self._plan.config.final
        leaders = self._store.best_of_search(plan.search_id, max(1, final.rerank))
        if final.rerank:
            self._settle([self._job(row, "dev") for row in leaders])
        search, history = self._store.search(plan.search_id), self._store.history(plan.search_id)
        scorer = Scorer(self._store, search, parse_stored_config(search.config))
        winner, _ = winner_of(self._store, search, scorer)
        # The start isn't scored on dev unless it is a leader: it could outrank the winner in listings.
        single = [row for row in (started(history), winner) if row is not None]
        draws = [row for row in drawn(plan.config, history) if row.status == "ok"]
        splits: tuple[Split, ...] = ("search", "test") if final.test else ("search",)
        jobs = [plan.full_job(split) for split in splits]
        jobs += [self._job(row, split) for row in (*draws, *single) for split in splits]
        if plan.held_out:
            genomes = (plan.space.from_bytes(row.genome) for row in single)
            jobs += [plan.held_out_job(genome) for genome in (None, *genomes)]
        self._settle(jobs)

    def _settle(self, jobs: Sequence[Job]) -> None:
        """Evaluate what isn't yet; whatever ends it, what came is in the store afterwards."""
        try:
            for _ in self._desk.run(jobs):
                pass
        finally:
            evaluations = self._desk.unsaved
            if evaluations:
                self._store.record(self._plan.search_id, evaluations=evaluations)
                self._desk.saved(len(evaluations))

    def _job(self, row: HistoryRow, split: Split) -> Job:
        return self._plan.job(self._plan.space.from_bytes(row.genome), split)
