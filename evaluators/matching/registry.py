"""All matchers by their names in task files. A new matcher is a class and a line here."""

from __future__ import annotations

from functools import lru_cache

from moevolve.evaluators.matching.base import Matcher
from moevolve.evaluators.matching.eep import (
    EepDropMatcher,
    EepGsm8kMatcher,
    EepOptionMatcher,
    EepRecordMatcher,
    EepSquadMatcher,
)
from moevolve.evaluators.matching.function import FunctionMatcher
from moevolve.evaluators.matching.general import (
    CapitalMatcher,
    ContainsMatcher,
    EmMatcher,
    ExactMatcher,
    F1Matcher,
    NumberMatcher,
    OptionMatcher,
)
from moevolve.evaluators.types import Matching

MATCHERS: dict[str, type[Matcher]] = {
    "capital": CapitalMatcher,
    "contains": ContainsMatcher,
    "eep-drop": EepDropMatcher,
    "eep-gsm8k": EepGsm8kMatcher,
    "eep-option": EepOptionMatcher,
    "eep-record": EepRecordMatcher,
    "eep-squad2": EepSquadMatcher,
    "em": EmMatcher,
    "exact": ExactMatcher,
    "f1": F1Matcher,
    "function": FunctionMatcher,
    "number": NumberMatcher,
    "option": OptionMatcher,
}


@lru_cache(maxsize=64)
def make_matcher(matching: Matching) -> Matcher:
    """Return the matcher for a task's settings."""
    return MATCHERS[matching.kind](matching)
