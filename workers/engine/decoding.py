"""Greedy answers in the making: their book-keeping, and decoding step by step what a pass over gold answers left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.evaluators.fitness.engine import Decided
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.engine.columns import pad_left
from moevolve.workers.engine.forward import Forward

if TYPE_CHECKING:
    from transformers import DynamicCache


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


_WIDER = 2
"""Rows are decoded together as long as their cache isn't wider than so many batches: where prompts have their
beginnings in common, a batch's rows can have many times its columns."""


def decoded_together(lengths: Sequence[int], batch_tokens: int) -> list[slice]:
    """Which of a batch's unfinished rows are decoded at once, by place.

    Args:
        lengths: tokens of each that are cached.
        batch_tokens: upper bound on columns of a batch.
    """
    parts, start, longest = [], 0, 0
    for place, length in enumerate(lengths):
        longest = max(longest, length)
        if place > start and (place + 1 - start) * longest > _WIDER * batch_tokens:
            parts.append(slice(start, place))
            start, longest = place, length
    return [*parts, slice(start, len(lengths))]


def decode(
    forward: Forward,
    going: Mapping[int, NDArray[np.int64]],
    prompts: Sequence[Tokens],
    cache: DynamicCache | None,
    answers: Answers,
) -> None:
    """Finish answers.

    Args:
        forward: runs the model.
        going: unfinished examples, each of which has a token that wasn't fed yet, and the columns of its prompt and
            draft.
        prompts: of all examples.
        cache: of those columns; None to run the prompts again.
        answers: grown in place.

    Raises:
        CandidateError: a logit is not finite.
    """
    examples = list(going)
    tokens = [answers.tokens[i] for i in examples]
    if cache is None:
        whole = [(*prompts[i], *done) for i, done in zip(examples, tokens, strict=True)]
        ids, mask, positions = pad_left(whole, forward.device)
        cache = forward.new_cache()
    else:
        fed = [len(prompts[i]) + len(done) - 1 for i, done in zip(examples, tokens, strict=True)]
        paths = [np.resize(going[i][:count], max(fed)) for i, count in zip(examples, fed, strict=True)]
        cache = forward.rows_of(cache, np.stack(paths))
        place = torch.arange(max(fed), device=forward.device)
        mask = (place < torch.tensor(fed, device=forward.device).unsqueeze(1)).long()
        ids, mask, positions = _next_column(mask, tokens)
    while True:
        greedy = forward.step(ids, mask, positions, cache).argmax(dim=-1).tolist()
        for i, token in zip(examples, greedy, strict=True):
            if not answers.finished[i]:
                answers.push(i, token)
        alive = [row for row, i in enumerate(examples) if not answers.finished[i]]
        if not alive:
            return
        # Selecting copies the cache, so it waits until half of the rows are done.
        if 2 * len(alive) <= len(examples):
            index = torch.tensor(alive, device=forward.device)
            cache.batch_select_indices(index)
            examples, mask = [examples[row] for row in alive], mask[index]
        ids, mask, positions = _next_column(mask, [answers.tokens[i] for i in examples])


def _next_column(mask: Tensor, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and positions that feed each row its last token (finished rows without one are fed anything)."""
    last = [[row[-1] if row else 0] for row in tokens]
    ids = torch.tensor(last, dtype=torch.int64, device=mask.device)
    return ids, torch.cat((mask, torch.ones_like(ids)), dim=1), mask.sum(dim=1, keepdim=True)
