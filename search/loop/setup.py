"""What one search is made of, apart from where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import SCORED, PreparedSplit, Split, SplitRef
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Description, Genome, GenomeSpace
from moevolve.search.strategies.schedule import Schedule, rounds_notes
from moevolve.store.records import SearchTaskRecord
from moevolve.workers.contract.capacity import NeededMemory
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.messages import EvaluationRequest


def needs_calibration(space: GenomeSpace[Any]) -> bool:
    """Whether a search measures something of the unedited model before it begins, on rows that no fitness reads."""
    return space.recipe is not None


def set_aside_note(task: str, rows: int | None) -> str:
    """For people: where the rows are from that a task without a `calibration` split is measured on.

    Args:
        task: its name.
        rows: how many they are; None if that isn't known yet.
    """
    are = (
        "a quarter of its `search` rows is"
        if rows is None
        else f"{rows:,} of its `search` rows {'are' if rows > 1 else 'is'}"
    )
    return (
        f"task {task} has no `calibration` split: {are} set aside to measure on; give it a `calibration` split to "
        "search on all of them"
    )


@dataclass(frozen=True)
class SearchSetup:
    """One search, checked and ready to run.

    Attributes:
        config: its configuration, paths resolved.
        search_id: id in the store.
        facts: the model.
        space: the genomes.
        schedule: index arithmetic.
        prepared: the tasks' rendered splits, per split name in the order of the tasks; `calibration` if the search
            needs it.
        tie_breakers: with `tie_break: agreement`, the same splits under the fitness that breaks ties, where candidates
            are ranked; else empty.
        held_out: `test` splits of tasks that the search doesn't know, for the final table.
        needed: memory that a worker has to find before it loads anything; None if that isn't known.

    Raises:
        UserError: two splits have the same name and different examples, so that tables couldn't tell them apart.
    """

    config: RunConfig
    search_id: str
    facts: ModelFacts = field(repr=False)
    space: GenomeSpace[Any] = field(repr=False)
    schedule: Schedule = field(repr=False)
    prepared: Mapping[Split, tuple[PreparedSplit, ...]] = field(repr=False)
    tie_breakers: Mapping[Split, tuple[PreparedSplit, ...]] = field(default_factory=dict, repr=False)
    held_out: tuple[PreparedSplit, ...] = field(default=(), repr=False)
    needed: NeededMemory | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        known: dict[tuple[str, Split], str] = {}
        for item in self._all_splits:
            if known.setdefault((item.task, item.split), item.fingerprint) != item.fingerprint:
                raise UserError(
                    f"task {item.task}: its {item.split} split is used twice with different examples (by tasks, "
                    "tie_break: agreement, or final.held_out); give both the same counts, or one another name"
                )

    @property
    def _all_splits(self) -> tuple[PreparedSplit, ...]:
        groups = (*self.prepared.values(), *self.tie_breakers.values(), self.held_out)
        return tuple(item for group in groups for item in group)

    @property
    def beside(self) -> tuple[SearchTaskRecord, ...]:
        """What the search is recorded with beside its fitness, each split of weight 0.

        First what is measured on, then what breaks ties, then held-out tasks.
        """
        scored = [item for name in SCORED for item in self.prepared.get(name, ())]
        found = {(item.task, item.split): item.fingerprint for item in self._all_splits}
        for item in scored:
            found.pop((item.task, item.split), None)
        return tuple(SearchTaskRecord(task, split, key, weight=0.0) for (task, split), key in found.items())

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each task in the fitness."""
        return tuple(task.weight for task in self.config.tasks)

    @property
    def notes(self) -> tuple[str, ...]:
        """What people should know: of each task without rows to measure on, and of each phase of few rounds, a line."""
        pairs = zip(self.config.tasks, self.prepared.get("calibration", ()), strict=False)
        aside = [set_aside_note(split.task, len(split.examples)) for section, split in pairs if section.sets_aside]
        return (*aside, *rounds_notes(self.config))

    def splits(self, split: Split) -> tuple[SplitRef, ...]:
        """The tasks' splits of one name, in order."""
        return tuple(item.ref for item in self.prepared[split])

    def tie_splits(self, split: Split) -> tuple[SplitRef, ...]:
        """What breaks ties on the splits of one name, task by task; empty if nothing is evaluated for it."""
        return tuple(item.ref for item in self.tie_breakers.get(split, ()))

    @property
    def all_prepared(self) -> dict[str, PreparedSplit]:
        """Every split that a worker may be sent, by fingerprint."""
        return {item.fingerprint: item for item in self._all_splits}

    def scored_on(self, split: Split) -> tuple[SplitRef, ...]:
        """All that a candidate is evaluated on for the splits of one name."""
        return tuple(dict.fromkeys((*self.splits(split), *self.tie_splits(split))))

    def request(self, genome: Genome | None, splits: tuple[SplitRef, ...]) -> EvaluationRequest:
        """Score a genome, or the unedited model, on some splits."""
        if genome is None:
            return EvaluationRequest(IdentityEdit(), splits)
        return request_of(genome.express(), self.space.describe(genome), splits)


def request_of(edit: Edit, description: Description, splits: tuple[SplitRef, ...]) -> EvaluationRequest:
    """Score an edit on some splits."""
    return EvaluationRequest(edit, splits, description.experts, description.active, description.parameters)
