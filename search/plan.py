"""What one search is made of, apart from where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.config import RunConfig
from moevolve.search.desk import Job, SplitRef
from moevolve.search.genomes.base import Genome, GenomeSpace
from moevolve.search.phases import Schedule
from moevolve.workers.edits.base import IdentityEdit
from moevolve.workers.messages import ModelFacts


@dataclass(frozen=True)
class Plan:
    """One search, checked and ready to run.

    Attributes:
        config: its configuration, paths resolved.
        search_id: id in the store.
        facts: the model.
        space: the genomes.
        schedule: index arithmetic.
        prepared: the tasks' rendered splits, per split name in the order of the tasks.
    """

    config: RunConfig
    search_id: str
    facts: ModelFacts = field(repr=False)
    space: GenomeSpace[Any] = field(repr=False)
    schedule: Schedule = field(repr=False)
    prepared: Mapping[Split, tuple[PreparedSplit, ...]] = field(repr=False)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each task in the fitness."""
        return tuple(task.weight for task in self.config.tasks)

    def splits(self, split: Split) -> tuple[SplitRef, ...]:
        """The tasks' splits of one name, in order."""
        return tuple(SplitRef(item.task, item.split, item.fingerprint) for item in self.prepared[split])

    @property
    def all_splits(self) -> dict[str, PreparedSplit]:
        """Every prepared split by fingerprint."""
        return {item.fingerprint: item for group in self.prepared.values() for item in group}

    def job(self, genome: Genome, split: Split) -> Job:
        """Score a genome on one split of every task."""
        description = self.space.describe(genome)
        return Job(
            genome.express(),
            self.splits(split),
            description.experts,
            description.active,
            description.parameters,
            description.penalty,
        )

    def full_job(self, split: Split) -> Job:
        """Score the unedited model on one split of every task."""
        return Job(IdentityEdit(), self.splits(split))
