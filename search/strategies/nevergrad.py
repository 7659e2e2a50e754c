"""Any optimiser of nevergrad as a strategy, through ask and tell on the flattened genome.

Library: nevergrad (https://facebookresearch.github.io/nevergrad/). An optimiser's state can't be stored, so resume
repeats every ask and tell; that is exact because each call gets random numbers of its own, numpy's global generator
included, which several optimisers draw from.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import GenomeSpace, Offspring
from moevolve.search.genomes.contract.rng import generator
from moevolve.search.settings.phases import NevergradSection, PhaseConfig
from moevolve.search.strategies.base import initial_offspring
from moevolve.store.records import IndividualRecord

_TIE_BREAK = 1e-4
"""Weight of the tie-break in the loss: below one example in 10,000, so that it only decides between equal scores."""
_LIMIT = 1e6
"""Coordinates beyond this are cut: some optimisers run away, and float32 has an end."""
_WORST = 1e6
"""Loss of a candidate that failed before any other was evaluated."""


class NevergradPhase:
    """The strategy `nevergrad:<Optimizer>` in one phase.

    It starts at the best individual of the phases before, or else at the method's own start or a random one. Initial
    individuals, baselines and random ones, are suggested to the optimiser. The loss is minus the fitness, ties broken
    by the gold log-probability; a failed candidate is told as the worst seen so far.

    Args:
        space: where genomes come from.
        position: of the phase among the phases.
        phase: its settings.
        section: which optimiser, and the standard deviation of its first steps.
        seed: the search's seed.
        in_flight: most candidates that are asked for before the first of them is told.
        first: index of the phase's first individual.

    Raises:
        UserError: nevergrad has no such optimiser, it can't make that many candidates at once, or the genome has no
            coordinates to search.
    """

    def __init__(
        self,
        space: GenomeSpace[Any],
        position: int,
        phase: PhaseConfig,
        section: NevergradSection,
        seed: int,
        in_flight: int,
        first: int = 0,
    ) -> None:
        self._space = space
        self._position = position
        self._phase = phase
        self._section = section
        self._seed = seed
        self._in_flight = in_flight
        self._first = first
        self._name = f"nevergrad:{section.optimizer}"
        self._factory = _find(section.optimizer)
        if in_flight > 1 and self._factory.no_parallelization:
            raise UserError(f"strategy {self._name}: it makes one candidate at a time; set window: 1, not {in_flight}")
        self._optimizer: Any = None
        self._start: IndividualRecord | None = None
        self._open: dict[int, Any] = {}
        self._worst = -np.inf
        if space.recipe is None:
            self._point(generator(seed, 0), None)  # only to see that there is one

    def tell(self, individual: IndividualRecord) -> None:
        candidate = self._open.pop(individual.index)
        if individual.fitness is None or individual.tie_break is None:
            loss = self._worst if np.isfinite(self._worst) else _WORST
        else:
            loss = -individual.fitness - _TIE_BREAK / (1 + np.exp(-individual.tie_break))
            self._worst = max(self._worst, loss)
        with self._calling(individual.index, "tell"):
            self._optimizer.tell(candidate, float(loss))

    def tell_before(self, individual: IndividualRecord) -> None:
        """Nothing: an optimiser begins at one point, the phase's start."""

    def skip(self, index: int, initial: bool, start: IndividualRecord | None) -> None:
        self.ask(index, initial, start, ())

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Offspring[Any]:
        """See `PhaseStrategy`; a repeat is told to the optimiser like anything else, so `taken` changes nothing."""
        rng = generator(self._seed, index)
        if self._optimizer is None:
            self._begin(rng, start)
        sampled = initial_offspring(self._space, self._phase, rng, index - self._first, initial)
        with self._calling(index, "ask"):
            if sampled is not None:
                self._optimizer.suggest(self._space.flatten(sampled.genome, self._phase))
            candidate = self._optimizer.ask()
        self._open[index] = candidate
        if sampled is not None:
            return sampled
        genome = self._space.unflatten(_bounded(candidate.value), self._phase)
        parents = () if self._start is None else (self._start.index,)
        return Offspring(genome, self._name, parents)

    def _begin(self, rng: np.random.Generator, start: IndividualRecord | None) -> None:
        import nevergrad as ng

        self._start = start
        point = ng.p.Array(init=self._point(rng, start))
        point.set_mutation(sigma=self._section.sigma or _SIGMA[self._phase.kind])
        point.random_state = np.random.RandomState(_word(self._seed, self._position, "nevergrad"))
        with self._calling(self._position, "begin"):
            self._optimizer = self._factory(point, budget=self._phase.evaluations, num_workers=self._in_flight)

    def _point(self, rng: np.random.Generator, start: IndividualRecord | None) -> NDArray[np.float64]:
        """Where the optimiser begins."""
        own = self._space.start(self._phase) or self._space.sample(rng, self._phase)
        genome = own.genome if start is None else self._space.from_bytes(start.genome)
        point = self._space.flatten(genome, self._phase)
        if not point.size:
            raise UserError(
                f"strategy {self._name}: this genome has no coordinates, so there is nothing to optimise; "
                "use strategy evolution, which evaluates it as it is"
            )
        return point

    @contextmanager
    def _calling(self, number: int, what: str) -> Iterator[None]:
        """Run nevergrad on global random numbers of this call's own; its own exceptions name the optimiser."""
        try:
            with _global_numbers(_word(self._seed, number, f"nevergrad {what}")):
                yield
        except Exception as error:
            raise UserError(f"strategy {self._name}: {what} failed: {type(error).__name__}: {error}") from error


_SIGMA = {"prune": 1.0, "merge": 0.1, "tune": 0.1}
"""First standard deviation per kind of phase: scores of retained experts are 1 and 0, matrix entries move less."""


def _find(name: str) -> Any:
    # Importing it draws the settings of a few optimisers at random.
    with _global_numbers(0):
        import nevergrad as ng
    registry = ng.optimizers.registry
    if name in registry:
        return registry[name]
    near = difflib.get_close_matches(name, sorted(registry), n=5, cutoff=0.4)
    hint = f"near matches: {', '.join(near)}" if near else "for example DiagonalCMA, CMA or TwoPointsDE"
    raise UserError(f"strategy nevergrad:{name}: nevergrad has no such optimiser; {hint}")


@contextmanager
def _global_numbers(seed: int) -> Iterator[None]:
    """Numpy's global generator seeded with `seed` inside, and as it was outside."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


def _word(seed: int, number: int, stream: str) -> int:
    return int(generator(seed, number, stream).integers(2**32))


def _bounded(point: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.clip(np.nan_to_num(point), -_LIMIT, _LIMIT)
