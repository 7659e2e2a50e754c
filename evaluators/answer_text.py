"""Generated text as matchers see it: where the answer ends, which part of it is final, its words."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

Tokens = tuple[str, ...]

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


def squad_tokens(text: str) -> Tokens:
    """Words after SQuAD's normalisation: lower case, no ASCII punctuation, no articles (Rajpurkar et al. 2016)."""
    words: list[str] = []
    for piece in text.split():
        words.extend(_ARTICLES.sub(" ", piece.lower().translate(_PUNCTUATION)).split())
    return tuple(words)


def token_f1(answer: Tokens, reference: Tokens) -> float:
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
