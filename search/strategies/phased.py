"""The strategy of a search: one per phase, each starting from the best individual of the earlier phases."""

from __future__ import annotations

from collections.abc import Container, Sequence

from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Child, Genome, GenomeSpace
from moevolve.search.genomes.contract.phases import NEVERGRAD, RepairPhase
from moevolve.search.genomes.repaired import RepairedSpace
from moevolve.search.strategies.base import PhaseStrategy, rank_key
from moevolve.search.strategies.evolution import Evolution
from moevolve.search.strategies.nevergrad import NevergradPhase
from moevolve.search.strategies.repairing import RepairStrategy
from moevolve.search.strategies.schedule import Schedule
from moevolve.search.strategies.surrogate import Surrogate
from moevolve.store.records import IndividualRecord


class PhasedStrategy:
    """The strategy of a whole search: the strategies of its phases, in order.

    Before `ask(i)` the caller tells exactly the individuals 0 .. visible(i) - 1, in order, and it asks for every index
    once, in order. So a strategy's answers are a function of (config, seed, evaluations of those individuals), and
    repeating the same calls rebuilds its state: resume is replay. The genomes of all individuals before i, unlike their
    scores, are such a function too, so a strategy may use `taken`.
    """

    def __init__(self, strategies: Sequence[PhaseStrategy], schedule: Schedule) -> None:
        self._strategies = tuple(strategies)
        self._schedule = schedule
        self._best: list[IndividualRecord | None] = [None] * len(self._strategies)

    def tell(self, individual: IndividualRecord) -> None:
        """Add one evaluated individual to the history."""
        position = self._schedule.span(individual.index).position
        best = self._best[position]
        if individual.fitness is not None and (best is None or rank_key(individual) < rank_key(best)):
            self._best[position] = individual
        self._strategies[position].tell(individual)
        for later in self._strategies[position + 1 :]:
            later.tell_before(individual)

    def ask(self, index: int, taken: Container[str]) -> Child:
        """Make individual `index`; `taken` are the phenotype hashes of all before it, evaluated or not."""
        position = self._schedule.span(index).position
        return self._strategies[position].ask(index, self._schedule.is_initial(index), self._start(position), taken)

    def skip(self, index: int) -> None:
        """Change the state as `ask` does, for an individual that is stored already."""
        position = self._schedule.span(index).position
        self._strategies[position].skip(index, self._schedule.is_initial(index), self._start(position))

    def _start(self, position: int) -> IndividualRecord | None:
        return next((best for best in reversed(self._best[:position]) if best is not None), None)


def make_strategy(config: RunConfig, space: GenomeSpace[Genome], schedule: Schedule) -> PhasedStrategy:
    """Return the strategy of a configuration; phases that name none use the search's.

    Raises:
        UserError: Nevergrad has no such optimiser, or it doesn't suit the phase.
    """
    phases: list[PhaseStrategy] = []
    for position, phase in enumerate(config.phases):
        name, first = phase.strategy or config.strategy, schedule.spans[position].start
        if isinstance(phase, RepairPhase):
            assert isinstance(space, RepairedSpace), "a search with a repair phase has a space for it"
            phases.append(RepairStrategy(space, phase, config.phases[position - 1], config.seed))
        elif name == "evolution":
            phases.append(Evolution(space, phase, config.seed, first))
        elif name == "surrogate":
            phases.append(Surrogate(space, phase, config.seed, first))
        else:
            optimizer = name.removeprefix(NEVERGRAD)
            phases.append(NevergradPhase(space, position, phase, optimizer, config.seed, schedule.window, first))
    return PhasedStrategy(phases, schedule)
