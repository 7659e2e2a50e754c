"""Recipes of calibrations, and their fingerprints."""

from __future__ import annotations

from moevolve.workers.methods.base import CombinedRecipe, calibration_fingerprint, combined
from moevolve.workers.methods.eep.edit import AlignmentRecipe


def test_recipes_combine() -> None:
    recipe, other = AlignmentRecipe(sample=200, rounds=3, tokens=1000), AlignmentRecipe(sample=7, rounds=0, tokens=50)
    assert combined(None, None) is None and combined(None, recipe) is recipe
    both = combined(recipe, None, other)
    assert both == CombinedRecipe((recipe, other)) and both.tokens == 1000
    recipes = (recipe, other, both, CombinedRecipe((other, recipe)), CombinedRecipe((recipe,)))
    assert len({calibration_fingerprint(each, "model", "engine", ("task",)) for each in recipes}) == 5
