"""Log-likelihoods of several continuations of one prompt: the prompt runs once, the continuations on copies of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from moevolve.evaluators.engine import Watch
from moevolve.workers.batching import Columns, Tokens, pad, plan_batches
from moevolve.workers.forward import Forward, copy_rows, sums_by_owner, token_logprobs

Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""Summed log-probabilities of continuations (nats), and whether greedy decoding would have made each."""


def means(sums: NDArray[np.float64], choices: Sequence[Tokens]) -> NDArray[np.float64]:
    """Log-probabilities per token, from their sums over the tokens of continuations."""
    return sums / [len(choice) for choice in choices]


class ChoiceScorer:
    """Scores continuations with a model as it is now.

    Args:
        forward: runs it.
        batch_tokens: upper bound on padded tokens in one pass.
    """

    def __init__(self, forward: Forward, batch_tokens: int) -> None:
        self._forward = forward
        self._batch_tokens = batch_tokens

    def score(
        self, prompts: Sequence[Tokens], choices: Sequence[Sequence[Tokens]], watch: Watch | None = None
    ) -> list[Scored]:
        """Score every prompt's continuations, float64 and bool [choices] per prompt.

        Args:
            prompts: none empty.
            choices: per prompt its continuations, none empty.
            watch: told of every batch.

        Raises:
            CandidateError: logits are not finite.
        """
        sums = [np.zeros(len(group), dtype=np.float64) for group in choices]
        greedy = [np.zeros(len(group), dtype=np.bool_) for group in choices]
        batches = plan_batches([len(prompt) for prompt in prompts], [0] * len(prompts), self._batch_tokens)
        for batch in batches if watch is None else watch.arrange(batches):
            rows = [row for row, i in enumerate(batch) for _ in choices[i]]
            asked = [choice for i in batch for choice in choices[i]]
            if asked:
                found, agreed = self._batch([prompts[i] for i in batch], rows, asked)
                borders = np.cumsum([len(choices[i]) for i in batch])[:-1]
                for i, part, same in zip(batch, np.split(found, borders), np.split(agreed, borders), strict=True):
                    sums[i][:], greedy[i][:] = part, same
            if watch is not None:
                watch.ranked(batch, [means(sums[i], choices[i]) for i in batch])
        return list(zip(sums, greedy, strict=True))

    def _batch(self, prompts: list[Tokens], rows: list[int], choices: list[Tokens]) -> Scored:
        """Choices, each after the prompt of its row."""
        columns = pad(prompts, [()] * len(prompts), self._forward.device)
        longer = sorted((k for k, choice in enumerate(choices) if len(choice) > 1), key=lambda k: len(choices[k]))
        cache = self._forward.new_cache() if longer else None
        logits: Tensor = self._forward(
            columns.ids, columns.mask, columns.positions, cache, 1, recurs=True, whole_cache=True
        )[:, 0]
        first = [choice[0] for choice in choices]
        sums = token_logprobs(logits, rows, first)
        greedy = np.array(logits.argmax(dim=-1).tolist())[rows] == np.array(first)
        if cache is not None:
            width = columns.prompt_columns + max(map(len, choices)) - 1
            step = max(1, self._batch_tokens // width)
            for start in range(0, len(longer), step):
                part = longer[start : start + step]
                rest, agreed = self._rest([rows[k] for k in part], [choices[k] for k in part], columns, cache)
                sums[part] += rest
                greedy[part] &= agreed
        return sums, greedy

    def _rest(self, rows: list[int], choices: list[Tokens], columns: Columns, cache: DynamicCache) -> Scored:
        """All but the first token of choices, after cached prompts."""
        index = torch.tensor(rows, device=self._forward.device)
        fed = pad([choice[:1] for choice in choices], [choice[1:-1] for choice in choices], self._forward.device)
        before = columns.mask[index]
        logits: Tensor = self._forward(
            fed.ids,
            torch.cat((before, fed.mask), dim=1),
            fed.positions + before.sum(dim=1, keepdim=True),
            copy_rows(cache, index),
            fed.ids.shape[1],
            follows=True,
        )
        counts = [len(choice) - 1 for choice in choices]
        places = [row * fed.ids.shape[1] + place for row, count in enumerate(counts) for place in range(count)]
        targets = [token for choice in choices for token in choice[1:]]
        flat = logits.flatten(0, 1)
        missed = np.array(flat.argmax(dim=-1).tolist())[places] != np.array(targets)
        sums = sums_by_owner(token_logprobs(flat, places, targets), counts)
        return sums, sums_by_owner(missed.astype(np.float64), counts) == 0
