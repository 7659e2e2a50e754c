"""Matchers for answers that are the letter of a choice."""

from __future__ import annotations

import re
from functools import lru_cache

from moevolve.evaluators.matching.base import Matcher
from moevolve.evaluators.types import Example


class LetterMatcher(Matcher):
    """Base of matchers that find one letter and compare it with the references."""

    needs_choices = True

    def problem(self, example: Example) -> str | None:
        for choice in example.choices:
            if len(choice) != 1 or not choice.isupper():
                return f"choices must be single capital letters, got {choice!r}"
        return super().problem(example)


class OptionMatcher(LetterMatcher):
    """The first choice letter that stands alone: `A`, `A.`, `(B)`, `Answer: C`; not the `B` of `Both`."""

    def _score(self, answer: str, example: Example) -> float:
        found = _option_pattern(example.choices).search(answer)
        return float(found is not None and found.group() in example.references)

    def _settled(self, start: str, example: Example) -> bool:
        found = _option_pattern(example.choices).search(start)
        return found is not None and found.end() < len(start)  # else the next character could make it a word


class CapitalMatcher(LetterMatcher):
    """The first capital letter of the answer, even within a word.

    This is OpenCompass's rule for its SuperGLUE prompts: `The answer is B` counts as `T`, and so as wrong.
    """

    def _score(self, answer: str, example: Example) -> float:
        return float(_first_capital(answer) in example.references)

    def _settled(self, start: str, example: Example) -> bool:
        return _first_capital(start) is not None


@lru_cache(maxsize=256)
def _option_pattern(choices: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)[{''.join(re.escape(choice) for choice in choices)}](?!\w)")


def _first_capital(text: str) -> str | None:
    return next((character for character in text if character.isupper()), None)
