"""The population loop: it makes children as the window allows, has them evaluated and records them.

Determinism: the strategy makes child i from the evaluations of individuals 0 .. visible(i) - 1 and a generator keyed by
(seed, i). Evaluations arrive in any order; the strategy gets them in order of index, and not before it makes the first
child that may depend on them. So no child changes with the number, the speed or the loss of workers, or with a restart
of the driver.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import Child, Description
from moevolve.search.loop.evaluation_cache import CachedResult, EvaluationCache
from moevolve.search.loop.scores import ranking_of
from moevolve.search.loop.setup import SearchSetup, request_of
from moevolve.search.strategies.base import RankKey, rank_key
from moevolve.search.strategies.phased import PhasedStrategy
from moevolve.store.errors import StoreError
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, EvaluationRecord, IndividualRecord, Progress

log = logging.getLogger(__name__)

# Longest time to collect replies before they are recorded; a pool that evaluates within `poll` always has another.
_GATHER_S = 0.02


class SearchLoop:
    """Runs one search to the end of its schedule; its state can be rebuilt from the store.

    Args:
        strategy: Strategy without state, into which the stored history is replayed.
        on_progress: Called after every change.
        on_note: Called with a line for users if the search ends before a phase.
    """

    def __init__(
        self,
        setup: SearchSetup,
        strategy: PhasedStrategy,
        store: StoreReader,
        cache: EvaluationCache,
        on_progress: Callable[[Progress], None] = lambda _: None,
        on_note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._setup, self._strategy, self._store, self._cache = setup, strategy, store, cache
        self._on_progress, self._on_note = on_progress, on_note
        self._total = setup.schedule.total
        self._first_arrival: tuple[float, int] | None = None
        self._since = (0.0, 0)
        self._alike: object = None
        self._next = self._passed = self._frontier = 0
        self._complete: dict[int, IndividualRecord] = {}
        self._pending: dict[int, tuple[IndividualRecord, float]] = {}
        self._waiting: defaultdict[str, list[int]] = defaultdict(list)
        self._depths: list[int] = []
        self._taken: set[str] = set()
        self._best: RankKey | None = None
        self._full: float | None = None
        self._full_evaluations: Sequence[EvaluationRecord] = ()
        self._early: list[CachedResult] = []
        self._failed = self._reused = self._evaluated = 0
        self._unsaved: list[IndividualRecord] = []
        self._splits = setup.splits("search")

    def run(self) -> None:
        """Replay the stored history, then loop. New results are recorded even if an error ends the loop.

        Raises:
            StoreError: The stored population isn't the one that this configuration produces.
            UserError: The unedited model can't be evaluated.
            PoolError: No worker is available.
        """
        try:
            self._replay()
            self._take(self._cache.request([self._setup.request(None, self._splits)]))
            self._fill()
            while self._frontier < self._total or self._full is None:
                self._flush()
                self._report()
                # Replies that arrive together share one transaction.
                arrived = self._cache.poll(timeout=1.0)
                until = time.monotonic() + _GATHER_S
                while arrived:
                    self._take(arrived)
                    arrived = self._cache.poll(timeout=0.0) if time.monotonic() < until else []
                self._fill()
        finally:
            self._flush()
        self._report()

    def _replay(self) -> None:
        """Rebuild the state from the stored history, and request pending individuals again."""
        unfinished: list[tuple[IndividualRecord, Child]] = []
        for row in self._store.history(self._setup.search_id):
            if row.index != self._next:
                raise StoreError(f"search {self._setup.search_id}: individual {self._next} is missing from the store")
            self._pass_visible()
            if row.status == "pending":
                unfinished.append((row, self._reproduced(row)))
            else:
                self._strategy.skip(row.index)
                self._finish(row)
            self._count(row.depth, row.phenotype_hash)
        self._request([(row, offspring, self._setup.space.describe(offspring.genome)) for row, offspring in unfinished])

    def _reproduced(self, row: IndividualRecord) -> Child:
        """Make an individual that was in flight when the driver stopped again, and check that it is the same."""
        offspring = self._strategy.ask(row.index, self._taken)
        made = (offspring.genome.to_bytes(), offspring.genome.content_hash, offspring.parents)
        if made != (row.genome, row.content_hash, row.parents):
            raise StoreError(
                f"search {self._setup.search_id}: individual {row.index} can't be reproduced from its configuration; "
                "the store was written by another version or changed by hand"
            )
        return offspring

    def _fill(self) -> None:
        """Make and request every child that the window allows now."""
        while self._may_make():
            batch = []
            while self._may_make():
                batch.append(self._make())
            self._request(batch)

    def _may_make(self) -> bool:
        """Whether the next child can be made now. This ends the search if it would begin a phase that isn't needed."""
        schedule = self._setup.schedule
        if self._next >= self._total or self._frontier < schedule.visible(self._next):
            return False
        recovery = self._setup.config.skip_phases_at
        # The schedule of such a search separates phases, so all earlier individuals are evaluated here.
        if recovery is None or self._next == 0 or schedule.span(self._next).start != self._next:
            return True
        if self._full is None:
            return False
        # If the full model scores nothing, anything counts as a recovery, so it ends no search.
        if self._best is not None and self._full > 0 and -self._best[0] >= recovery * self._full:
            self._total = self._next
            self._on_note(
                f"stopped early: candidate {self._best[2]} keeps {-self._best[0] / self._full:.1%} of the full model's "
                f"score ({recovery:.1%} is enough: skip_phases_at)"
            )
        return self._next < self._total

    def _make(self) -> tuple[IndividualRecord, Child, Description]:
        self._pass_visible()
        index = self._next
        offspring = self._strategy.ask(index, self._taken)
        description = self._setup.space.describe(offspring.genome)
        depth = max((1 + self._depths[parent] for parent in offspring.parents), default=0)
        record = individual_record(index, self._setup.schedule.span(index).kind, offspring, description, depth)
        self._count(depth, record.phenotype_hash)
        self._unsaved.append(record)
        return record, offspring, description

    def _count(self, depth: int, phenotype: str) -> None:
        self._next += 1
        self._depths.append(depth)
        self._taken.add(phenotype)

    def _pass_visible(self) -> None:
        """Pass the individuals that the next child may depend on to the strategy."""
        while self._passed < self._setup.schedule.visible(self._next):
            if self._passed not in self._complete:
                raise StoreError(
                    f"search {self._setup.search_id}: individual {self._passed} has no evaluation, though later ones "
                    "were made from it; the store was changed by hand"
                )
            self._strategy.tell(self._complete.pop(self._passed))
            self._passed += 1

    def _request(self, batch: list[tuple[IndividualRecord, Child, Description]]) -> None:
        requests = []
        for record, offspring, description in batch:
            self._pending[record.index] = record, description.penalty
            self._waiting[record.phenotype_hash].append(record.index)
            requests.append(request_of(offspring.genome.express(), description, self._splits))
        self._take(self._cache.request(requests))

    def _take(self, settled: list[CachedResult]) -> None:
        for item in settled:
            phenotype = item.request.edit.phenotype_hash
            if phenotype == FULL_MODEL:
                if item.failure is not None:
                    path = self._setup.config.model.path
                    raise UserError(f"model.path {path}: the unedited model can't be evaluated: {item.failure}")
                self._full_evaluations = item.evaluations
                self._full, _ = self._ranking(item)
                early, self._early = self._early, []
                self._take(early)
            elif self._full is None:
                self._early.append(item)  # a fitness may be a share of the unedited model's score
                continue
            waiting = self._waiting.pop(phenotype, [])
            self._evaluated += not item.reused
            # Several individuals may wait for one evaluation, which is counted for one of them.
            self._reused += len(waiting) if item.reused else max(0, len(waiting) - 1)
            for index in waiting:
                self._settle(index, item)

    def _ranking(self, item: CachedResult) -> tuple[float, float]:
        setup = self._setup
        return ranking_of(setup.config, setup.weights, item.evaluations, self._full_evaluations)

    def _settle(self, index: int, item: CachedResult) -> None:
        """Complete one individual with the outcome of its phenotype."""
        record, penalty = self._pending.pop(index)
        if item.failure is not None:
            decided = replace(record, status="failed", failure=item.failure, failure_kind=item.failure_kind)
        else:
            score, tie_break = self._ranking(item)
            decided = replace(record, status="ok", fitness=score - penalty, tie_break=tie_break)
        self._unsaved.append(decided)
        self._finish(decided)

    def _finish(self, decided: IndividualRecord) -> None:
        self._complete[decided.index] = decided
        self._failed += decided.status == "failed"
        if decided.status == "ok" and (self._best is None or rank_key(decided) < self._best):
            self._best = rank_key(decided)
        while self._frontier in self._complete:
            self._frontier += 1

    def _flush(self) -> None:
        """Record all new individuals and evaluations in one transaction."""
        self._cache.record(self._unsaved)
        self._unsaved = []

    def _report(self) -> None:
        best = None if self._best is None else (self._best[2], -self._best[0])
        done, total = self._next - len(self._pending), self._total
        rate, left = self._pace(done, total)
        self._on_progress(
            Progress(
                done=done,
                total=total,
                phase=self._setup.schedule.span(min(self._next, total - 1)).kind,
                best=best,
                full=self._full,
                failed=self._failed,
                reused=self._reused,
                evaluated=self._evaluated,
                rate=rate,
                left=left,
                scale=self._setup.scale,
            )
        )

    def _pace(self, done: int, total: int) -> tuple[float | None, float | None]:
        """Evaluations per second and seconds left, measured since the first evaluation; None if not known yet.

        What is left is measured on phases that repair alike, and isn't known while others are to come: a candidate
        with a longer repair takes many times as long.
        """
        now = time.monotonic()
        place = self._setup.schedule.span(min(done, total - 1)).position
        alike, *others = [(each.kind == "repair", each.repair) for each in self._setup.config.phases[place:]]
        if self._first_arrival is None:
            if self._evaluated:
                self._first_arrival = self._since = now, done
                self._alike = alike
            return None, None
        if alike != self._alike:
            self._since, self._alike = (now, done), alike
        elapsed = now - self._first_arrival[0]
        if self._evaluated < 2 or done <= self._first_arrival[1] or elapsed <= 0:
            return None, None
        since, done_then = self._since
        known = done > done_then and all(other == alike for other in others)
        left = (total - done) * (now - since) / (done - done_then) if known else None
        return (self._evaluated - 1) / elapsed, 0.0 if done == total else left


def individual_record(
    index: int, phase: str, offspring: Child, description: Description, depth: int
) -> IndividualRecord:
    """Return the store's record of a new individual."""
    return IndividualRecord(
        index=index,
        phase=phase,
        operator=offspring.operator,
        genome=offspring.genome.to_bytes(),
        content_hash=offspring.genome.content_hash,
        phenotype_hash=offspring.genome.express().phenotype_hash,
        experts=description.experts,
        active=description.active,
        parameters=description.parameters,
        active_parameters=description.active_parameters,
        parameters_full=description.parameters_full,
        active_parameters_full=description.active_parameters_full,
        stock=description.stock,
        summary=f"{description.summary} ({offspring.note})" if offspring.note else description.summary,
        depth=depth,
        parents=offspring.parents,
    )
