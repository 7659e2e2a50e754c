"""Greedy decoding, step by step, of answers that a pass over prompts and gold answers left unfinished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.answers import Answers
from moevolve.workers.columns import pad_left
from moevolve.workers.forward import Forward
from moevolve.workers.tokenizing import Tokens

if TYPE_CHECKING:
    from transformers import DynamicCache


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
