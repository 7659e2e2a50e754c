"""Rankings of the history against a computation from scratch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import decided, history_row, many

from moevolve.search.config.phases import ThresholdParents, TopKParents
from moevolve.search.loop.history import Ranking, eligible, rank_key
from moevolve.store.records import IndividualRecord

Rule = TopKParents | ThresholdParents
rules = st.one_of(
    st.integers(1, 6).map(lambda k: TopKParents(k=k)),
    st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0]).map(lambda margin: ThresholdParents(margin=margin)),
)
# Per content hash (fitness, tie-break) or a failure: fitness is a function of the content. Few values, many ties.
landscapes = st.lists(
    st.one_of(st.none(), st.tuples(st.integers(0, 10).map(lambda n: n / 10), st.sampled_from([-2.0, -1.0, -math.inf]))),
    min_size=1,
    max_size=12,
)


@st.composite
def histories(draw: st.DrawFn) -> list[IndividualRecord]:
    landscape = draw(landscapes)
    contents = draw(st.lists(st.integers(0, len(landscape) - 1), max_size=60))
    return [member(index, content, landscape[content]) for index, content in enumerate(contents)]


def member(index: int, content: int, outcome: tuple[float, float] | None) -> IndividualRecord:
    return decided(replace(history_row(index, "prune", None), content_hash=f"hash-{content}"), outcome)


def from_scratch(history: list[IndividualRecord], rule: Rule) -> list[IndividualRecord]:
    """Distinct members that didn't fail, best first, cut by the rule."""
    first = {one.content_hash: one for one in reversed(history) if one.fitness is not None}
    ranked = sorted(first.values(), key=lambda one: (-one.fitness, -one.tie_break, one.index))  # type: ignore[operator]
    if isinstance(rule, TopKParents):
        return ranked[: rule.k]
    return [one for one in ranked if ranked[0].fitness - one.fitness <= rule.margin]  # type: ignore[operator]


@many
@given(histories(), rules)
def test_a_ranking_is_what_a_sort_of_the_whole_history_gives(history: list[IndividualRecord], rule: Rule) -> None:
    ranking = Ranking(rule)
    for count, one in enumerate(history, start=1):
        ranking.add(one)
        expected = from_scratch(history[:count], rule)
        assert list(ranking) == expected
        assert eligible(list(ranking), rule) == expected


@many
@given(histories(), st.integers(1, 6))
def test_a_top_k_ranking_never_holds_more_than_k(history: list[IndividualRecord], k: int) -> None:
    ranking = Ranking(TopKParents(k=k))
    for one in history:
        ranking.add(one)
        assert len(ranking) <= k
        # Nothing is kept beside the ranked members either.
        assert len(ranking._individuals) == len(ranking._hashes) == len(ranking)


def test_eligible_cuts_a_longer_list() -> None:
    ranked = [member(index, index, (fitness, -1.0)) for index, fitness in enumerate([0.9, 0.8, 0.8, 0.5])]
    assert eligible(ranked, TopKParents(k=2)) == ranked[:2]
    assert eligible(ranked, ThresholdParents(margin=0.15)) == ranked[:3]
    assert eligible([], ThresholdParents(margin=0.15)) == []


def test_ties_go_to_the_gold_log_probability_then_to_the_earlier() -> None:
    outcomes = {3: (0.5, -1.0), 9: (0.5, -0.5), 2: (0.5, -1.0), 8: (0.6, -9.0)}
    some = [member(index, index, outcome) for index, outcome in outcomes.items()]
    assert [one.index for one in sorted(some, key=rank_key)] == [8, 9, 2, 3]


def test_a_failed_member_has_no_rank() -> None:
    failed = member(4, 0, None)
    with pytest.raises(ValueError, match="individual 4 is failed"):
        rank_key(failed)
    ranking = Ranking(TopKParents(k=3))
    ranking.add(failed)
    assert len(ranking) == 0
