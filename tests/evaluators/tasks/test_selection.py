"""The selection of a split's rows."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.config import Selection
from moevolve.evaluators.tasks.datasets import Table
from moevolve.evaluators.tasks.selection import check_disjoint, select_rows, value_key

TABLE = Table("rows", datasets.Dataset.from_dict({"g": list("abcabcabca"), "n": list(range(10))}))


def _select(**wanted: Any) -> list[int]:
    return select_rows(TABLE, Selection.model_validate({"from": "all"} | wanted))


def test_selections_and_impossible_ones() -> None:
    assert _select() == list(range(10))
    assert _select(offset=2, count=3) == [2, 3, 4]
    assert _select(indices=[7, 0]) == [7, 0]
    assert _select(where={"g": ["b", "c"]}, count=3) == [1, 2, 4]
    assert _select(where_not={"g": ["a"]}, offset=1) == [2, 4, 5, 7, 8]
    assert _select(where={"n": [3]}) == [3]
    assert _select(where={"g": ["b", "c"]}, offset=1, indices=[1, 0]) == [4, 2]
    for wanted, said in (
        ({"count": 11}, "can't take 11 rows after the first 0: there are only 10"),
        ({"offset": 10}, "can't take any rows after the first 10"),
        ({"indices": [10]}, "row 10 asked for, but there are 10 rows"),
        ({"where": {"g": ["z"]}}, "column `g` never holds 'z'"),
        ({"where": {"h": ["z"]}}, "no column `h`"),
    ):
        with pytest.raises(UserError, match=said):
            _select(**wanted)
    values = (True, False, 1, 1.0, 1.5, None, "x")
    assert [value_key(value) for value in values] == ["true", "false", "1", "1", "1.5", "null", "x"]


def test_filters_look_into_nested_columns_and_lists() -> None:
    answers = [{"types": ["number", "date"]}, {"types": ["date"]}, {"types": []}, None, {"types": ["number"]}]
    table = Table("nested", datasets.Dataset.from_dict({"a": answers, "n": [[1], [2, 1], [], None, [3]]}))

    def select(**wanted: Any) -> list[int]:
        return select_rows(table, Selection.model_validate({"from": "all"} | wanted))

    assert select(where={"a.types": ["number"]}) == [0, 4]
    assert select(where_not={"a.types": ["number"]}) == [1, 2, 3]
    assert select(where={"n": [1]}) == [0, 1]
    with pytest.raises(UserError, match=r"column `a\.types` never holds 'span'"):
        select(where={"a.types": ["span"]})


def test_a_shuffle_is_fixed_for_ever() -> None:
    """These numbers must not change, since stored scores belong to these rows."""
    assert _select(seed=0) == [9, 6, 4, 5, 2, 8, 3, 1, 7, 0]
    assert _select(seed=1) != _select(seed=0)


def test_stratified_samples_take_the_same_number_of_each_group() -> None:
    chosen = _select(per="g", seed=3, count=2)
    assert sorted(TABLE.column("g")[i] for i in chosen) == list("aabbcc")
    rest = _select(per="g", seed=3, offset=2)
    assert sorted(chosen + rest) == list(range(10))
    with pytest.raises(UserError, match=r"rows, g b: can't take 4 rows .* there are only 3"):
        _select(per="g", count=4)


@settings(max_examples=40)
@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 4), st.integers(1, 5))
def test_ranges_under_one_seed_overlap_only_if_their_numbers_do(o1: int, c1: int, o2: int, c2: int) -> None:
    first, second = _select(seed=9, offset=o1, count=c1), _select(seed=9, offset=o2, count=c2)
    overlap = bool(set(range(o1, o1 + c1)) & set(range(o2, o2 + c2)))
    assert bool(set(first) & set(second)) == overlap
    if overlap:
        with pytest.raises(UserError, match="in both `search` and `test`"):
            check_disjoint({"search": first, "test": second}, "rows")
    else:
        check_disjoint({"search": first, "test": second}, "rows")
