"""Rankings of the history against a computation from scratch."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import history_row, many
from store_samples import decided

from moevolve.search.genomes.contract.phases import Parents
from moevolve.search.strategies.base import Ranking, eligible, rank_key
from moevolve.store.records import IndividualRecord

Operator = Literal["crossover", "mutation"]
rules = st.one_of(st.integers(1, 6), st.just("threshold"))
fitnesses = st.integers(0, 10).map(lambda n: n / 100)
# Per phenotype hash (fitness, tie-break) or a failure: fitness is a function of the content. Few values, many ties.
landscapes = st.lists(
    st.one_of(st.none(), st.tuples(fitnesses, st.sampled_from([-2.0, -1.0, -math.inf]))),
    min_size=1,
    max_size=12,
)


@st.composite
def histories(draw: st.DrawFn) -> list[IndividualRecord]:
    landscape = draw(landscapes)
    contents = draw(st.lists(st.integers(0, len(landscape) - 1), max_size=60))
    return [member(index, content, landscape[content]) for index, content in enumerate(contents)]


def member(index: int, content: int, outcome: tuple[float, float] | None) -> IndividualRecord:
    return decided(replace(history_row(index, "prune", None), phenotype_hash=f"hash-{content}"), *(outcome or (None,)))


def from_scratch(
    history: list[IndividualRecord], rule: Parents, repeats: bool
) -> dict[Operator, list[IndividualRecord]]:
    """Members that didn't fail, distinct unless they may repeat, best first, cut by the rule."""
    scored = [one for one in history if one.fitness is not None]
    first = {one.index if repeats else one.phenotype_hash: one for one in reversed(scored)}
    ranked = sorted(first.values(), key=lambda one: (-one.fitness, -one.tie_break, one.index))  # type: ignore[operator]
    if isinstance(rule, int):
        return {"crossover": ranked[:rule], "mutation": ranked[:rule]}
    behind = [ranked[0].fitness - one.fitness for one in ranked]  # type: ignore[operator]
    return {
        "mutation": [one for one, less in zip(ranked, behind, strict=True) if less <= 0.03 + 1e-9],
        "crossover": [
            one
            for place, (one, less) in enumerate(zip(ranked, behind, strict=True))
            if less <= 0.01 + 1e-9 or place < 6
        ],
    }


@many
@given(histories(), rules, st.booleans())
def test_a_ranking_is_what_a_sort_of_the_whole_history_gives(
    history: list[IndividualRecord], rule: Parents, repeats: bool
) -> None:
    ranking = Ranking(rule, repeats)
    for count, one in enumerate(history, start=1):
        ranking.add(one)
        expected = from_scratch(history[:count], rule, repeats)
        assert list(ranking) == max(expected.values(), key=len), "nothing is kept that can't be a parent"
        for operator, parents in expected.items():
            assert eligible(list(ranking), rule, operator) == parents


def test_the_authors_margins_are_a_point_for_crossover_and_three_for_mutation() -> None:
    """At 400 examples, so that a margin is met and missed by one example."""
    right = [360, 359, 357, 356, 355, 348, 347, 346]
    ranked = [member(index, index, (each / 400, -1.0)) for index, each in enumerate(right)]
    assert eligible(ranked, "threshold", "mutation") == ranked[:6], "348 is 3 points below 360"
    assert eligible(ranked, "threshold", "crossover") == ranked[:6], "at least 6, though 4 are within a point"
    assert eligible([], "threshold", "mutation") == eligible([], "threshold", "crossover") == []
    level = [member(index, index, (0.9, -1.0)) for index in range(9)]
    assert eligible(level, "threshold", "crossover") == eligible(level, "threshold", "mutation") == level


def test_a_failed_member_has_no_rank() -> None:
    failed = member(4, 0, None)
    with pytest.raises(ValueError, match="individual 4 is failed"):
        rank_key(failed)
    ranking = Ranking(3)
    ranking.add(failed)
    assert not list(ranking)
