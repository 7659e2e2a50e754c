"""Baselines that drop experts by pairs, against all subsets tried one by one."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import eep_space, few

from moevolve.search.genomes.eep import baselines
from moevolve.search.genomes.eep.baselines import BASELINES, cheapest_to_drop
from moevolve.workers.contract.edits import Calibration


def outputs_of(seed: int, tokens: int, experts: int, hidden: int = 4) -> np.ndarray:
    """Weighted outputs [tokens, experts, hidden] of two of the experts per token."""
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(tokens, experts, hidden))
    for token in range(tokens):
        outputs[token, rng.permutation(experts)[2:]] = 0
    return outputs


@few
@given(seed=st.integers(0, 2**32 - 1), experts=st.integers(2, 7), data=st.data())
def test_the_least_error_of_all_subsets_is_found(seed: int, experts: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, experts - 1))
    outputs = outputs_of(seed, 40, experts)
    gram = np.einsum("tih,tjh->ij", outputs, outputs)
    # The definition: what the layer's output misses without these experts.
    errors = {
        dropped: float(np.square(outputs[:, list(dropped)].sum(axis=1)).sum())
        for dropped in combinations(range(experts), count)
    }
    found = tuple(cheapest_to_drop(gram, count).tolist())
    assert errors[found] == pytest.approx(min(errors.values()), abs=1e-9)


def test_many_experts_are_dropped_greedily_and_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "_EXHAUSTIVE", 0)
    optimal, worst = 0, 1.0
    for seed in range(10):
        outputs = outputs_of(seed, 60, 10)
        gram = np.einsum("tih,tjh->ij", outputs, outputs)
        found = cheapest_to_drop(gram, 4)
        assert len(set(found.tolist())) == 4
        sums = {dropped: gram[np.ix_(dropped, dropped)].sum() for dropped in combinations(range(10), 4)}
        least, reached = min(sums.values()), gram[np.ix_(found, found)].sum()
        optimal, worst = optimal + (reached <= least + 1e-9), max(worst, reached / least)
        for inside in found:
            for outside in set(range(10)) - set(found.tolist()):
                swapped = [*(set(found.tolist()) - {inside}), outside]
                assert gram[np.ix_(swapped, swapped)].sum() >= reached - 1e-9, "a swap is better"
    assert optimal >= 7 and worst < 1.3


def test_layers_of_a_group_weigh_alike() -> None:
    loud, quiet = np.diag([9.0, 1.0, 1.0]) * 1000, np.diag([1.0, 5.0, 5.0])
    sums = np.stack([loud, quiet])
    space = eep_space(1, 1, layers=2, experts=3).calibrated(Calibration({"pair_norms": sums}))
    kept = space.kept(BASELINES["hope"].make(space).genome)
    assert kept.tolist() == [[0]], "0.82 + 0.09 against 0.09 + 0.45"
