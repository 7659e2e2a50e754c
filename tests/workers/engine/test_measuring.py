"""Calibrations and usage of a resident model: what they run, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from usage_checks import SEQUENCES, TOKENS

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.config import EngineConfig
from moevolve.workers.engine.measuring import analyse_usage, calibrate
from moevolve.workers.methods.base import Calibration, CombinedRecipe, IdentityEdit
from moevolve.workers.methods.eep.edit import AlignmentRecipe, ExpertsRecipe
from moevolve.workers.methods.usage import RoutedLayer
from moevolve.workers.model.resident import ResidentModel


def test_the_cost_is_noted(resident: Callable[[str], ResidentModel]) -> None:
    examples = tuple(Example(f"the {word} dog is", ("fox",), ()) for word in ("quick", "brown", "larger"))
    split = PreparedSplit("t", "search", "generate", "mean", Matching(), 4, " ", examples)
    made = calibrate(resident("mixtral"), EngineConfig(), ExpertsRecipe(("usage",), None, 11), [split])
    made = Calibration.from_bytes(made.to_bytes())
    assert made.tokens_run == 12, "whole prompts with their answers, until 11 tokens are reached"
    assert made.arrays["counts"].sum() == 12 * 2 * 3
    assert made.seconds is not None and made.seconds > 0


def test_combined_calibrations_are_those_by_themselves(resident: Callable[[str], ResidentModel]) -> None:
    examples = tuple(Example(f"which is larger {a} : {b}", (a,), (a, b)) for a, b in (("a", "b"), ("fox", "dog")))
    split = PreparedSplit("pick", "search", "rank", "mean", Matching(), 1, " ", examples)
    recipes = AlignmentRecipe(sample=200, rounds=1, tokens=1000), ExpertsRecipe(("usage",), None, 5)
    alone = [calibrate(resident("mixtral"), EngineConfig(), recipe, [split]) for recipe in recipes]
    both = calibrate(resident("mixtral"), EngineConfig(), CombinedRecipe(recipes), [split])
    for each in alone:
        for name in set(each.arrays) - {"seconds", "tokens_run"}:
            assert np.array_equal(both.arrays[name], each.arrays[name])
    assert both.tokens_run == sum(each.tokens_run for each in alone)


def test_an_unknown_recipe_is_refused(resident: Callable[[str], ResidentModel]) -> None:
    class Strange:
        tokens = 5

    with pytest.raises(UserError, match="calibrations of kind Strange are unknown"):
        calibrate(resident("mixtral"), EngineConfig(), Strange(), [])


def test_a_dense_model_by_itself_has_no_experts(resident: Callable[[str], ResidentModel]) -> None:
    found = analyse_usage(resident("opt"), IdentityEdit(), SEQUENCES)
    assert found.tokens == TOKENS and not found.routed and not found.mixed


def test_effective_experts_are_those_of_even_use() -> None:
    even = RoutedLayer(0, np.array([5, 5, 0, 5]), np.zeros(4), np.zeros((4, 4)))
    assert even.effective == pytest.approx(3)
    assert RoutedLayer(0, np.array([0, 7]), np.zeros(2), np.zeros((2, 2))).effective == pytest.approx(1)


def test_no_prompts_are_refused(resident: Callable[[str], ResidentModel]) -> None:
    with pytest.raises(UserError, match="no prompts"):
        analyse_usage(resident("mixtral"), IdentityEdit(), [])
