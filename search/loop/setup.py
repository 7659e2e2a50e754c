"""The parts of one search that don't depend on where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.metrics import scale_of
from moevolve.evaluators.scales import ScaleName, common_scale
from moevolve.evaluators.types import SCORED, PreparedSplit, Split, SplitRef
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Description, Genome, GenomeSpace
from moevolve.search.strategies.schedule import Schedule, rounds_notes
from moevolve.store.records import SearchTaskRecord
from moevolve.workers.contract.capacity import NeededMemory
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.messages import EvaluationRequest


def needs_calibration(space: GenomeSpace[Genome]) -> bool:
    """True if the space needs statistics of the unedited model, measured on calibration rows before the search."""
    return space.measurement is not None


def calibration_rows_note(task: str, rows: int | None) -> str:
    """Return a note for users that a task without a `calibration` split uses `search` rows for calibration.

    `rows` is the number of rows set aside; None if it isn't known yet.
    """
    if rows is None:
        are = "a quarter of its `search` rows is"
    else:
        are = f"{rows:,} of its `search` rows {'are' if rows > 1 else 'is'}"
    return (
        f"task {task} has no `calibration` split: {are} set aside to measure on; give it a `calibration` split to "
        "search on all of them"
    )


@dataclass(frozen=True)
class SearchSetup:
    """One search, checked and ready to run.

    Attributes:
        config: Configuration with resolved paths.
        prepared: Rendered splits of the tasks, by split name and in the order of the tasks; with `calibration` if the
            search needs it.
        held_out: Rendered `test` splits of tasks outside the fitness, for the final table.
        needed: Memory that a worker must find before it loads the model; None if it isn't known.

    Raises:
        UserError: Two splits have the same task and name but different examples.
    """

    config: RunConfig
    search_id: str
    facts: ModelFacts = field(repr=False)
    space: GenomeSpace[Genome] = field(repr=False)
    schedule: Schedule = field(repr=False)
    prepared: Mapping[Split, tuple[PreparedSplit, ...]] = field(repr=False)
    held_out: tuple[PreparedSplit, ...] = field(default=(), repr=False)
    needed: NeededMemory | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        known: dict[tuple[str, Split], str] = {}
        for item in self._all_splits:
            if known.setdefault((item.task, item.split), item.fingerprint) != item.fingerprint:
                raise UserError(
                    f"task {item.task}: its {item.split} split is used twice with different examples (by tasks or "
                    "final.held_out); give both the same counts, or one another name"
                )

    @property
    def _all_splits(self) -> tuple[PreparedSplit, ...]:
        return tuple(item for group in (*self.prepared.values(), self.held_out) for item in group)

    @property
    def auxiliary_tasks(self) -> tuple[SearchTaskRecord, ...]:
        """The recorded splits that don't enter the fitness, with weight 0: calibration, held-out tasks."""
        scored = {(item.task, item.split) for name in SCORED for item in self.prepared.get(name, ())}
        found = {(item.task, item.split): item.fingerprint for item in self._all_splits}
        return tuple(
            SearchTaskRecord(task, split, fingerprint, weight=0.0)
            for (task, split), fingerprint in found.items()
            if (task, split) not in scored
        )

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(task.weight for task in self.config.tasks)

    @property
    def scale(self) -> ScaleName:
        """The scale that fitness is shown on; a share of the unedited model's score is in %."""
        if self.config.task_aggregation == "worst":
            return "percent"
        return common_scale(scale_of(split.metric) for split in self.prepared["search"])

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users, one line each: tasks without calibration rows, and phases of few rounds."""
        pairs = zip(self.config.tasks, self.prepared.get("calibration", ()), strict=False)
        held = [split for section, split in pairs if section.holds_out_calibration]
        aside = [calibration_rows_note(split.task, len(split.examples)) for split in held]
        return (*aside, *rounds_notes(self.config))

    def splits(self, split: Split) -> tuple[SplitRef, ...]:
        """References to the tasks' splits of one name, in order."""
        return tuple(item.ref for item in self.prepared[split])

    @property
    def all_prepared(self) -> dict[str, PreparedSplit]:
        """Every split that a worker may be sent, by fingerprint."""
        return {item.fingerprint: item for item in self._all_splits}

    def request(self, genome: Genome | None, splits: tuple[SplitRef, ...]) -> EvaluationRequest:
        """Return the request to score a genome, or the unedited model if it is None, on some splits."""
        if genome is None:
            return EvaluationRequest(IdentityEdit(), splits)
        return request_of(genome.express(), self.space.describe(genome), splits)


def request_of(edit: Edit, description: Description, splits: tuple[SplitRef, ...]) -> EvaluationRequest:
    """Return the request to score an edit on some splits."""
    return EvaluationRequest(
        edit, splits, description.experts, description.active, description.parameters, description.active_parameters
    )
