"""Answers that are a number."""

from __future__ import annotations

import re
from decimal import Decimal

from moevolve.evaluators.matching.base import Matcher
from moevolve.evaluators.types import Example

_RESULT_MARK = "####"
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


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


def _result(text: str) -> Decimal | None:
    """The number behind the first mark, or without one there the last number of the text."""
    _, mark, behind = text.partition(_RESULT_MARK)
    found = _NUMBER.findall(behind)[:1] if mark else []
    found = found or _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "").replace("$", "")) if found else None
