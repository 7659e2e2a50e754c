"""The contract of matchers, and where an answer ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from moevolve.evaluators.types import Example, Matching


def cut(text: str, stop: Sequence[str], trim: bool = True) -> tuple[str, bool]:
    """Cut generated text at the first stop string, and optionally strip leading white space.

    The first stop string is the one that is completed first, as in decoding, so that later text never moves the cut.

    Returns:
        `(answer, closed)`; `closed` is True if there was a stop string.
    """
    text = text.lstrip() if trim else text
    best: tuple[int, int] | None = None
    for mark in stop:
        start = text.find(mark)
        if start >= 0 and (best is None or (start + len(mark), start) < best):
            best = (start + len(mark), start)
    return (text, False) if best is None else (text[: best[1]], True)


def settled_part(text: str, stop: Sequence[str]) -> str:
    """Return the longest start of an unclosed answer that can't be part of an incomplete stop string."""
    longest = max((len(mark) for mark in stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(len(mark) > size and mark.startswith(tail) for mark in stop):
            return text[:-size]
    return text


class Matcher(ABC):
    """Scores the answers of one task. Stop strings are handled here, the comparison in subclasses.

    Attributes:
        needs_choices: True if every example needs choices.
        stop: Default stop strings.
        trims: True if white space before an answer is stripped, so that a line break there doesn't end the answer.
    """

    needs_choices: ClassVar[bool] = False
    stop: ClassVar[tuple[str, ...]] = ("\n",)
    trims: ClassVar[bool] = True

    def __init__(self, matching: Matching) -> None:
        self._stop = matching.stop

    # Cached, since different candidates often give the same answer to an example.
    @lru_cache(maxsize=65536)  # noqa: B019 - matchers are few, and live as long as the process
    def match(self, text: str, example: Example) -> float:
        """Return the score of the generated text, in [0, 1]."""
        return self._score(cut(text, self._stop, self.trims)[0], example)

    @lru_cache(maxsize=65536)  # noqa: B019
    def decided(self, text: str, example: Example) -> bool:
        """Say whether `match` is the same for every continuation of the text."""
        # An incomplete character decodes to U+FFFD until its last byte is generated.
        answer, closed = cut(text.rstrip("\ufffd"), self._stop, self.trims)
        return closed or self._settled(settled_part(answer, self._stop), example)

    def problem(self, example: Example) -> str | None:
        """Say why this matcher can't score the example; None if it can."""
        if self.needs_choices and not example.choices:
            return "there are no choices to look for"
        return None

    @abstractmethod
    def _score(self, answer: str, example: Example) -> float: ...

    def _settled(self, start: str, example: Example) -> bool:
        """Say whether all answers that begin with `start` have the same score."""
        return False
