"""What happens after the last individual: re-ranking on `dev`, then the explicit evaluations for the final table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moevolve.evaluators.types import Split
from moevolve.search.desk import EvaluationDesk, Job, Settled
from moevolve.search.evaluation import interval, with_outcomes
from moevolve.search.plan import Plan
from moevolve.search.ranking_values import ranking_values
from moevolve.store.records import EvaluationRecord, HistoryRow
from moevolve.store.repository import Store
from moevolve.workers.facts import active_parameters

FULL_LABEL, START_LABEL, BEST_LABEL = "full model", "unsearched start", "best found"
"""Rows of a final table that every kind of genome can have."""


@dataclass(frozen=True, slots=True)
class SplitScore:
    """A score in [0, 1] with its 95 % interval on one split of one task.

    For a single model the interval is over examples; for a mean over draws it is the mean plus or minus one standard
    deviation over the draws.
    """

    task: str
    split: str
    score: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of the final table.

    Attributes:
        label: what it is.
        ref: `search:index` of an individual; None for the full model and for means over draws.
        scores: one per measured split.
        parameters: of the model it stands for.
        active_parameters: of these, used per token.
        summary: what the genome does, if it is one.
        draws: how many random individuals this is the mean of; 0 for a single model.
        phenotype: hash under which its evaluations are kept; None for means over draws.
    """

    label: str
    ref: str | None
    scores: tuple[SplitScore, ...] = field(repr=False)
    parameters: int
    active_parameters: int
    summary: str = ""
    draws: int = 0
    phenotype: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class FinalReport:
    """The full model, the random baseline (if asked for), the method's own start (if it has one) and the best found.

    Attributes:
        search: its name.
        contestants: rows in that order; without the best when every individual failed.
        winner: `search:index` of the best found.
        parameters_full: parameters of the unedited model.
        dtype_bytes: bytes per parameter, for memory.
    """

    search: str
    contestants: tuple[Contestant, ...]
    winner: str | None
    parameters_full: int
    dtype_bytes: int


class Finaliser:
    """Ends a search whose schedule is through. Everything goes through the desk, so repeating it costs nothing."""

    def __init__(self, plan: Plan, store: Store, desk: EvaluationDesk) -> None:
        self._plan = plan
        self._store = store
        self._desk = desk
        self._section = plan.config.final

    def report(self) -> FinalReport:
        """Pick the winner and score the contestants; new evaluations are recorded."""
        leaders = self._store.best_of_search(self._plan.search_id, max(1, self._section.rerank))
        winner = self._winner(leaders)
        measured: tuple[Split, ...] = ("search", "test") if self._section.test else ("search",)
        contestants = [self._full(measured)]
        draws = self._random_draws()
        if draws:
            contestants.append(self._mean_of(draws, measured))
        start = self._start()
        if start is not None:
            # Scored on dev without being one of the leaders, it could outrank the winner in listings.
            led = any(row.index == start.index for row in leaders)
            contestants.append(self._single(START_LABEL, start, measured, led))
        if winner is not None:
            contestants.append(self._single(BEST_LABEL, winner, measured, True))
        return FinalReport(
            search=self._plan.config.name,
            contestants=tuple(contestants),
            winner=None if winner is None else self._ref(winner),
            parameters_full=self._plan.facts.parameters,
            dtype_bytes=self._plan.facts.dtype_bytes,
        )

    def _winner(self, leaders: list[HistoryRow]) -> HistoryRow | None:
        """The best on `dev` among the best few by fitness; None if every individual failed."""
        if not leaders or not self._section.rerank:
            return leaders[0] if leaders else None
        ranked = []
        for row, item in zip(leaders, self._settle([self._job(row, "dev") for row in leaders]), strict=True):
            if item.failure is None:
                score, tie_break = ranking_values(self._plan, item.evaluations)
                ranked.append((-score, -tie_break, row.index, row))
        return min(ranked, key=lambda entry: entry[:3])[3] if ranked else leaders[0]

    def _random_draws(self) -> list[HistoryRow]:
        """The first random initial individuals: drawn without looking at any score."""
        if not self._section.random_draws:
            return []
        rows = (row for row in self._store.history(self._plan.search_id) if row.operator == "random")
        return [row for row, _ in zip(rows, range(self._section.random_draws), strict=False)]

    def _start(self) -> HistoryRow | None:
        """The method's own start, if it has one and it didn't fail."""
        first = next(iter(self._store.history(self._plan.search_id)), None)
        return first if first is not None and first.operator == "start" and first.status == "ok" else None

    def _full(self, measured: Sequence[Split]) -> Contestant:
        jobs = [self._plan.full_job(split) for split in measured]
        facts = self._plan.facts
        active = active_parameters(facts, facts.experts, facts.active)
        scores = self._intervals(self._settle(jobs)) + self._held_out(None)
        phenotype = jobs[0].edit.phenotype_hash
        return Contestant(FULL_LABEL, None, scores, facts.parameters, active, phenotype=phenotype)

    def _single(self, label: str, row: HistoryRow, measured: Sequence[Split], led: bool) -> Contestant:
        description = self._plan.space.describe(self._plan.space.from_bytes(row.genome))
        splits: list[Split] = [*measured, *(["dev"] if led and self._section.rerank else [])]  # type: ignore[list-item]
        scores = self._intervals(self._settle([self._job(row, split) for split in splits])) + self._held_out(row)
        size = description.parameters, description.active_parameters
        summary, phenotype = description.summary, row.phenotype_hash
        return Contestant(label, self._ref(row), scores, *size, summary, phenotype=phenotype)

    def _mean_of(self, rows: list[HistoryRow], measured: Sequence[Split]) -> Contestant:
        fine = [row for row in rows if row.status == "ok"]
        settled = self._settle([self._job(row, split) for split in measured for row in fine])
        scores = []
        for position, split in enumerate(measured):
            items = settled[position * len(fine) : (position + 1) * len(fine)]
            for column, reference in enumerate(self._plan.splits(split)):
                # A random subset that breaks the model scores nothing.
                values = np.zeros(len(rows))
                values[: len(fine)] = [0.0 if item.failure else item.evaluations[column].score or 0.0 for item in items]
                mean, spread = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0
                scores.append(SplitScore(reference.task, split, mean, mean - spread, mean + spread))
        description = self._plan.space.describe(self._plan.space.from_bytes(rows[0].genome))
        label = f"{self._plan.config.genome.random_title}, {len(rows)} draws"
        size = description.parameters, description.active_parameters
        return Contestant(label, None, tuple(scores), *size, draws=len(rows))

    def _intervals(self, settled: Sequence[Settled]) -> tuple[SplitScore, ...]:
        tasks = len(self._plan.weights)  # what breaks ties stands behind them
        return tuple(
            self._interval(record)
            for item in settled
            for record in item.evaluations[:tasks]
            if record.score is not None
        )

    def _interval(self, record: EvaluationRecord) -> SplitScore:
        low, high = interval(with_outcomes(self._store, record))
        return SplitScore(record.task, record.split, float(record.score or 0.0), low, high)

    def _held_out(self, row: HistoryRow | None) -> tuple[SplitScore, ...]:
        if not self._plan.held_out:
            return ()
        genome = None if row is None else self._plan.space.from_bytes(row.genome)
        (settled,) = self._settle([self._plan.held_out_job(genome)])
        return tuple(self._interval(record) for record in settled.evaluations if record.score is not None)

    def _settle(self, jobs: Sequence[Job]) -> list[Settled]:
        """All jobs, in order; what is new is in the store afterwards."""
        settled = {item.job.key: item for item in self._desk.run(jobs)}
        evaluations = self._desk.unsaved
        if evaluations:
            self._store.record(self._plan.search_id, evaluations=evaluations)
            self._desk.saved(len(evaluations))
        return [settled[job.key] for job in jobs]

    def _job(self, row: HistoryRow, split: Split) -> Job:
        return self._plan.job(self._plan.space.from_bytes(row.genome), split)

    def _ref(self, row: HistoryRow) -> str:
        return f"{self._plan.config.name}:{row.index}"
