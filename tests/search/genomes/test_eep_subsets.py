"""Subsets with equally many experts of every routing group, and settings that a family doesn't support."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import PRUNE, continuous, deepseek, eep_space, few, gpt_oss

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.eep.subsets import Subsets

seeds = st.integers(0, 2**32 - 1)


@st.composite
def grouped(draw: st.DrawFn) -> Subsets:
    parts, size = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    return Subsets(parts * size, parts * draw(st.integers(1, size)), parts)


@few
@given(grouped(), seeds, st.floats(0, 1))
def test_samples_crosses_and_mutants_keep_the_rule(subsets: Subsets, seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    kept = subsets.sample(rng, 3)
    assert kept.shape == (3, subsets.retained) and subsets.are_valid(kept)
    child = subsets.crossover(rng, kept[0], kept[1])
    assert subsets.are_valid(child[None])
    assert set(kept[0]) & set(kept[1]) <= set(child) <= set(kept[0]) | set(kept[1])
    assert subsets.are_valid(subsets.mutate(rng, child, rate)[None])
    scores = rng.standard_normal((2, subsets.experts))
    assert subsets.are_valid(subsets.best(scores))


def test_the_best_are_taken_from_every_routing_group() -> None:
    scores = np.array([[9.0, 8.0, 7.0, 0.0, 0.0, 1.0]])
    assert Subsets(6, 2, 2).best(scores).tolist() == [[0, 5]]
    assert Subsets(6, 2).best(scores).tolist() == [[0, 1]]
    assert Subsets(6, 4, 2).best(np.zeros((1, 6))).tolist() == [[0, 1, 3, 4]]


def test_uneven_or_unordered_subsets_are_not_of_the_rule() -> None:
    subsets = Subsets(6, 2, 2)
    assert subsets.are_valid(np.array([[2, 3], [0, 5]]))
    for wrong in ([[0, 1]], [[3, 2]], [[3, 4]]):
        assert not subsets.are_valid(np.array(wrong))
    space = eep_space(8, 1, facts=deepseek())
    with pytest.raises(ValueError, match="deepseek_v3 needs as many experts kept in each of 4 groups"):
        space.from_kept(np.arange(8)[None])


def test_a_rows_place_says_its_routing_group() -> None:
    """Rows are interchangeable within a routing group; across groups they make another model."""
    space = eep_space(8, 2, facts=deepseek())
    genome = continuous(space)

    def reordered(order: list[int]) -> EepGenome:
        return EepGenome(space, genome.router_mapping[:, order], genome.expert_merging[:, order])

    assert reordered([1, 0, 2, 3, 5, 4, 7, 6]).content_hash == genome.content_hash
    assert reordered([2, 1, 0, 3, 4, 5, 6, 7]).content_hash != genome.content_hash
    edit = genome.express()
    for part in range(4):
        places = slice(2 * part, 2 * part + 2)
        assert np.array_equal(
            np.sort(edit.expert_merging[0, places], axis=0), np.sort(genome.expert_merging[0, places], axis=0)
        )


def test_folding_decides_the_parameters_described() -> None:
    sigmoid, logits = eep_space(8, 1, facts=deepseek()), eep_space(4, 1, facts=gpt_oss(), router_space="logits")
    pruned = sigmoid.sample(np.random.default_rng(0), PRUNE).genome
    per_layer = 3 * 4096 * 14336 + 4096
    assert sigmoid.describe(pruned).parameters == deepseek().parameters - 6 * 8 * per_layer
    mapped = sigmoid.describe(continuous(sigmoid)).parameters
    assert mapped == sigmoid.describe(pruned).parameters + 6 * (8 * 4096 + 8 * 16)
    assert logits.describe(continuous(logits)).parameters == gpt_oss().parameters - 6 * 4 * per_layer


@pytest.mark.parametrize(
    ("facts", "settings", "message"),
    [
        (deepseek(), {"retained": 6}, "6 experts of a deepseek_v3 model can't be divided among the model's 4"),
        (deepseek(), {"retained": 4}, "4 experts of a deepseek_v3 model are too few: .* use 8 or more"),
        (deepseek(), {"retained": 8, "active": 5}, "5 active .* more than the 4 in the 2 of 4 routing"),
        (gpt_oss(), {}, r"genome.router_space \(gpt_oss model\): probs maps .* use router_space: logits"),
    ],
)
def test_what_the_family_cannot_express_is_refused(facts: Any, settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        eep_space(groups=2, facts=facts, **settings)


def test_active_defaults_to_what_a_token_can_reach() -> None:
    assert eep_space(8, 1, facts=deepseek(chosen=1)).active == 2
