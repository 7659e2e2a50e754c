"""What pages say of a search and of its workers, put together from what the store holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.final_table import winner_of
from moevolve.search.loop.scores import full_fitness
from moevolve.search.server.fitness_curves import FitnessCurve
from moevolve.search.strategies.schedule import PhaseSpan, make_schedule
from moevolve.search.text import percent
from moevolve.store.reader import StoreReader
from moevolve.store.records import Control, IndividualRecord, SearchRecord, SearchSummary

Tone = Literal["quiet", "live", "good", "bad"]
_LATELY = 200
"""Individuals whose evaluations say which workers are at work."""


@dataclass(frozen=True, slots=True)
class SearchView:
    """One search as pages show it.

    Attributes:
        search: its record.
        control: who runs it, where it stands, what is asked of it.
        tasks: names of those in its fitness.
        made: individuals recorded.
        failed: of these; None where that isn't counted.
        best: index of the best one on the search split, None where that isn't known; its fitness.
        full: fitness of the full model.
        winner: who won a finished search, and whether `dev` picked it; None where that isn't known, as in listings.
    """

    search: SearchRecord
    control: Control
    tasks: tuple[str, ...]
    made: int
    failed: int | None
    best: tuple[int | None, float] | None
    full: float | None
    winner: tuple[IndividualRecord, bool] | None = None

    @property
    def total(self) -> int | None:
        """Individuals of the whole search."""
        return None if self.control.progress is None else self.control.progress.total

    @property
    def done(self) -> int:
        """Individuals that are complete."""
        return self.made if self.control.progress is None else self.control.progress.done

    @property
    def left(self) -> float | None:
        """Seconds that it still takes."""
        progress = self.control.progress
        if progress is None or not self.control.alive or self.search.status == "paused":
            return None
        return None if progress.done >= progress.total else progress.left

    @property
    def state(self) -> str:
        """What it does, in a word or a few."""
        if self.control.alive:
            asked = {"paused": "pause", "stopped": "stop", "cancelled": "cancel"}.get(self.control.desired_state)
            settled = asked is None or self.search.status == self.control.desired_state
            return self.search.status if settled else f"{self.search.status}, asked to {asked}"
        return "left behind" if self.is_orphaned else self.search.status

    @property
    def is_orphaned(self) -> bool:
        """Whether its driver is gone without having said how it ended."""
        return self.search.is_orphaned(self.control.alive)

    @property
    def remark(self) -> str | None:
        """What there is to say of the state, one line."""
        if self.is_orphaned:
            return "its driver is gone; it can be resumed"
        if self.control.alive:
            stage = self.control.stage
            return self.control.owner if stage is None else stage if stage != self.search.status else None
        return self.search.status_reason

    @property
    def tone(self) -> Tone:
        """How the state is marked, beside its words."""
        if self.control.alive:
            return "quiet" if self.search.status == "paused" else "live"
        if self.search.status == "finished":
            return "good"
        return "quiet" if self.search.status in ("created", "cancelled") else "bad"

    @property
    def actions(self) -> tuple[str, ...]:
        """What can be asked for now."""
        if self.control.alive:
            first = "resume" if self.control.desired_state == "paused" else "pause"
            return first, "stop", "cancel", "scale"
        return () if self.search.status in ("finished", "cancelled") else ("resume", "cancel")

    @property
    def sentence(self) -> str:
        """Where it stands, for who can't see the chart."""
        of = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{self.done:,}{of} individuals are complete"]
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.best is not None:
            named = "" if self.best[0] is None else f" (individual {self.best[0]})"
            parts.append(f"the best has {percent(self.best[1])} % on the search split{named}")
        if self.full is not None:
            parts.append(f"the full model {percent(self.full)} %")
        if self.winner is not None:
            parts.append(f"the winner is individual {self.winner[0].index}")
        return ", ".join(parts) + "."


def view_of_summary(summary: SearchSummary, control: Control) -> SearchView:
    """A line of a listing; counts that the driver said are newer than a listing's."""
    progress = control.progress
    best = None if summary.best_fitness is None else (None, summary.best_fitness)
    if progress is None:
        return SearchView(summary.search, control, summary.tasks, summary.individuals, summary.failed, best, None)
    return SearchView(
        summary.search,
        control,
        summary.tasks,
        max(summary.individuals, progress.done),
        progress.failed,
        progress.best or best,
        progress.full,
    )


def view_of_search(store: StoreReader, search: SearchRecord, control: Control) -> SearchView:
    """One search by itself; takes the same time however many individuals it has."""
    best, newest = (store.page(search.id, order, limit=1) for order in ("best", "newest"))
    progress = control.progress
    full = None if progress is None else progress.full
    return SearchView(
        search,
        control,
        tuple(dict.fromkeys(task.task for task in store.search_tasks(search.id))),
        newest[0].index + 1 if newest else 0,
        None if progress is None else progress.failed,
        (best[0].index, best[0].fitness or 0.0) if best else None,
        full_fitness(store, search) if full is None else full,
        _winner(store, search),
    )


def _winner(store: StoreReader, search: SearchRecord) -> tuple[IndividualRecord, bool] | None:
    config = config_of(search)
    if search.status != "finished" or config is None:
        return None
    winner, reranked = winner_of(store, search, config)
    return None if winner is None else (winner, reranked)


def config_of(search: SearchRecord) -> RunConfig | None:
    """A search's configuration; None for one of another version of moevolve, whose settings can't be read."""
    try:
        return parse_stored_config(search.config)
    except UserError:
        return None


def spans_of(config: RunConfig | None) -> tuple[PhaseSpan, ...]:
    """The phases that a configuration plans; none for imported individuals and for what can't be read."""
    return () if config is None else make_schedule(config).spans


def phase_at(spans: Sequence[PhaseSpan], index: int) -> str:
    """The kind of phase that an individual belongs to."""
    return next((span.kind for span in spans if span.start <= index < span.stop), "")


@dataclass(frozen=True, slots=True)
class Step:
    """An individual that was better than all before it."""

    index: int
    fitness: float
    phase: str


def improvements(course: FitnessCurve, spans: Sequence[PhaseSpan]) -> list[Step]:
    """The steps of the best score so far; of several within one bucket, the last one."""
    steps: list[Step] = []
    for high, at in zip(course.high, course.at, strict=True):
        if not steps or high > steps[-1].fitness:
            steps.append(Step(at, high, phase_at(spans, at)))
    return steps


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a worker did lately.

    Attributes:
        name: as evaluations have it.
        evaluations: of the search's latest individuals.
        seconds: that it took over them.
        last: when the latest of them was stored.
    """

    name: str
    evaluations: int
    seconds: float = field(repr=False)
    last: datetime | None = field(repr=False)


def workers_of(store: StoreReader, search: SearchRecord) -> list[WorkerView]:
    """Who evaluated the latest individuals of a search, the busiest first."""
    hashes = {row.phenotype_hash for row in store.page(search.id, "newest", limit=_LATELY)}
    splits = [task.task_fingerprint for task in store.search_tasks(search.id) if task.split == "search"]
    found = store.evaluations(sorted(hashes), search.model_fingerprint, search.engine_fingerprint, splits)
    by_worker: dict[str, list[tuple[float, datetime | None]]] = {}
    for one in found:
        by_worker.setdefault(one.worker or "not recorded", []).append((one.seconds, one.created_at))
    views = [
        WorkerView(
            name,
            len(times),
            sum(seconds for seconds, _ in times),
            max((at for _, at in times if at is not None), default=None),
        )
        for name, times in by_worker.items()
    ]
    return sorted(views, key=lambda view: (-view.evaluations, view.name))
