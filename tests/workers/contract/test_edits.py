"""Recipes of calibrations, and their fingerprints."""

from __future__ import annotations

from moevolve.workers.contract.edits import CombinedRecipe, calibration_fingerprint, combined
from moevolve.workers.contract.fitting import RowsRecipe
from moevolve.workers.methods.eep.edit import ExpertsRecipe


def test_recipes_combine() -> None:
    recipe, other = RowsRecipe(1000), ExpertsRecipe(("usage",), None, 50)
    assert combined(None, None) is None and combined(None, recipe) is recipe
    both = combined(recipe, None, other)
    assert both == CombinedRecipe((recipe, other)) and both.tokens == 1000
    recipes = (recipe, other, both, CombinedRecipe((other, recipe)), CombinedRecipe((recipe,)))
    assert len({calibration_fingerprint(each, "model", "engine", ("task",)) for each in recipes}) == 5
