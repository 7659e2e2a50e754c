"""Matchers for answers in words (equal, contained, or overlapping), for the letter of a choice, and for numbers."""

from __future__ import annotations

import re
import string
from collections import Counter
from fractions import Fraction
from functools import lru_cache

from moevolve.evaluators.matching.base import Matcher
from moevolve.evaluators.matching.writing import (
    Words,
    alike,
    beginning,
    first_number_settled,
    kinds,
    last_box,
    numbers,
    plain,
    without_closing,
    without_tex,
    words,
)
from moevolve.evaluators.types import Example

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


# References, choices and many answers recur for every candidate.
@lru_cache(maxsize=65536)
def squad_tokens(text: str) -> Words:
    """Return the words after SQuAD's normalisation: lower case, no ASCII punctuation, no articles (Rajpurkar 2016)."""
    found: list[str] = []
    for piece in text.split():
        found.extend(_ARTICLES.sub(" ", piece.lower().translate(_PUNCTUATION)).split())
    return tuple(found)


def token_f1(answer: Words, reference: Words) -> float:
    """Return the F1 score of two bags of words, in [0, 1]; it is 1 for two empty ones."""
    if not answer or not reference:
        return float(answer == reference)
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference))


class ExactMatcher(Matcher):
    """The whole answer equals a reference, ignoring case, runs of white space, composition and closing punctuation."""

    def _score(self, answer: str, example: Example) -> float:
        return float(_closed(answer) in map(_closed, example.references))

    def _settled(self, start: str, example: Example) -> bool:
        start = beginning(start)
        return not any(_may_become(start, _closed(reference)) for reference in example.references)

    def problem(self, example: Example) -> str | None:
        if not _closed(example.references[0]):
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


class ContainsMatcher(Matcher):
    """The answer contains a reference in whole words, without the article that the reference may begin with."""

    def problem(self, example: Example) -> str | None:
        if not words(example.references[0]):
            return f"{example.references[0]!r} has no words"
        return super().problem(example)

    def _score(self, answer: str, example: Example) -> float:
        return float(self._found(words(answer), example))

    def _settled(self, start: str, example: Example) -> bool:
        return self._found(words(_COMPLETE.sub("", start)), example)

    def _found(self, answer: Words, example: Example) -> bool:
        return any(_contains(answer, words(reference)) for reference in example.references)


# What follows the last blank that no word spans.
_COMPLETE = re.compile(r"[^ \t\n\r]*\Z")


@lru_cache(maxsize=65536)
def _closed(text: str) -> str:
    return without_closing(plain(text))


def _may_become(start: str, reference: str) -> bool:
    """Say whether a text that begins with `start` can be the reference plus closing punctuation."""
    if reference.startswith(start):
        return True
    return start.startswith(reference) and not without_closing(start[len(reference) :])


def _whole_words(start: str) -> Words:
    """Normalised words that are complete for sure: those before the last white space."""
    pieces = start.split()
    return squad_tokens(" ".join(pieces if start[-1:].isspace() else pieces[:-1]))


def _contains(answer: Words, phrase: Words) -> bool:
    if len(phrase) > 1 and phrase[0] in ("a", "an", "the"):
        phrase = phrase[1:]
    size = len(phrase)
    return size > 0 and any(answer[i : i + size] == phrase for i in range(len(answer) - size + 1))


_RESULT_MARK = "####"


class NumberMatcher(Matcher):
    """The number after `####` (GSM8K's mark), or in TeX's last box, or else the last one, equals a reference's.

    Numbers are read by `moevolve.evaluators.matching.writing`. Currency, percent signs and trailing zeros are ignored:
    `$1,000.00` equals `1000`.
    """

    def _score(self, answer: str, example: Example) -> float:
        found = _result(answer)
        return float(found is not None and any(found == _result(reference) for reference in example.references))

    def _settled(self, start: str, example: Example) -> bool:
        _, mark, behind = start.partition(_RESULT_MARK)
        return bool(mark) and first_number_settled(behind)

    def problem(self, example: Example) -> str | None:
        for reference in example.references:
            if _result(reference) is None:
                return f"the reference {reference!r} has no number"
        return super().problem(example)


@lru_cache(maxsize=65536)
def _result(text: str) -> Fraction | None:
    """Return the first number after the mark, or else the last one in the last box, or else in the text."""
    _, mark, behind = text.partition(_RESULT_MARK)
    found = numbers(without_tex(behind))[:1] if mark else []
    for part in (last_box(text), text):
        found = found or numbers(without_tex(part))[-1:]
    return found[0] if found else None


class LetterMatcher(Matcher):
    """Base of matchers that find one letter and compare it with the references."""

    needs_choices = True

    def problem(self, example: Example) -> str | None:
        for choice in example.choices:
            if len(choice) != 1 or not choice.isupper():
                return f"choices must be single capital letters, got {choice!r}"
        return super().problem(example)


class OptionMatcher(LetterMatcher):
    """The first choice letter that stands alone: `A`, `A.`, `(B)`, `Answer: C`; not that of `Both`, `C++` or `C#`.

    An `A` or `I` that begins a phrase, as in `I think it is C`, is taken only if no other letter stands alone.
    """

    def _score(self, answer: str, example: Example) -> float:
        found = _standing(answer, example.choices)
        return float(found is not None and found[0] in example.references)

    def _settled(self, start: str, example: Example) -> bool:
        found = _standing(start, example.choices)
        return found is not None and found[1]  # else the next character could make it a word


class CapitalMatcher(LetterMatcher):
    """The first capital letter of the answer, even within a word.

    This is OpenCompass's rule for its SuperGLUE prompts: `The answer is B` counts as `T`, and so as wrong.
    """

    def _score(self, answer: str, example: Example) -> float:
        return float(_first_capital(answer) in example.references)

    def _settled(self, start: str, example: Example) -> bool:
        return _first_capital(start) is not None


_LETTER = re.compile(r"(?<!\w)[ae](?![\w#+])", re.IGNORECASE)
# An article or a pronoun, which stands before a word that doesn't go on after an answer.
_PHRASE = re.compile(r"[AI](?:'|\s+(?!(?:is|are|was|because|since|as|or|and|but)\b)[a-z\xdf-\xff])")
_MAY_BE_PHRASE = re.compile(r"[AI]\s*(?:\s[a-z\xdf-\xff]+)?\Z")


def _standing(text: str, choices: tuple[str, ...]) -> tuple[str, bool] | None:
    """Return the first choice letter that stands alone, and whether what follows can't change that."""
    text = alike(text)
    places = [match.start() for match in _LETTER.finditer(kinds(text)) if text[match.start()] in choices]
    for place in places:
        if not _PHRASE.match(text, place):
            return text[place], place + 1 < len(text) and not _MAY_BE_PHRASE.match(text, place)
    return (text[places[0]], False) if places else None


def _first_capital(text: str) -> str | None:
    return next((character for character in text if character.isupper()), None)
