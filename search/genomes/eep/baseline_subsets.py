"""Keep the experts that, together, change the layers' outputs least: as they are (NAEE), or once they are fitted.

Source of `naee`: Not All Experts are Equal (NAEE; https://arxiv.org/abs/2402.14800), Sec. 3.2: per layer, all choices
of retained experts are compared by the Frobenius norm of the difference to the whole layer's output; as a baseline in
Efficient Expert Pruning (https://arxiv.org/abs/2407.00945), App. A.2. `fitted` is ours: the choice for what it gives
after repair, by what a closed-form fit of each subset leaves of the difference.

The comparisons themselves are parts of the calibration (`moevolve.workers.methods.eep.expert_subsets` and
`fitted_subsets`), and so is the fallback where there are too many choices. In a group of layers, squared differences
relative to each layer's squared output are added; one layer per group is the paper's method.
"""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np

from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.eep.space import EepSpace


def naee(space: EepSpace) -> Offspring[EepGenome]:
    """The pruning genome of the best subset per group, from `subset_discrepancy` or else `subset_kept`."""
    return _best(space, "naee", "subset")


def fitted(space: EepSpace) -> Offspring[EepGenome]:
    """The pruning genome of the subset that a fit leaves least of, from `fitted_discrepancy` or else `fitted_kept`."""
    return _best(space, "fitted", "fitted")


def _best(space: EepSpace, operator: str, array: str) -> Offspring[EepGenome]:
    choices = comb(space.experts, space.retained)
    found = space.measured.get(f"{array}_discrepancy")
    if found is None:
        kept = space.measured[f"{array}_kept"]
        note = f"{operator}, greedy: {choices} subsets are above the limit"
        return Offspring(space.from_kept(kept), operator, (), note)
    subsets = np.array(list(combinations(range(space.experts), space.retained)), dtype=np.int64)
    owners = np.array(space.layer_groups)
    sums = [found[owners == group].astype(np.float64).sum(axis=0) for group in range(space.groups)]
    best = [int(np.argmin(each)) for each in sums]
    return Offspring(space.from_kept(subsets[best]), operator, (), f"{operator}, exhaustive: {choices} subsets")
