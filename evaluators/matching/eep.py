"""The EEP authors' rules for scoring generated answers, reproduced exactly with all their oddities.

Source: their released fork of OpenCompass (github.com/imagination-research/EEP): its postprocessing of predictions,
evaluators and task configurations. Leading white space of an answer is part of it. A reference that normalisation
leaves empty is found in every answer, as in the original.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from functools import lru_cache

from moevolve.evaluators.matching.base import Matcher
from moevolve.evaluators.matching.general import LetterMatcher
from moevolve.evaluators.types import Example

_QUESTION = "Question:"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_CLAUSE = re.compile(r"[\n.,]")
_MARK = re.compile(r"[^\w\s]")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)
_RESULT_MARK = "#### "
# Patterns around an option letter (@) in order of precedence. The first pattern that matches with a letter counts; if
# it matches several letters, the first in the order of the choices. Chinese phrases come first, then a letter at the
# very end, then English phrases.
_PLACES = (
    r"答案是?\s?@",
    r"答案是?\s?：@",
    r"答案是?\s?:@",
    r"答案应该?是\s?@",
    r"答案应该?选\s?@",
    r"答案为\s?@",
    r"答案选\s?@",
    r"选择?\s?@",
    r"故选?\s?@只有选?项?\s?@\s?是?对",
    r"只有选?项?\s?@\s?是?错",
    r"只有选?项?\s?@\s?不?正确",
    r"只有选?项?\s?@\s?错误",
    r"说法不?对选?项?的?是\s?@",
    r"说法不?正确选?项?的?是\s?@",
    r"说法错误选?项?的?是\s?@",
    r"@\s?是正确的",
    r"@\s?是正确答案",
    r"选项\s?@\s?正确",
    r"所以答\s?@",
    r"所以\s?@[.。$]?$",
    r"所有\s?@[.。$]?$",
    r"[\s，：:,]@[。，,.]?$",
    r"[\s，,：:][故即]@[。.]?$",
    r"[\s，,：:]因此@[。.]?$",
    r"[是为。]\s?@[。.]?$",
    r"因此\s?@[。.]?$",
    r"显然\s?@[。.]?$",
    r"答案是\s?\S+(?:。|$)",
    r"答案应该是\s?\S+(?:。|$)",
    r"答案为\s?\S+(?:。|$)",
    r"[Tt]he answer is \(?@\)?",
    r"[Tt]he answer is option \(?@\)?",
    r"[Tt]he correct answer is \(?@\)?",
    r"[Tt]he correct answer is option \(?@\)?",
    r"[Tt]he answer to the question is \(?@\)?",
    r"^选项\s?@",
    r"^@\s?选?项",
    r"(?:\s|^)@[\s。，,：:.$]",
    r"(?:\s|^)@(?:\s|$)",
    r"1.\s?.*?$",
    r"1.\s?@[.。$]?$",
    r"@:",
    r"@",
)
# Takes precedence over `_PLACES`: a letter at the very beginning, followed by one of these characters.
_FIRST = r"@[\s，：:,]"


class EepOptionMatcher(LetterMatcher):
    """The option that the answer settles on: RTE, CB, COPA, MultiRC, MMLU and the further sets."""

    stop = ()
    trims = False

    def _score(self, answer: str, example: Example) -> float:
        return float(_option(answer, example.choices) in example.references)

    def _settled(self, start: str, example: Example) -> bool:
        return _places(example.choices)[0].match(start) is not None


class _ContainingMatcher(Matcher):
    """Base of matchers that look for a reference, plain or normalised, as a substring of the normalised answer."""

    trims = False

    def _score(self, answer: str, example: Example) -> float:
        found = self._found(answer)
        return float(any(_clause(reference) in found or reference in found for reference in example.references))

    @abstractmethod
    def _found(self, answer: str) -> str: ...


class EepRecordMatcher(_ContainingMatcher):
    """ReCoRD: search in the first line without `Answer: `, up to its first full stop or comma; case-sensitive."""

    stop = ()

    def _found(self, answer: str) -> str:
        return _clause(answer.strip().split("\n")[0].replace("Answer: ", ""))

    def _settled(self, start: str, example: Example) -> bool:
        return _CLAUSE.search(start.strip()) is not None


class EepDropMatcher(_ContainingMatcher):
    """DROP: search in the last number without sign and decimals; `12` contains a reference `2`."""

    stop = (_QUESTION,)

    def _found(self, answer: str) -> str:
        return _clause(_last_number(answer))


class EepSquadMatcher(Matcher):
    """SQuAD 2: search in the first line after its last `answer is`, up to a full stop or comma; ignores case."""

    trims = False

    def _score(self, answer: str, example: Example) -> float:
        found = _clause(answer.lower().split("answer is")[-1])
        return float(any(_plain(reference.split("\n")[0]).lower() in found for reference in example.references))


class EepGsm8kMatcher(Matcher):
    """GSM8K: the last number equals the one after the reference's `#### `; thousands separators split a number."""

    stop = (_QUESTION,)
    trims = False

    def _score(self, answer: str, example: Example) -> float:
        found = _last_number(answer)
        return float(any(_equal(found, _whole_number(reference)) for reference in example.references))

    def problem(self, example: Example) -> str | None:
        for reference in example.references:
            try:
                int(_whole_number(reference))
            except ValueError:
                return f"the reference {reference!r} has no whole number"
        return super().problem(example)


@lru_cache(maxsize=256)
def _places(choices: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    letters = f"[{''.join(map(re.escape, choices))}]"
    return tuple(re.compile(place.replace("@", letters)) for place in (_FIRST, *_PLACES))


def _option(answer: str, choices: tuple[str, ...]) -> str | None:
    first, *others = _places(choices)
    found = first.match(answer)
    for place in others if found is None else ():
        found = place.search(answer)
        if found is not None and any(choice in found.group() for choice in choices):
            break
    return None if found is None else next((choice for choice in choices if choice in found.group()), None)


def _plain(text: str) -> str:
    """Remove punctuation, articles and double spaces."""
    return " ".join(_ARTICLE.sub("", _MARK.sub("", text)).split())


def _clause(text: str) -> str:
    """`_plain` of the text before the first line break, full stop or comma."""
    return _plain(_CLAUSE.split(text, maxsplit=1)[0])


def _last_number(answer: str) -> str:
    return next(reversed(_NUMBER.findall(answer)), "NULL")


def _whole_number(reference: str) -> str:
    _, mark, behind = reference.partition(_RESULT_MARK)
    return (behind.split(_RESULT_MARK)[0] if mark else reference).replace(",", "")


def _equal(found: str, expected: str) -> bool:
    if found == expected:
        return True
    try:
        return abs(float(found) - int(expected)) < 1e-6
    except (ValueError, OverflowError):
        return False
