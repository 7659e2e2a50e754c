"""The contract of strategies: told the history in order of index, asked for the next individual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from moevolve.search.genomes.base import Genome
from moevolve.search.population import Member


@dataclass(frozen=True, slots=True)
class Proposal:
    """A new individual.

    Attributes:
        index: index in the search.
        phase: position of its phase.
        genome: what to evaluate.
        operator: how it was made.
        parents: indices of the individuals it was made from.
        note: how it was made, for its summary; mostly empty.
    """

    index: int
    phase: int
    genome: Genome
    operator: str
    parents: tuple[int, ...]
    note: str = ""


class Strategy(Protocol):
    """Makes individuals.

    The caller promises: before `ask(i)` exactly the individuals 0 .. visible(i) - 1 have been told, in order, and every
    index is asked for once, in order. So a strategy's answers are a function of (config, seed, evaluations of those
    individuals), and repeating the same calls rebuilds its state: resume is replay.
    """

    def tell(self, member: Member) -> None:
        """Take in one evaluated individual."""
        ...

    def ask(self, index: int) -> Proposal:
        """Make individual `index`."""
        ...

    def skip(self, index: int) -> None:
        """Like `ask`, for an individual that is stored already: only the state changes, as if it had been asked for."""
        ...

    def floor(self, index: int) -> float | None:
        """A fitness such that individual `index`, if it ends below, changes nothing that this strategy makes later.

        May be asked for right after `ask(index)` or `skip(index)`. None: there is no telling, or every fitness counts.
        """
        ...


class PhaseStrategy(Protocol):
    """Makes the individuals of one phase, under the same promise; it is told those of its own phase only.

    `initial` says whether the individual is one of the phase's initial ones, `start` is the best visible individual of
    the nearest earlier phase that has one.
    """

    def tell(self, member: Member) -> None:
        """Take in one evaluated individual of this phase."""
        ...

    def ask(self, index: int, initial: bool, start: Member | None) -> Proposal:
        """Make individual `index`."""
        ...

    def skip(self, index: int, initial: bool, start: Member | None) -> None:
        """Like `ask`, for an individual that is stored already."""
        ...

    def floor(self, start: Member | None) -> float | None:
        """The same as `Strategy.floor` for the next individual of this phase, later phases left out.

        Args:
            start: the phase's start, if it can't change any more.
        """
        ...
