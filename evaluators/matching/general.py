"""Matchers for answers in words (equal, contained, or overlapping), for the letter of a choice, and for numbers."""

from __future__ import annotations

import re
import string
from collections import Counter
from decimal import Decimal
from functools import lru_cache

from moevolve.evaluators.matching.base import Matcher
from moevolve.evaluators.types import Example

Words = tuple[str, ...]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSING = " .,;:!?\"')]"


# References, choices and many answers recur for every candidate.
@lru_cache(maxsize=65536)
def squad_tokens(text: str) -> Words:
    """Return the words after SQuAD's normalisation: lower case, no ASCII punctuation, no articles (Rajpurkar 2016)."""
    words: list[str] = []
    for piece in text.split():
        words.extend(_ARTICLES.sub(" ", piece.lower().translate(_PUNCTUATION)).split())
    return tuple(words)


def token_f1(answer: Words, reference: Words) -> float:
    """Return the F1 score of two bags of words, in [0, 1]; it is 1 for two empty ones."""
    if not answer or not reference:
        return float(answer == reference)
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference))


class ExactMatcher(Matcher):
    """The whole answer equals a reference, ignoring case, runs of white space and closing punctuation."""

    def _score(self, answer: str, example: Example) -> float:
        answer = _plain(answer)
        return float(any(answer.rstrip(_CLOSING) == _plain(r).rstrip(_CLOSING) for r in example.references))

    def _settled(self, start: str, example: Example) -> bool:
        start = _plain(start)
        return not any(_may_become(start, _plain(r).rstrip(_CLOSING)) for r in example.references)

    def problem(self, example: Example) -> str | None:
        if not _plain(example.references[0]).rstrip(_CLOSING):
            return f"nothing is left of {example.references[0]!r} without closing punctuation"
        return super().problem(example)


class _TokenMatcher(Matcher):
    """Base of matchers that compare words after SQuAD's normalisation."""

    def problem(self, example: Example) -> str | None:
        if not squad_tokens(example.references[0]):
            return f"nothing is left of {example.references[0]!r} without articles and punctuation"
        return super().problem(example)

    def _score(self, answer: str, example: Example) -> float:
        words = squad_tokens(answer)
        return max(self._compare(words, squad_tokens(reference)) for reference in example.references)

    def _compare(self, answer: Words, reference: Words) -> float:
        return float(answer == reference)


class F1Matcher(_TokenMatcher):
    """SQuAD's token F1, the maximum over the references."""

    def _compare(self, answer: Words, reference: Words) -> float:
        return token_f1(answer, reference)


class EmMatcher(_TokenMatcher):
    """SQuAD's exact match."""

    def _settled(self, start: str, example: Example) -> bool:
        words = _whole_words(start)
        return not any(squad_tokens(r)[: len(words)] == words for r in example.references)


class ContainsMatcher(_TokenMatcher):
    """The answer contains a reference as a phrase of whole words."""

    def _compare(self, answer: Words, reference: Words) -> float:
        return float(_find(answer, reference) >= 0)

    def _settled(self, start: str, example: Example) -> bool:
        words = _whole_words(start)
        return any(_find(words, squad_tokens(r)) >= 0 for r in example.references)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _may_become(start: str, reference: str) -> bool:
    """Say whether a text that begins with `start` can be the reference plus closing punctuation."""
    if reference.startswith(start):
        return True
    return start.startswith(reference) and not start[len(reference) :].strip(_CLOSING)


def _whole_words(start: str) -> Words:
    """Normalised words that are complete for sure: those before the last white space."""
    pieces = start.split()
    return squad_tokens(" ".join(pieces if start[-1:].isspace() else pieces[:-1]))


def _find(words: Words, phrase: Words) -> int:
    """Return the position of the phrase in the words; -1 if it is missing."""
    if not phrase:
        return -1
    return next((i for i in range(len(words) - len(phrase) + 1) if words[i : i + len(phrase)] == phrase), -1)


_RESULT_MARK = "####"
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


class NumberMatcher(Matcher):
    """The number after `####` (GSM8K's mark), or else the last number of the answer, equals a reference's.

    Thousands separators, currency signs and trailing zeros are ignored: `$1,000.00` equals `1000`.
    """

    def _score(self, answer: str, example: Example) -> float:
        found = _result(answer)
        return float(found is not None and any(found == _result(reference) for reference in example.references))

    def _settled(self, start: str, example: Example) -> bool:
        _, mark, behind = start.partition(_RESULT_MARK)
        found = _NUMBER.search(behind) if mark else None
        # Digits could still follow a point or comma.
        return found is not None and behind[found.end() :] not in ("", ".", ",")

    def problem(self, example: Example) -> str | None:
        for reference in example.references:
            if _result(reference) is None:
                return f"the reference {reference!r} has no number"
        return super().problem(example)


def _result(text: str) -> Decimal | None:
    """Return the number after the first mark, or else the last number of the text."""
    _, mark, behind = text.partition(_RESULT_MARK)
    found = _NUMBER.findall(behind)[:1] if mark else []
    found = found or _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "").replace("$", "")) if found else None


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
