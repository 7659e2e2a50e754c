"""Log-likelihoods of several continuations of a prompt. The prompt runs once if sequences are packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.engine.batches import Batch
from moevolve.workers.engine.forward import Forward, sums_by_owner, token_logprobs

Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""Summed log-probabilities of continuations in nats, float64 [continuations], and whether greedy decoding gives each,
bool [continuations]."""


def choice_sequences(prompt: Tokens, choices: Sequence[Tokens]) -> tuple[Tokens, ...]:
    """Return the sequences to run for the likelihoods of a prompt's continuations, without their last tokens."""
    return tuple(dict.fromkeys((*prompt, *choice[:-1]) for choice in choices))


class ChoiceScorer:
    """Scores continuations of prompts with the current model."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def score(self, prompts: Sequence[Tokens], choices: Sequence[Sequence[Tokens]]) -> list[Scored]:
        """Score the continuations of every prompt.

        Args:
            prompts: Non-empty prompts.
            choices: Non-empty continuations of every prompt.

        Raises:
            CandidateError: Logits are not finite.
        """
        scored: list[Scored] = [(np.zeros(0), np.zeros(0, dtype=np.bool_))] * len(prompts)
        groups = tuple(choice_sequences(*pair) for pair in zip(prompts, choices, strict=True))
        for batch in self._forward.batcher.batches(groups):
            pairs = [(prompts[i], choice) for i in batch.examples for choice in choices[i]]
            if pairs:
                sums, greedy = self._run(batch, pairs)
                boundaries = np.cumsum([len(choices[i]) for i in batch.examples])[:-1]
                parts = zip(np.split(sums, boundaries), np.split(greedy, boundaries), strict=True)
                for i, part in zip(batch.examples, parts, strict=True):
                    scored[i] = part
        return scored

    def _run(self, batch: Batch, pairs: Sequence[tuple[Tokens, Tokens]]) -> Scored:
        """Score pairs of a prompt and a continuation."""
        paths = [batch.path((*prompt, *choice[:-1]))[len(prompt) - 1 :] for prompt, choice in pairs]
        tokens = [token for _, choice in pairs for token in choice]
        counts = [len(choice) for _, choice in pairs]
        # Continuations with a common prefix read the same columns, whose logits are computed once.
        places, index = np.unique(np.concatenate(paths), return_inverse=True)
        logits = self._forward.logits(batch.columns, places)
        missed = logits.argmax(dim=-1).cpu().numpy()[index] != np.array(tokens)
        sums = sums_by_owner(token_logprobs(logits, index.tolist(), tokens), counts)
        return sums, sums_by_owner(missed.astype(np.float64), counts) == 0
