"""Scores don't hang on the way a candidate is asked, whichever instructions the libraries may use."""

from __future__ import annotations

import pytest
from instruction_sets import SOME, Settings, checked


@pytest.mark.parametrize("settings", [{}, *SOME], ids=lambda each: " ".join(each.values()) or "own")
def test_numbers_are_the_same_in_every_way(settings: Settings) -> None:
    assert checked(settings)
