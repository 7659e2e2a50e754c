"""Who gets how many workers of a cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevolve.search.pools.shares import Contender, Node, contender_of, shares
from moevolve.store.records import Control, ResourceRequest


def one(search: str, priority: int = 0, least: int = 1, most: int = 99, cpus: float = 1, gpus: float = 0) -> Contender:
    return Contender(search, priority, least, most, cpus, gpus)


FOUR = [Node(2, 0), Node(2, 0)]
GPUS = [Node(8, 4), Node(8, 2), Node(16, 0)]


@pytest.mark.parametrize(
    ("nodes", "contenders", "expected"),
    [
        (FOUR, [one("a")], {"a": 4}),
        (FOUR, [one("a"), one("b"), one("c")], {"a": 2, "b": 1, "c": 1}),
        (FOUR, [one("a"), one("b", priority=1)], {"a": 1, "b": 3}),
        (FOUR, [one("a", least=0), one("b", priority=1)], {"a": 0, "b": 4}),
        (FOUR, [one("a", least=4, most=4), one("b", priority=9)], {"a": 4, "b": 1}),  # a fixed count stays
        ([Node(3, 0), Node(3, 0)], [one("a", cpus=2)], {"a": 2}),  # a worker is on one node
        ([Node(1, 0)], [one("a", cpus=0.1)], {"a": 10}),
        ([Node(0, 0)], [one("a")], {"a": 1}),
        ([], [one("a", least=0)], {"a": 0}),
        (GPUS, [one("a", gpus=2, priority=1), one("b", gpus=1)], {"a": 2, "b": 2}),
        (GPUS, [one("a", gpus=1, most=2), one("b", cpus=4)], {"a": 2, "b": 7}),
    ],
)
def test_examples(nodes: list[Node], contenders: list[Contender], expected: dict[str, int]) -> None:
    assert shares(nodes, contenders) == expected
    assert shares(nodes, contenders[::-1]) == expected


SEARCHES = st.lists(
    st.builds(
        lambda priority, low, more: one("", priority, low, low + more),
        *(st.integers(-1, 2), st.integers(0, 4), st.integers(0, 12)),
    ),
    max_size=6,
).map(lambda found: [replace(each, search=f"{n}") for n, each in enumerate(found)])


@given(st.lists(st.integers(0, 6), max_size=5), SEARCHES)
def test_the_room_is_shared_out(cpus: list[int], contenders: list[Contender]) -> None:
    nodes, room = [Node(count, 0) for count in cpus], sum(cpus)
    found = shares(nodes, contenders)
    assert found == shares(nodes, contenders[::-1]), "every driver decides the same"
    assert all(each.least <= found[each.search] <= each.most for each in contenders)
    asked, total = sum(each.least for each in contenders), sum(found.values())
    assert total <= max(room, asked)
    wanting = [each for each in contenders if found[each.search] < each.most]
    assert total >= room or not wanting, "room is left over only if nobody takes it"
    for this, other in combinations(contenders, 2):
        high, low = sorted((this, other), key=lambda each: -each.priority)
        if high.priority > low.priority and high in wanting:
            assert found[low.search] == low.least
        if high.priority == low.priority and high in wanting and found[low.search] > low.least:
            assert found[low.search] <= found[high.search] + 1
        if high.priority == low.priority and low in wanting and found[high.search] > high.least:
            assert found[high.search] <= found[low.search] + 1


def test_what_is_asked_of_a_search_goes_before_what_it_could_use() -> None:
    claim = ResourceRequest("here", 1, 8, 2.0, 0.5)
    control = Control("driver", 1, True, "running", None, 3)
    assert contender_of("a", control, claim) == Contender("a", 3, 1, 8, 2.0, 0.5)
    scaled = contender_of("a", replace(control, workers=5), claim)
    assert (scaled.least, scaled.most) == (5, 5)
    paused = contender_of("a", replace(control, workers=5, desired_state="paused"), claim)
    assert (paused.least, paused.most) == (0, 0)
