"""What one search is made of, apart from where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.base import Genome, GenomeSpace
from moevolve.search.loop.evaluation_cache import Job, SplitRef
from moevolve.search.loop.schedule import Schedule
from moevolve.workers.facts import ModelFacts
from moevolve.workers.methods.base import IdentityEdit


@dataclass(frozen=True)
class SearchSetup:
    """One search, checked and ready to run.

    Attributes:
        config: its configuration, paths resolved.
        search_id: id in the store.
        facts: the model.
        space: the genomes.
        schedule: index arithmetic.
        prepared: the tasks' rendered splits, per split name in the order of the tasks.
        tie_breakers: with `tie_break: agreement`, the same splits under the fitness that breaks ties, where candidates
            are ranked; else empty.
        held_out: `test` splits of tasks that the search doesn't know, for the final table.
    """

    config: RunConfig
    search_id: str
    facts: ModelFacts = field(repr=False)
    space: GenomeSpace[Any] = field(repr=False)
    schedule: Schedule = field(repr=False)
    prepared: Mapping[Split, tuple[PreparedSplit, ...]] = field(repr=False)
    tie_breakers: Mapping[Split, tuple[PreparedSplit, ...]] = field(default_factory=dict, repr=False)
    held_out: tuple[PreparedSplit, ...] = field(default=(), repr=False)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each task in the fitness."""
        return tuple(task.weight for task in self.config.tasks)

    def splits(self, split: Split) -> tuple[SplitRef, ...]:
        """The tasks' splits of one name, in order."""
        return tuple(SplitRef.of(item) for item in self.prepared[split])

    def tie_splits(self, split: Split) -> tuple[SplitRef, ...]:
        """What breaks ties on the splits of one name, task by task; empty if nothing is evaluated for it."""
        return tuple(SplitRef.of(item) for item in self.tie_breakers.get(split, ()))

    @property
    def all_prepared(self) -> dict[str, PreparedSplit]:
        """Every split that a worker may be sent, by fingerprint."""
        groups = (*self.prepared.values(), *self.tie_breakers.values(), self.held_out)
        return {item.fingerprint: item for group in groups for item in group}

    def job(self, genome: Genome, split: Split) -> Job:
        """Score a genome on one split of every task."""
        description = self.space.describe(genome)
        return Job(
            genome.express(),
            self._evaluated(split),
            description.experts,
            description.active,
            description.parameters,
            description.penalty,
        )

    def full_job(self, split: Split) -> Job:
        """Score the unedited model on one split of every task."""
        return Job(IdentityEdit(), self._evaluated(split))

    def held_out_job(self, genome: Genome | None) -> Job:
        """Score a genome, or the unedited model, on the tasks that the search doesn't know."""
        splits = tuple(SplitRef.of(item) for item in self.held_out)
        if genome is None:
            return Job(IdentityEdit(), splits)
        description = self.space.describe(genome)
        return Job(genome.express(), splits, description.experts, description.active, description.parameters)

    def _evaluated(self, split: Split) -> tuple[SplitRef, ...]:
        return tuple(dict.fromkeys((*self.splits(split), *self.tie_splits(split))))
