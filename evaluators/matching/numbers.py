"""The matcher for answers that are a number."""

from __future__ import annotations

import re
from decimal import Decimal

from moevolve.evaluators.matching.base import Matcher
from moevolve.evaluators.types import Example

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
                return f"there is no number in the reference {reference!r}"
        return super().problem(example)


def _result(text: str) -> Decimal | None:
    """The number after the first mark, or else the last number of the text."""
    _, mark, behind = text.partition(_RESULT_MARK)
    found = _NUMBER.findall(behind)[:1] if mark else []
    found = found or _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "").replace("$", "")) if found else None
