"""Comparing generated text with the accepted answers, and knowing when the comparison is settled.

Every matcher keeps one promise besides its own rule: `decided(text)` is true only if no continuation of `text` can
change `match`. Decoding can then stop early without changing any score.
"""

from __future__ import annotations

import re
import string
from abc import ABC, abstractmethod
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import ClassVar

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching

Words = tuple[str, ...]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The answer within generated text: leading white space off, up to the stop string that is completed first.

    "Completed first" (not "begins first") is what a decoder sees as text arrives, so a cut never moves afterwards.

    Returns:
        `(answer, closed)`; closed says whether a stop string was met.
    """
    text = text.lstrip()
    best: tuple[int, int] | None = None
    for mark in stop:
        start = text.find(mark)
        if start >= 0 and (best is None or (start + len(mark), start) < best):
            best = (start + len(mark), start)
    return (text, False) if best is None else (text[: best[1]], True)


def settled_part(text: str, stop: Sequence[str]) -> str:
    """The longest part of an unclosed answer that stays in it whatever follows: a stop string may be half written."""
    longest = max((len(mark) for mark in stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(mark) > size and mark.startswith(tail) for mark in stop):
            return text[:-size]
    return text


def squad_tokens(text: str) -> Words:
    """Words after SQuAD's normalisation: lower case, no ASCII punctuation, no articles (Rajpurkar et al. 2016)."""
    words: list[str] = []
    for piece in text.split():
        words.extend(_ARTICLES.sub(" ", piece.lower().translate(_PUNCTUATION)).split())
    return tuple(words)


def token_f1(answer: Words, reference: Words) -> float:
    """F1 of two bags of words, in [0, 1]; two empty answers agree."""
    if not answer or not reference:
        return float(answer == reference)
    counts: dict[str, int] = {}
    for word in reference:
        counts[word] = counts.get(word, 0) + 1
    common = 0
    for word in answer:
        if counts.get(word, 0) > 0:
            counts[word] -= 1
            common += 1
    return 2 * common / (len(answer) + len(reference))


_CLOSING = " .,;:!?\"')]"
_RESULT_MARK = "####"
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


class Matcher(ABC):
    """Scores answers of one task. Subclasses say what they compare; stop strings are handled here."""

    needs_choices: ClassVar[bool] = False

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)

    def match(self, text: str, example: Example) -> float:
        """How right the generated text is, in [0, 1]."""
        return _match(self, text, example)

    def decided(self, text: str, example: Example) -> bool:
        """Whether `match` is the same for every continuation of the text."""
        return _decided(self, text, example)

    def _match(self, text: str, example: Example) -> float:
        return self._score(cut(text, self._stop)[0], example)

    def _decided(self, text: str, example: Example) -> bool:
        # A character whose bytes are not all generated decodes to U+FFFD and becomes another one later.
        answer, closed = cut(text.rstrip("\ufffd"), self._stop)
        return closed or self._settled(settled_part(answer, self._stop), example)

    def problem(self, example: Example) -> str | None:
        """Why this matcher can't score the example, or None."""
        if self.needs_choices and not example.choices:
            return "there are no choices to look for"
        return None

    @abstractmethod
    def _score(self, answer: str, example: Example) -> float: ...

    def _settled(self, start: str, example: Example) -> bool:
        """Whether every answer that begins with `start` scores the same as `start` followed by what was generated."""
        return False


class _LetterMatcher(Matcher):
    """Finds one letter and compares it with the references."""

    needs_choices = True

    def problem(self, example: Example) -> str | None:
        for choice in example.choices:
            if len(choice) != 1 or not choice.isupper():
                return f"choices must be single capital letters, got {choice!r}"
        return super().problem(example)


class OptionMatcher(_LetterMatcher):
    """The first choice letter that stands alone: `A`, `A.`, `(B)`, `Answer: C`; not the `B` of `Both`."""

    def _score(self, answer: str, example: Example) -> float:
        found = _option_pattern(example.choices).search(answer)
        return float(found is not None and found.group() in example.references)

    def _settled(self, start: str, example: Example) -> bool:
        found = _option_pattern(example.choices).search(start)
        return found is not None and found.end() < len(start)  # else the next character may make it a word


class CapitalMatcher(_LetterMatcher):
    """The first capital letter of the answer, whatever it belongs to; settled as soon as it is written.

    OpenCompass's rule for its SuperGLUE prompts: `The answer is B` counts as `T`, hence as wrong.
    """

    def _score(self, answer: str, example: Example) -> float:
        return float(_first_capital(answer) in example.references)

    def _settled(self, start: str, example: Example) -> bool:
        return _first_capital(start) is not None


class ExactMatcher(Matcher):
    """The whole answer equals a reference; case, runs of white space and closing punctuation don't count."""

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
    """Compares words after SQuAD's normalisation."""

    def problem(self, example: Example) -> str | None:
        for answer in (*example.references[:1], *(example.choices if self.needs_choices else ())):
            if not _tokens(answer):
                return f"nothing is left of {answer!r} without articles and punctuation"
        return super().problem(example)

    def _score(self, answer: str, example: Example) -> float:
        words = squad_tokens(answer)
        return max(self._compare(words, _tokens(reference)) for reference in example.references)

    def _compare(self, answer: Words, reference: Words) -> float:
        return float(answer == reference)


class F1Matcher(_TokenMatcher):
    """SQuAD's token F1, the best over the references."""

    def _compare(self, answer: Words, reference: Words) -> float:
        return token_f1(answer, reference)


class EmMatcher(_TokenMatcher):
    """SQuAD's exact match."""

    def _settled(self, start: str, example: Example) -> bool:
        words = _whole_words(start)
        return not any(_tokens(r)[: len(words)] == words for r in example.references)


class ContainsMatcher(_TokenMatcher):
    """A reference occurs in the answer as a phrase of whole words."""

    def _compare(self, answer: Words, reference: Words) -> float:
        return float(_find(answer, reference) >= 0)

    def _settled(self, start: str, example: Example) -> bool:
        words = _whole_words(start)
        return any(_find(words, _tokens(r)) >= 0 for r in example.references)


class PrefixMatcher(_TokenMatcher):
    """The answer begins with a reference, in whole words (`Yes, because ...` for `yes`)."""

    def _compare(self, answer: Words, reference: Words) -> float:
        return float(answer[: len(reference)] == reference)

    def _settled(self, start: str, example: Example) -> bool:
        words = _whole_words(start)
        references = [_tokens(r) for r in example.references]
        if any(words[: len(r)] == r for r in references):
            return True
        return not any(r[: len(words)] == words for r in references)


class LabelMatcher(_TokenMatcher):
    """The choice that occurs first in the answer, in whole words (`yes`, `not entailment`), is one of the references.

    Of choices beginning at the same word the longest counts.
    """

    needs_choices = True

    def _score(self, answer: str, example: Example) -> float:
        found = _first_choice(squad_tokens(answer), example.choices)
        return float(found is not None and found[1] in {_tokens(r) for r in example.references})

    def _settled(self, start: str, example: Example) -> bool:
        words = _whole_words(start)
        found = _first_choice(words, example.choices)
        # A longer choice that begins no later may still be unfinished.
        return found is not None and found[0] + max(len(_tokens(c)) for c in example.choices) <= len(words)


class NumberMatcher(Matcher):
    """The answer's result is a reference's: the number behind `####` (GSM8K's mark), else the last number there is.

    Thousands separators, currency signs and closing zeros don't count: `$1,000.00` is `1000`.
    """

    def _score(self, answer: str, example: Example) -> float:
        found = _result(answer)
        return float(found is not None and any(found == _result(reference) for reference in example.references))

    def _settled(self, start: str, example: Example) -> bool:
        _, mark, behind = start.partition(_RESULT_MARK)
        found = _NUMBER.search(behind) if mark else None
        # A point or comma may still be followed by digits.
        return found is not None and behind[found.end() :] not in ("", ".", ",")

    def problem(self, example: Example) -> str | None:
        for reference in example.references:
            if _result(reference) is None:
                return f"there is no number in the reference {reference!r}"
        return super().problem(example)


MATCHERS: dict[str, type[Matcher]] = {
    "capital": CapitalMatcher,
    "contains": ContainsMatcher,
    "em": EmMatcher,
    "exact": ExactMatcher,
    "f1": F1Matcher,
    "label": LabelMatcher,
    "number": NumberMatcher,
    "option": OptionMatcher,
    "prefix": PrefixMatcher,
}


def known_matcher(kind: str) -> str:
    """Returns `kind`.

    Raises:
        ValueError: no such matcher; the message lists those there are.
    """
    if kind not in MATCHERS:
        raise ValueError(f"unknown matching kind `{kind}`; known: {', '.join(sorted(MATCHERS))}")
    return kind


@lru_cache(maxsize=64)
def make_matcher(matching: Matching) -> Matcher:
    """The matcher a task asks for.

    Raises:
        UserError: unknown kind.
    """
    try:
        return MATCHERS[known_matcher(matching.kind)](matching.stop)
    except ValueError as error:
        raise UserError(str(error)) from None


# Candidates give the same answers to the same examples again and again.
@lru_cache(maxsize=65536)
def _match(matcher: Matcher, text: str, example: Example) -> float:
    return matcher._match(text, example)  # noqa: SLF001 - the rest of `Matcher.match`


@lru_cache(maxsize=65536)
def _decided(matcher: Matcher, text: str, example: Example) -> bool:
    return matcher._decided(text, example)  # noqa: SLF001 - the rest of `Matcher.decided`


@lru_cache(maxsize=256)
def _option_pattern(choices: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w)[{''.join(re.escape(choice) for choice in choices)}](?!\w)")


@lru_cache(maxsize=65536)
def _tokens(answer: str) -> Words:
    """`squad_tokens` of references and choices, which come again for every candidate."""
    return squad_tokens(answer)


def _first_capital(text: str) -> str | None:
    return next((character for character in text if character.isupper()), None)


def _result(text: str) -> Decimal | None:
    """The number behind the first mark, or without one there the last number of the text."""
    _, mark, behind = text.partition(_RESULT_MARK)
    found = _NUMBER.findall(behind)[:1] if mark else []
    found = found or _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "").replace("$", "")) if found else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _may_become(start: str, reference: str) -> bool:
    """Whether a text that begins with `start` can still be the reference plus closing punctuation."""
    if reference.startswith(start):
        return True
    return start.startswith(reference) and not start[len(reference) :].strip(_CLOSING)


def _whole_words(start: str) -> Words:
    """Normalised words that are certainly complete: those before the last white space."""
    if not start or start[-1].isspace():
        return squad_tokens(start)
    pieces = start.split()
    return squad_tokens(" ".join(pieces[:-1]))


def _find(words: Words, phrase: Words) -> int:
    """Position of the phrase in the words, or -1."""
    if not phrase:
        return -1
    return next((i for i in range(len(words) - len(phrase) + 1) if words[i : i + len(phrase)] == phrase), -1)


def _first_choice(words: Words, choices: tuple[str, ...]) -> tuple[int, Words] | None:
    found = [(at, -len(phrase), phrase) for phrase in map(_tokens, choices) if (at := _find(words, phrase)) >= 0]
    return None if not found else (min(found)[0], min(found)[2])
