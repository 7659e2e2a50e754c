"""Searches as pages show them, computed from the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.scales import SCALES, ScaleName
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.loop.final_table import winner_of
from moevolve.search.loop.scores import full_fitness
from moevolve.search.strategies.schedule import PhaseSpan, make_schedule
from moevolve.store.reader import StoreReader
from moevolve.store.records import Control, IndividualRecord, SearchRecord, SearchSummary

Tone = Literal["quiet", "live", "good", "bad"]


@dataclass(frozen=True, slots=True)
class SearchView:
    """One search as pages show it.

    Attributes:
        control: Driver, progress and desired state.
        tasks: Names of the tasks in its fitness.
        individuals: Number of individuals recorded.
        failed: Number of failed individuals; None if it wasn't counted.
        best: Index and fitness of the best individual on the search split; the index is None if it isn't known.
        full: Fitness of the full model.
        winner: The winner of a finished search, and whether it was picked on `dev`; None if it isn't known.
        dev, test, size: The winner's scores and size in a listing; see `SearchSummary`.
        scale, mean_scale: Scales that the fitness, and `dev` and `test`, are shown on.
        arriving: Whether a process of this server is about to drive it.
    """

    search: SearchRecord
    control: Control
    tasks: tuple[str, ...]
    individuals: int
    failed: int | None
    best: tuple[int | None, float] | None
    full: float | None
    winner: tuple[IndividualRecord, bool] | None = None
    dev: float | None = None
    test: float | None = None
    size: float | None = None
    scale: ScaleName = "percent"
    mean_scale: ScaleName = "percent"
    arriving: bool = False

    @property
    def total(self) -> int | None:
        """Number of individuals that the whole search will have; None if it isn't known."""
        return None if self.control.progress is None else self.control.progress.total

    @property
    def done(self) -> int:
        """Number of complete individuals."""
        return self.individuals if self.control.progress is None else self.control.progress.done

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the end of a running search."""
        progress = self.control.progress
        if progress is None or not self.control.alive or self.search.status == "paused":
            return None
        return None if progress.done >= progress.total else progress.left

    @property
    def state(self) -> str:
        """The state in one word."""
        if self.arriving or (self.control.alive and self.search.status in ("created", "interrupted", "failed")):
            return "starting"
        return self.search.state(self.control.alive)

    @property
    def is_orphaned(self) -> bool:
        """Whether the driver disappeared without recording how the search ended."""
        return self.search.is_orphaned(self.control.alive)

    @property
    def remark(self) -> str | None:
        """A line that explains the state; None if the state says all."""
        if self.arriving:
            return "a process of this server reads the model and the tasks"
        if not self.control.alive:
            return self.search.reason(alive=False)
        asked = {"paused": "pause", "stopped": "stop", "cancelled": "cancel"}.get(self.control.desired_state)
        if asked is not None and self.search.status != self.control.desired_state:
            return f"asked to {asked}"
        stage = self.control.stage or self.control.owner
        return stage if self.state in ("starting", "running") and stage != self.state else None

    @property
    def tone(self) -> Tone:
        """CSS class of the state."""
        if self.control.alive or self.arriving:
            return "quiet" if self.search.status == "paused" else "live"
        if self.search.status == "finished":
            return "good"
        return "quiet" if self.search.status in ("created", "cancelled") else "bad"

    @property
    def actions(self) -> tuple[str, ...]:
        """Names of the commands that the search accepts in this state."""
        if self.control.alive:
            first = "resume" if self.control.desired_state == "paused" else "pause"
            return first, "stop", "cancel", "scale"
        if self.arriving:
            return ("stop",)
        return () if self.search.status in ("finished", "cancelled") else ("resume", "cancel")

    @property
    def description(self) -> str:
        """The progress in one sentence, as a text alternative to the chart."""
        scale = SCALES[self.scale]
        of = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{self.done:,}{of} individuals are complete"]
        if self.failed:
            parts.append(f"{self.failed:,} failed")
        if self.best is not None:
            named = "" if self.best[0] is None else f" (individual {self.best[0]})"
            parts.append(f"the best has {scale.phrase(self.best[1])} on the search split{named}")
        if self.full is not None:
            parts.append(f"the full model {scale.phrase(self.full)}")
        if self.winner is not None:
            parts.append(f"the winner is individual {self.winner[0].index}")
        return ", ".join(parts) + "."


def view_of_summary(summary: SearchSummary, control: Control) -> SearchView:
    """The view of a search in a listing. The driver's own counts replace those of the listing, which may be older."""
    progress = control.progress
    best: tuple[int | None, float] | None = None if summary.best_fitness is None else (None, summary.best_fitness)
    return SearchView(
        search=summary.search,
        control=control,
        tasks=summary.tasks,
        individuals=summary.individuals if progress is None else max(summary.individuals, progress.done),
        failed=summary.failed if progress is None else progress.failed,
        best=best if progress is None else progress.best or best,
        full=None if progress is None else progress.full,
        dev=summary.dev,
        test=summary.test,
        size=summary.size,
        scale=summary.scale,
        mean_scale=summary.mean_scale,
    )


def view_of_search(store: StoreReader, search: SearchRecord, control: Control) -> SearchView:
    """Return the view of a single search. Its cost doesn't grow with the number of individuals."""
    best, newest = (store.page(search.id, order, limit=1) for order in ("best", "newest"))
    progress = control.progress
    full = None if progress is None else progress.full
    winner, reranked, config = None, False, config_of(search)
    if search.status == "finished" and config is not None:
        winner, reranked = winner_of(store, search, config)
    return SearchView(
        search=search,
        control=control,
        tasks=tuple(dict.fromkeys(task.task for task in store.search_tasks(search.id))),
        individuals=newest[0].index + 1 if newest else 0,
        failed=None if progress is None else progress.failed,
        best=(best[0].index, best[0].fitness or 0.0) if best else None,
        full=full_fitness(store, search) if full is None else full,
        winner=None if winner is None else (winner, reranked),
        scale=store.scales(search.id).fitness,
    )


def config_of(search: SearchRecord) -> RunConfig | None:
    """Return a search's configuration; None if another version of moevolve stored it and it can't be read."""
    try:
        return parse_stored_config(search.config, search.name)
    except UserError:
        return None


def spans_of(config: RunConfig | None) -> tuple[PhaseSpan, ...]:
    """Return the planned phases of a configuration; empty for imported individuals and for None."""
    return () if config is None else make_schedule(config).spans
