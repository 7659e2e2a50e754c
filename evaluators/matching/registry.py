"""All matchers by their names in task files. A new matcher is a class and a line here."""

from __future__ import annotations

from functools import lru_cache

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.matching.base import Matcher
from moevolve.evaluators.matching.eep import (
    EepDropMatcher,
    EepGsm8kMatcher,
    EepOptionMatcher,
    EepRecordMatcher,
    EepSquadMatcher,
)
from moevolve.evaluators.matching.general import (
    CapitalMatcher,
    ContainsMatcher,
    EmMatcher,
    ExactMatcher,
    F1Matcher,
    LabelMatcher,
    NumberMatcher,
    OptionMatcher,
    PrefixMatcher,
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
    "label": LabelMatcher,
    "number": NumberMatcher,
    "option": OptionMatcher,
    "prefix": PrefixMatcher,
}


def known_matcher(kind: str) -> str:
    """Return `kind` if there is such a matcher.

    Raises:
        ValueError: There is none; the message lists the known ones.
    """
    if kind not in MATCHERS:
        raise ValueError(f"unknown matching kind `{kind}`; known: {', '.join(sorted(MATCHERS))}")
    return kind


@lru_cache(maxsize=64)
def make_matcher(matching: Matching) -> Matcher:
    """Return the matcher for a task's settings.

    Raises:
        UserError: The kind is unknown.
    """
    try:
        return MATCHERS[known_matcher(matching.kind)](matching.stop)
    except ValueError as error:
        raise UserError(str(error)) from None
