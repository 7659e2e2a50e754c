"""The book-keeping of answers in the making: which tokens each has, and whether it is finished."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from moevolve.evaluators.engine import Decided
from moevolve.workers.tokenizing import Tokens


class Answers:
    """Greedy answers of a split, grown token by token.

    Attributes:
        tokens: per example, the tokens so far, without end token.
        finished: per example, whether no further token is wanted.
        ended: per example, whether an end token came.
    """

    def __init__(
        self, count: int, limit: int, ends: Collection[int], decided: Decided, text: Callable[[Tokens], str]
    ) -> None:
        """Start with empty answers.

        Args:
            count: number of examples.
            limit: tokens an answer may have.
            ends: tokens that end an answer.
            decided: whether a text needs no continuation.
            text: decodes tokens.
        """
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.finished = [limit < 1] * count
        self.ended = [False] * count
        self._limit, self._ends, self._decided, self._text = limit, ends, decided, text

    def push(self, example: int, token: int) -> None:
        """Add the next greedy token of an unfinished answer."""
        if token in self._ends:
            self.finished[example] = self.ended[example] = True
            return
        tokens = self.tokens[example]
        tokens.append(token)
        self.finished[example] = len(tokens) >= self._limit or self._decided(example, self._text(tuple(tokens)))

    def take(self, example: int, draft: Tokens, greedy: Sequence[int]) -> None:
        """Take the greedy tokens a pass over a draft has shown.

        Args:
            example: whose answer it is.
            draft: tokens that were fed after the prompt.
            greedy: the most likely token after the prompt, and after each token of the draft (more are ignored).
        """
        for place, token in enumerate(greedy):
            if self.finished[example]:
                return
            self.push(example, token)
            if place >= len(draft) or token != draft[place]:
                return

    def texts(self) -> tuple[str, ...]:
        """The answers as text."""
        return tuple(self._text(tuple(answer)) for answer in self.tokens)


def draft_lengths(
    golds: Sequence[Tokens], limit: int, decided: Decided, text: Callable[[Tokens], str]
) -> tuple[int, ...]:
    """How many gold tokens to feed after each prompt.

    All but the last are needed for the gold answer's log-probability. The last tells how a right answer goes on, which
    matters only if it may go on and isn't decided by then.
    """
    return tuple(
        len(gold) if len(gold) < limit and not decided(i, text(gold)) else max(len(gold) - 1, 0)
        for i, gold in enumerate(golds)
    )
