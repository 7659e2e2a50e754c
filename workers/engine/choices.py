"""Log-likelihoods of several continuations of one prompt, which runs once where sequences are packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moevolve.workers.contract.edits import Tokens
from moevolve.workers.engine.batches import Batch
from moevolve.workers.engine.forward import Forward, sums_by_owner, token_logprobs

Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""Summed log-probabilities of continuations (nats), and whether greedy decoding would have made each."""


def means(sums: NDArray[np.float64], choices: Sequence[Tokens]) -> NDArray[np.float64]:
    """Log-probabilities per token, from their sums over the tokens of continuations."""
    return sums / [len(choice) for choice in choices]


def asked_sequences(prompt: Tokens, choices: Sequence[Tokens]) -> tuple[Tokens, ...]:
    """What has to run for the likelihoods of a prompt's continuations: none's last token predicts anything."""
    return tuple(dict.fromkeys((*prompt, *choice[:-1]) for choice in choices))


class ChoiceScorer:
    """Scores continuations with a model as it is now, which `forward` runs."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def score(self, prompts: Sequence[Tokens], choices: Sequence[Sequence[Tokens]]) -> list[Scored]:
        """Score every prompt's continuations, float64 and bool [choices] per prompt.

        Args:
            prompts: none empty.
            choices: per prompt its continuations, none empty.

        Raises:
            CandidateError: logits are not finite.
        """
        found: list[Scored] = [(np.zeros(0), np.zeros(0, dtype=np.bool_))] * len(prompts)
        groups = tuple(asked_sequences(*pair) for pair in zip(prompts, choices, strict=True))
        for batch in self._forward.batcher.batches(groups):
            pairs = [(prompts[i], choice) for i in batch.examples for choice in choices[i]]
            if pairs:
                sums, greedy = self._run(batch, pairs)
                borders = np.cumsum([len(choices[i]) for i in batch.examples])[:-1]
                parts = zip(np.split(sums, borders), np.split(greedy, borders), strict=True)
                for i, part in zip(batch.examples, parts, strict=True):
                    found[i] = part
        return found

    def _run(self, batch: Batch, pairs: Sequence[tuple[Tokens, Tokens]]) -> Scored:
        """Continuations, each after its prompt."""
        asked = [batch.path((*prompt, *choice[:-1]))[len(prompt) - 1 :] for prompt, choice in pairs]
        tokens = [token for _, choice in pairs for token in choice]
        counts = [len(choice) for _, choice in pairs]
        # Continuations that begin alike read the same columns, whose logits are made once.
        places, index = np.unique(np.concatenate(asked), return_inverse=True)
        logits = self._forward.logits(batch.columns, places)
        missed = logits.argmax(dim=-1).cpu().numpy()[index] != np.array(tokens)
        sums = sums_by_owner(token_logprobs(logits, index.tolist(), tokens), counts)
        return sums, sums_by_owner(missed.astype(np.float64), counts) == 0
