"""One-shot methods that choose experts from statistics on calibration tokens.

- `frequency`, `soft_activation`, `reap` and `energy` keep the experts with the highest score. Sources: EEP (arXiv
  2407.00945), App. A.2, for the first two; REAP the Experts (arXiv 2510.13999), Sec. 4, the saliency criterion: the
  mean over the tokens that chose an expert of its routing weight times the norm of its output. `energy` is the sum, not
  the mean, of squares of routing weight times norm: what dropping an expert by itself changes in the layer's output,
  squared, which is the diagonal of HOPE's F below.
- `naee` keeps the subset of experts that changes the layer's output least. Source: NAEE (arXiv 2402.14800), Sec. 3.2:
  all subsets are compared by the Frobenius norm of the difference to the whole layer's output; also a baseline in EEP
  (arXiv 2407.00945), App. A.2.
- `hope` drops the experts whose loss, pair by pair, changes a layer's output least. With p the indicator of the dropped
  experts and g_i f_i the weighted output of expert i on a token that chose it (else 0), it minimises `p^T F p` with
  `F_ij = sum g_i g_j |f_i| |f_j|` over tokens: an upper bound of the squared error of dropping them without rescaling
  the other weights. Such sums need n x n numbers per layer however many tokens there are.
- `most`, `middle` and `fewest` keep the experts of the most energy. Where several numbers of experts are tried
  (`genome.neuron_share`), they keep the largest number, the one in the middle, and the smallest one.
- `identity` keeps all experts.

Layers of a group keep the same experts. Scores are then averaged after each layer's are divided by their sum, and
squared errors are added after each layer's are divided by its squared output. One layer per group is the papers'
method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.contract.kind import Baseline
from moevolve.search.genomes.contract.phases import PhaseConfig, PrunePhase
from moevolve.search.genomes.eep.section import EepSection, token_limit
from moevolve.search.genomes.eep.space import EepGenome, EepSpace
from moevolve.search.genomes.eep.subsets import mean_shares
from moevolve.workers.contract.edits import Measurement
from moevolve.workers.methods.eep.edit import ExpertsMeasurement, Statistic, SubsetMeasurement

# Largest number of subsets that are all tried; of more, experts are dropped or swapped one by one.
_EXHAUSTIVE = 5000
# Smallest gain of a swap, as a share of the error of dropping all experts; smaller ones are rounding errors.
_LEAST_GAIN = 1e-12


def _hope(space: EepSpace) -> Offspring[EepGenome]:
    """Drop the experts with the least sum of `pair_norms`, averaged over a group's layers, over their pairs."""
    groups = mean_shares(space.statistics["pair_norms"], space.layer_groups)
    every, count = np.arange(space.experts), space.experts - space.retained
    kept = [np.setdiff1d(every, cheapest_to_drop(matrix, count)) for matrix in groups]
    return Offspring(space.from_kept(np.stack(kept)), "hope", ())


def cheapest_to_drop(matrix: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Find `count` ascending indices with the least sum of a symmetric matrix over their pairs.

    All subsets are tried if there are few, and the first one with the least sum is taken. Otherwise indices are added
    greedily and then swapped one for one, the best swap first, until none lowers the sum: a local minimum.
    """
    size = len(matrix)
    if comb(size, count) <= _EXHAUSTIVE:
        subsets = np.array(list(combinations(range(size), count)), dtype=np.int64)
        sums = matrix[subsets[:, :, None], subsets[:, None, :]].sum(axis=(1, 2))
        return subsets[int(np.argmin(sums))]
    dropped, diagonal = np.zeros(size, dtype=bool), matrix.diagonal()
    for _ in range(count):
        added = diagonal + 2 * matrix[:, dropped].sum(axis=1)
        dropped[int(np.argmin(np.where(dropped, np.inf, added)))] = True
    least = _LEAST_GAIN * float(np.abs(matrix).sum())
    while True:
        sums = matrix[:, dropped].sum(axis=1)
        inside, outside = np.flatnonzero(dropped), np.flatnonzero(~dropped)
        without = 2 * sums[inside] - diagonal[inside]
        within = diagonal[outside][:, None] + 2 * (sums[outside][:, None] - matrix[np.ix_(outside, inside)])
        change = within - without[None, :]
        best = divmod(int(np.argmin(change)), len(inside))
        if change[best] >= -least:
            return inside
        dropped[outside[best[0]]], dropped[inside[best[1]]] = True, False


@dataclass(frozen=True, slots=True)
class EepBaseline(Baseline):
    """A one-shot choice of experts.

    Attributes:
        statistics: Statistics that must be measured.
        compares_subsets: True if the calibration must compare subsets of experts.
        per_routing_group: True if it can keep equally many experts in every routing group.
        keeps_all: True if it keeps all experts.
    """

    statistics: tuple[Statistic, ...] = ()
    compares_subsets: bool = False
    per_routing_group: bool = True
    keeps_all: bool = False

    def problem(self, space: EepSpace) -> str | None:
        if self.keeps_all and space.retained < space.experts:
            return f"keeps every expert, which takes genome.experts: {space.experts} instead of {space.retained}"
        routing_groups = space.subsets.routing_groups
        if self.per_routing_group or routing_groups == 1:
            return None
        return (
            f"chooses among all experts at once, and this {space.facts.family} model has {routing_groups} routing "
            "groups that must keep as many each; use another"
        )


def _scored(
    operator: str,
    statistic: Statistic,
    scores: Callable[[EepSpace], NDArray[np.floating | np.integer]],
    place: Callable[[int], int] = lambda counts: 0,
) -> EepBaseline:
    """Make the baseline that keeps the experts with the highest scores [layers, n], which need a statistic.

    `place` says at which place of so many numbers of retained experts the one that it keeps is.
    """

    def make(space: EepSpace) -> Offspring[EepGenome]:
        shares = mean_shares(scores(space), space.layer_groups)
        subsets = space.keeping(space.counts[place(len(space.counts))]).subsets
        return Offspring(space.from_kept(subsets.best(shares)), operator, ())

    return EepBaseline(make, (statistic,))


def _naee(space: EepSpace) -> Offspring[EepGenome]:
    """Keep the subset with the least error.

    The calibration (`moevolve.workers.methods.eep`) measures the error of every subset, or, if there are too many, a
    greedy choice.
    """
    count = comb(space.experts, space.retained)
    errors = space.statistics.get("subset_discrepancy")
    if errors is None:
        note = f"naee, greedy: {count} subsets are above the limit"
        return Offspring(space.from_kept(space.statistics["subset_kept"]), "naee", (), note)
    subsets = np.array(list(combinations(range(space.experts), space.retained)), dtype=np.int64)
    owners = np.array(space.layer_groups)
    sums = [errors[owners == group].astype(np.float64).sum(axis=0) for group in range(space.groups)]
    best = [int(np.argmin(each)) for each in sums]
    return Offspring(space.from_kept(subsets[best]), "naee", (), f"naee, exhaustive: {count} subsets")


def _identity(space: EepSpace) -> Offspring[EepGenome]:
    """Keep all experts; with `active` or `dynamic_skipping` this is still an edit."""
    every = np.tile(np.arange(space.experts), (space.groups, 1))
    return Offspring(space.from_kept(every), "identity", ())


_PLACES: dict[str, Callable[[int], int]] = {
    "most": lambda counts: 0,
    "middle": lambda counts: (counts - 1) // 2,
    "fewest": lambda counts: counts - 1,
}
BASELINES: dict[str, EepBaseline] = {
    "frequency": _scored("frequency", "usage", lambda space: space.statistics["counts"]),
    "soft_activation": _scored("soft_activation", "usage", lambda space: space.statistics["soft_activation"]),
    **{name: _scored(name, "importance", partial(EepSpace.score, name=name)) for name in ("reap", "energy")},
    **{
        name: _scored(name, "importance", partial(EepSpace.score, name="energy"), place)
        for name, place in _PLACES.items()
    },
    "naee": EepBaseline(_naee, compares_subsets=True, per_routing_group=False),
    "hope": EepBaseline(_hope, ("pairs",), per_routing_group=False),
    "identity": EepBaseline(_identity, keeps_all=True),
}


def expert_measurements(
    space: EepSpace, section: EepSection, phases: Sequence[PhaseConfig]
) -> tuple[Measurement | None, ...]:
    """Return the measurements of scores, for baselines and surrogates, and of subsets; None for what isn't needed."""
    tokens = token_limit(section.calibration_tokens)
    needed = [BASELINES[name] for phase in phases for name in phase.baselines if name in BASELINES]
    statistics: set[Statistic] = {name for baseline in needed for name in baseline.statistics}
    if any(isinstance(phase, PrunePhase) and phase.strategy == "surrogate" for phase in phases):
        statistics |= {"usage", "importance", "pairs"}  # for `EepSpace.importance`
    # Errors are those of `importance`, whatever is measured with it.
    measured = tuple(sorted({"importance", *statistics}))
    scores = ExpertsMeasurement(measured, None, tokens, section.until(space.counts[-1])) if statistics else None
    if not any(baseline.compares_subsets for baseline in needed):
        return scores, None
    compared = SubsetMeasurement(
        retained=space.retained,
        active=space.active,
        layer_groups=space.layer_groups,
        logits_space=space.router_space == "logits",
        limit=_EXHAUSTIVE,
        sample=section.naee_tokens,
    )
    return scores, ExpertsMeasurement((), compared, tokens)
