"""Decoding: the state of a split's answers, and decoding those that the pass over gold answers left open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.evaluators.fitness.engine import Decided, never
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.engine.columns import pad
from moevolve.workers.engine.forward import Forward

if TYPE_CHECKING:
    from transformers import DynamicCache


class DecodedAnswers:
    """Greedy answers of a split, extended token by token.

    Args:
        limits: Maximum number of tokens of every answer.
        ends: Token ids that end an answer.

    Attributes:
        tokens: Tokens of every answer so far, without end token.
        finished: True for every answer that needs no further token.
        ended: True for every answer that was ended by an end token.
    """

    def __init__(
        self, limits: Sequence[int], ends: Collection[int], decided: Decided, text: Callable[[Tokens], str]
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in limits]
        self.finished = [limit < 1 for limit in limits]
        self.ended = [False] * len(limits)
        self._limits, self._ends, self._decided, self._text = limits, ends, decided, text

    def choose(self, examples: Sequence[int], logits: Tensor) -> list[int]:
        """Return the next token of every example from the model's logits, [examples, vocabulary]."""
        return logits.argmax(dim=-1).tolist()

    def push(self, example: int, token: int) -> None:
        """Add the next token of an unfinished answer."""
        if token in self._ends:
            self.finished[example] = self.ended[example] = True
            return
        tokens = self.tokens[example]
        tokens.append(token)
        undecided = self._decided is never or not self._decided(example, self._text(tuple(tokens)))
        self.finished[example] = len(tokens) >= self._limits[example] or not undecided

    def take(self, example: int, draft: Tokens, greedy: Sequence[int]) -> None:
        """Add the greedy tokens that follow from a pass over a draft, up to the first that differs from the draft.

        Args:
            draft: Tokens that were run after the prompt.
            greedy: Most likely token after the prompt and after each token of the draft; further ones are ignored.
        """
        for step, token in enumerate(greedy):
            if self.finished[example]:
                return
            self.push(example, token)
            if step >= len(draft) or token != draft[step]:
                return

    def texts(self) -> tuple[str, ...]:
        return tuple(self._text(tuple(answer)) for answer in self.tokens)


class SampledAnswers(DecodedAnswers):
    """Answers whose tokens are drawn from the model's predictions, at temperature 1.

    Args:
        limits, ends: As of `DecodedAnswers`.
        rng: Source of the draws, which don't depend on what is decoded together.
    """

    def __init__(self, limits: Sequence[int], ends: Collection[int], rng: np.random.Generator) -> None:
        super().__init__(limits, ends, never, lambda _: "")
        self._draws = [rng.random(limit) for limit in limits]

    def choose(self, examples: Sequence[int], logits: Tensor) -> list[int]:
        # On the host, since sums along a row aren't deterministic on every device.
        sums = logits.cpu().double().softmax(dim=-1).cumsum(dim=-1)
        # Those that are finished need no draw, and their rows are decoded along with the others.
        draws = [0.0 if self.finished[i] else self._draws[i][len(self.tokens[i])] for i in examples]
        # In float32 a draw could be rounded to 1, behind the last token.
        aims = torch.tensor(draws, dtype=torch.float64)[:, None] * sums[:, -1:]
        return torch.searchsorted(sums, aims, right=True).flatten().tolist()


def draft_lengths(
    golds: Sequence[Tokens], limit: int, decided: Decided, text: Callable[[Tokens], str]
) -> tuple[int, ...]:
    """Return the number of gold tokens to run after each prompt.

    All but the last are needed for the gold answer's log-probability. The last is needed only if a correct answer may
    continue after it.
    """
    return tuple(
        len(gold) if len(gold) < limit and not decided(i, text(gold)) else max(len(gold) - 1, 0)
        for i, gold in enumerate(golds)
    )


# Maximum size of the cache of rows that are decoded together, in multiples of `batch_tokens`. Where prompts share
# prefixes, the rows of a batch can have many times its columns.
_MAX_CACHED_BATCHES = 2


def decoded_together(lengths: Sequence[int], batch_tokens: int, equal: bool = False) -> list[slice]:
    """Divide a batch's unfinished rows, with these numbers of cached tokens, into slices that are decoded at once.

    With `equal`, rows of different lengths are never decoded together, for models whose tokens can't follow padding.
    """
    parts, start, longest = [], 0, 0
    for row, length in enumerate(lengths):
        longest = max(longest, length)
        full = (row + 1 - start) * longest > _MAX_CACHED_BATCHES * batch_tokens
        if row > start and (full or (equal and length != lengths[start])):
            parts.append(slice(start, row))
            start, longest = row, length
    return [*parts, slice(start, len(lengths))]


def decode(
    forward: Forward,
    unfinished: Mapping[int, NDArray[np.int64]],
    prompts: Sequence[Tokens],
    cache: DynamicCache | None,
    answers: DecodedAnswers,
) -> None:
    """Decode unfinished answers to their ends.

    Args:
        unfinished: Places of the prompt and draft of every unfinished example, which are only read with a cache. The
            last token of each answer has not been run yet.
        prompts: Prompts of all examples, finished or not.
        cache: KV cache of the pass over prompts and drafts; None to run the prompts again.
        answers: DecodedAnswers, extended in place.
    """
    examples = list(unfinished)
    tokens = [answers.tokens[i] for i in examples]
    if cache is None:
        whole = [(*prompts[i], *answer) for i, answer in zip(examples, tokens, strict=True)]
        ids, mask, positions = pad(whole, forward.device, before=True)
        cache = forward.new_cache()
    else:
        cached = [len(prompts[i]) + len(answer) - 1 for i, answer in zip(examples, tokens, strict=True)]
        paths = [np.resize(unfinished[i][:count], max(cached)) for i, count in zip(examples, cached, strict=True)]
        cache = forward.rows_of(cache, np.stack(paths))
        column = torch.arange(max(cached), device=forward.device)
        mask = (column < torch.tensor(cached, device=forward.device).unsqueeze(1)).long()
        ids, mask, positions = _next_column(mask, tokens)
    while True:
        chosen = answers.choose(examples, forward.step(ids, mask, positions, cache))
        for i, token in zip(examples, chosen, strict=True):
            if not answers.finished[i]:
                answers.push(i, token)
        alive = [row for row, i in enumerate(examples) if not answers.finished[i]]
        if not alive:
            return
        # Dropping rows copies the cache, so it is done only when half of the rows are finished.
        if 2 * len(alive) <= len(examples):
            index = torch.tensor(alive, device=forward.device)
            cache.reorder_cache(index)  # not all kinds of caches can select rows in another way
            examples, mask = [examples[row] for row in alive], mask[index]
        ids, mask, positions = _next_column(mask, [answers.tokens[i] for i in examples])


def decode_whole(forward: Forward, prompts: Sequence[Tokens], answers: DecodedAnswers) -> None:
    """Decode unfinished answers to all prompts, extended in place, without a cache.

    Every token of all these answers together takes one more pass of prompts and answers through all layers.
    """
    while unfinished := [i for i, finished in enumerate(answers.finished) if not finished]:
        texts = [(*prompts[i], *answers.tokens[i]) for i in unfinished]
        batches = forward.batcher.planned(tuple((text,) for text in texts), ahead=0)
        by_layer = forward.layers is not None
        with forward.finished([batch.columns for batch in batches]) if by_layer else nullcontext():
            for batch in batches:
                last = [batch.path(texts[row])[-1] for row in batch.examples]
                examples = [unfinished[row] for row in batch.examples]
                for i, token in zip(
                    examples, answers.choose(examples, forward.logits(batch.columns, last)), strict=True
                ):
                    answers.push(i, token)


def _next_column(mask: Tensor, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and positions of the column with each row's last token (token 0 in rows without one)."""
    last = [[row[-1] if row else 0] for row in tokens]
    ids = torch.tensor(last, dtype=torch.int64, device=mask.device)
    return ids, torch.cat((mask, torch.ones_like(ids)), dim=1), mask.sum(dim=1, keepdim=True)
