"""What every matcher has: where an answer ends, and the promise of `decided`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

from moevolve.evaluators.types import Example


def cut(text: str, stop: Sequence[str], trim: bool = True) -> tuple[str, bool]:
    """The answer within generated text: leading white space off, up to the stop string that is completed first.

    "Completed first" (not "begins first") is what a decoder sees as text arrives, so a cut never moves afterwards.

    Args:
        text: generated.
        stop: the stop strings.
        trim: whether leading white space is off.

    Returns:
        `(answer, closed)`; closed says whether a stop string was met.
    """
    text = text.lstrip() if trim else text
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


class Matcher(ABC):
    """Scores answers of one task. Subclasses say what they compare; stop strings are handled here.

    Attributes:
        needs_choices: whether every example needs choices.
        stop: where answers end unless the task says otherwise.
        trims: whether white space before an answer doesn't count, so that a line break there ends nothing.
    """

    needs_choices: ClassVar[bool] = False
    stop: ClassVar[tuple[str, ...]] = ("\n",)
    trims: ClassVar[bool] = True

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)

    def match(self, text: str, example: Example) -> float:
        """How right the generated text is, in [0, 1]."""
        return _match(self, text, example)

    def decided(self, text: str, example: Example) -> bool:
        """Whether `match` is the same for every continuation of the text."""
        return _decided(self, text, example)

    def _match(self, text: str, example: Example) -> float:
        return self._score(cut(text, self._stop, self.trims)[0], example)

    def _decided(self, text: str, example: Example) -> bool:
        # A character whose bytes are not all generated decodes to U+FFFD and becomes another one later.
        answer, closed = cut(text.rstrip("\ufffd"), self._stop, self.trims)
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


# Candidates give the same answers to the same examples again and again.
@lru_cache(maxsize=65536)
def _match(matcher: Matcher, text: str, example: Example) -> float:
    return matcher._match(text, example)  # noqa: SLF001 - the rest of `Matcher.match`


@lru_cache(maxsize=65536)
def _decided(matcher: Matcher, text: str, example: Example) -> bool:
    return matcher._decided(text, example)  # noqa: SLF001 - the rest of `Matcher.decided`
