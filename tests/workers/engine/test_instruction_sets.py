"""Scores don't hang on the way a candidate is asked, whichever instructions the libraries may use."""

from __future__ import annotations

from instruction_sets import OLDEST, checked


def test_numbers_are_the_same_in_every_way() -> None:
    """With this machine's own instructions all other tests run."""
    (found,) = checked([OLDEST])
    assert "FAILED" not in found, found
