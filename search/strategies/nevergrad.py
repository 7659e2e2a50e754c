"""Any optimiser of nevergrad as a strategy, through ask and tell on the flattened genome.

Library: nevergrad (https://facebookresearch.github.io/nevergrad/). An optimiser's state can't be stored, so resume
repeats every ask and tell. The result is the same because each call has its own seed, also for numpy's global
generator, from which several optimisers draw.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import Child, Genome, GenomeSpace, Offspring
from moevolve.search.genomes.contract.operators import generator
from moevolve.search.genomes.contract.phases import NEVERGRAD, PhaseConfig
from moevolve.search.strategies.base import PhaseStrategy, fixed_offspring
from moevolve.store.records import IndividualRecord

# Weight of the tie-break in the loss: less than one example in 10,000, so it decides only between equal scores.
_TIE_BREAK = 1e-4
# Largest absolute value of a coordinate: some optimisers diverge, and genomes are float32.
_LIMIT = 1e6
# Loss of a candidate that failed before any other was evaluated.
_WORST = 1e6


class NevergradPhase(PhaseStrategy):
    """The strategy `nevergrad:<Optimizer>` in one phase.

    It starts at the best individual of the earlier phases, or else at the method's own start or a random one. Initial
    individuals are suggested to the optimiser. The loss is minus the fitness, with ties broken by the tie-break; a
    failed candidate gets the largest loss so far.

    Args:
        position: Position of the phase in the search.
        optimizer: Name of the optimiser in nevergrad's registry.
        window: Largest number of candidates under evaluation at once.

    Raises:
        UserError: Nevergrad has no such optimiser, it needs a package that isn't installed, it can't make that many
            candidates at once, or the genome has no coordinates to search.
    """

    def __init__(
        self,
        space: GenomeSpace[Genome],
        position: int,
        phase: PhaseConfig,
        optimizer: str,
        seed: int,
        window: int,
        first: int = 0,
    ) -> None:
        super().__init__(space, phase, seed, first)
        self._position, self._window = position, window
        self._name = f"{NEVERGRAD}{optimizer}"
        self._factory = _find(optimizer)
        if window > 1 and self._factory.no_parallelization:
            raise UserError(f"strategy {self._name}: it makes one candidate at a time; set window: 1, not {window}")
        self._optimizer: Any = None
        self._start: IndividualRecord | None = None
        self._open: dict[int, Any] = {}
        self._worst = -np.inf
        if space.measurement is None:
            self._point(generator(seed, 0), None)  # raises if the genome has no coordinates

    def tell(self, individual: IndividualRecord) -> None:
        candidate = self._open.pop(individual.index)
        if individual.fitness is None or individual.tie_break is None:
            loss = self._worst if np.isfinite(self._worst) else _WORST
        else:
            loss = -individual.fitness - _TIE_BREAK / (1 + np.exp(-individual.tie_break))
            self._worst = max(self._worst, loss)
        with self._calling(individual.index, "tell"):
            self._optimizer.tell(candidate, float(loss))

    def skip(self, index: int, initial: bool, start: IndividualRecord | None) -> None:
        self.ask(index, initial, start, ())

    def ask(self, index: int, initial: bool, start: IndividualRecord | None, taken: Container[str]) -> Child:
        """Make an individual; `taken` is ignored, since the optimiser learns from repeats, too."""
        rng = generator(self._seed, index)
        if self._optimizer is None:
            self._begin(rng, start)
        sampled = fixed_offspring(self._space, self._phase, index - self._first)
        if sampled is None and initial:
            sampled = self._space.sample(rng, self._phase)
        with self._calling(index, "ask"):
            if sampled is not None:
                self._optimizer.suggest(self._space.flatten(sampled.genome, self._phase))
            candidate = self._optimizer.ask()
        self._open[index] = candidate
        if sampled is not None:
            return sampled
        point = np.clip(np.nan_to_num(candidate.value), -_LIMIT, _LIMIT)
        genome = self._space.unflatten(point, self._phase)
        parents = () if self._start is None else (self._start.index,)
        return Offspring(genome, self._name, parents)

    def _begin(self, rng: np.random.Generator, start: IndividualRecord | None) -> None:
        import nevergrad as ng

        self._start = start
        point = ng.p.Array(init=self._point(rng, start))
        point.set_mutation(sigma=_SIGMA[self._phase.kind])
        point.random_state = np.random.RandomState(_word(self._seed, self._position, "nevergrad"))
        with self._calling(self._position, "begin"):
            self._optimizer = self._factory(point, budget=self._phase.evaluations, num_workers=self._window)

    def _point(self, rng: np.random.Generator, start: IndividualRecord | None) -> NDArray[np.float64]:
        """Return the optimiser's starting point: float64 [coordinates]."""
        own = self._space.start(self._phase) or self._space.sample(rng, self._phase)
        genome = own.genome if start is None else self._space.from_bytes(start.genome)
        point = self._space.flatten(genome, self._phase)
        if not point.size:
            raise UserError(
                f"strategy {self._name}: this genome has no coordinates to optimise; "
                "use strategy evolution, which evaluates it as it is"
            )
        return point

    @contextmanager
    def _calling(self, number: int, what: str) -> Iterator[None]:
        """Seed the global random numbers of one call to nevergrad, and name the optimiser in its exceptions."""
        try:
            with _global_numbers(_word(self._seed, number, f"nevergrad {what}")):
                yield
        except Exception as error:
            raise UserError(f"strategy {self._name}: {what} failed: {type(error).__name__}: {error}") from error


# Standard deviation of the first steps per kind of phase. Experts are flattened to scores of 0 and 1 for pruning.
_SIGMA = {"prune": 1.0, "merge": 0.1, "tune": 0.1}


# Packages that nevergrad doesn't require and imports only when it runs an optimiser, by the beginning of its name.
# NGOptF and its variants choose one of NLopt's at times.
_PACKAGES = {
    "AX": "ax-platform",
    "BOBYQA": "Py-BOBYQA",
    "BayesOptim": "bayes-optim",
    "FCMA": "fcmaes",
    "NGOptF": "nlopt",
    "NLOPT": "nlopt",
    "PCABO": "bayes-optim",
    "Pymoo": "pymoo",
    "SMAC": "smac",
    "pysot": "pySOT",
}


def _find(name: str) -> Any:
    # On import, nevergrad draws settings of a few optimisers at random.
    with _global_numbers(0):
        import nevergrad as ng
    registry = ng.optimizers.registry
    if name not in registry:
        near = difflib.get_close_matches(name, sorted(registry), n=5, cutoff=0.4) or ["DiagonalCMA", "TwoPointsDE"]
        raise UserError(
            f"strategy nevergrad:{name}: nevergrad has no such optimiser; use for example {', '.join(near)}"
        )
    for start, package in _PACKAGES.items():
        if name.startswith(start) and not _is_installed(package):
            raise UserError(
                f"strategy nevergrad:{name} requires the package {package}; "
                "install it, or use for example DiagonalCMA or TwoPointsDE"
            )
    return registry[name]


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


@contextmanager
def _global_numbers(seed: int) -> Iterator[None]:
    """Seed numpy's global generator within the block, and restore its state afterwards."""
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
