"""Scores given texts: choices, whole texts, and comparisons of predictions with the unedited model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.kernels.products import logsumexp, row_sums
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.engine.batches import Batch
from moevolve.workers.engine.columns import TEXT_BLOCK
from moevolve.workers.engine.forward import Forward, sums_by_owner, token_logprobs
from moevolve.workers.engine.tokenizing import TokenizedSplit

# Number of logits computed at once. For a vocabulary of 150,000 these are 100 positions and 64 MB in float32: enough
# for the output head to run near full speed, and little enough for a few copies.
_CHUNK = 1 << 24

# Summed log-probabilities of continuations in nats, float64 [continuations], and whether greedy decoding gives each,
# bool [continuations].
Scored = tuple[NDArray[np.float64], NDArray[np.bool_]]

# A text and the number of its last positions that are read, not counting the last one, which predicts nothing.
Span = tuple[Tokens, int]


def choice_sequences(prompt: Tokens, choices: Sequence[Tokens]) -> tuple[Tokens, ...]:
    """Return the sequences to run for the likelihoods of a prompt's continuations, without their last tokens."""
    return tuple(dict.fromkeys((*prompt, *choice[:-1]) for choice in choices))


def choice_batches(forward: Forward, prompts: Sequence[Tokens], choices: Sequence[Sequence[Tokens]]) -> Sequence[Batch]:
    """Return the batches in which `score_choices` runs continuations."""
    return forward.batcher.batches(tuple(choice_sequences(*pair) for pair in zip(prompts, choices, strict=True)))


def score_choices(forward: Forward, prompts: Sequence[Tokens], choices: Sequence[Sequence[Tokens]]) -> list[Scored]:
    """Score non-empty continuations of every non-empty prompt, which runs once if sequences are packed.

    Raises:
        CandidateError: Logits are not finite.
    """
    scored: list[Scored] = [(np.zeros(0), np.zeros(0, dtype=np.bool_))] * len(prompts)
    for batch in choice_batches(forward, prompts, choices):
        pairs = [(prompts[i], choice) for i in batch.examples for choice in choices[i]]
        if pairs:
            sums, greedy = _score_pairs(forward, batch, pairs)
            boundaries = np.cumsum([len(choices[i]) for i in batch.examples])[:-1]
            parts = zip(np.split(sums, boundaries), np.split(greedy, boundaries), strict=True)
            for i, part in zip(batch.examples, parts, strict=True):
                scored[i] = part
    return scored


def _score_pairs(forward: Forward, batch: Batch, pairs: Sequence[tuple[Tokens, Tokens]]) -> Scored:
    paths = [batch.path((*prompt, *choice[:-1]))[len(prompt) - 1 :] for prompt, choice in pairs]
    tokens = [token for _, choice in pairs for token in choice]
    counts = [len(choice) for _, choice in pairs]
    # Continuations with a common prefix read the same columns, whose logits are computed once.
    places, index = np.unique(np.concatenate(paths), return_inverse=True)
    logits = forward.logits(batch.columns, places)
    missed = logits.argmax(dim=-1).cpu().numpy()[index] != np.array(tokens)
    sums = sums_by_owner(token_logprobs(logits, index.tolist(), tokens), counts)
    return sums, sums_by_owner(missed.astype(np.float64), counts) == 0


class TextScorer:
    """Scores texts with the current model, and compares its predictions with those of the unedited model.

    Every position of a text but the last predicts the next token. All of them are read, or only those that predict the
    text's answer. A pass returns the inputs of the output head; logits are computed from them in chunks of positions
    and normalised in float32, so no tensor of tokens x vocabulary exists. Of the unedited model the same hidden states
    are kept on the host. Edits don't change the output head, so its logits can be recomputed from them, bit for bit.
    Methods raise CandidateError if logits are not finite.

    Attributes:
        remembered: Texts and hidden states of the unedited model by key.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.remembered: dict[str, tuple[Sequence[Span], list[Tensor]]] = {}

    def logprobs(self, texts: Sequence[Tokens]) -> NDArray[np.float64]:
        """Compute the mean log-probability of every text's tokens after the first, in nats, float64 [texts]."""
        means = np.zeros(len(texts), dtype=np.float64)
        for batch, hidden in self._passes(_whole(texts)):
            targets = torch.tensor([token for i in batch for token in texts[i][1:]], device=hidden.device)
            parts = [
                _token_logprobs(self._forward.output_head(part), tokens)
                for part, tokens in zip(self._chunks(hidden), self._chunks(targets), strict=True)
            ]
            means[batch] = _text_means(parts, [len(texts[i]) - 1 for i in batch])
        return means

    def batches(self, texts: Sequence[Tokens]) -> Sequence[Batch]:
        """Return the batches in which texts run, without their last tokens."""
        return self._forward.batcher.batches(tuple((text[:-1],) for text in texts), TEXT_BLOCK)

    def knows(self, key: str) -> bool:
        return key in self.remembered

    def remember(self, key: str, spans: Sequence[Span]) -> None:
        """Store the predictions of the model, which must be unedited, on texts of at least two tokens.

        Raises:
            UserError: Hidden states are not finite.
        """
        kept = []
        for _, hidden in self._passes(spans):
            if not hidden.sum(dtype=torch.float32).isfinite():
                raise UserError("the unedited model's hidden states are not finite; try model.dtype: float32")
            kept.append(hidden.cpu())
        self.remembered[key] = spans, kept

    def compare(self, key: str, compare: Callable[[Tensor, Tensor], Tensor]) -> NDArray[np.float64]:
        """Average `divergence` or `overlap` with the stored predictions over each text's positions, float64 [texts]."""
        spans, remembered = self.remembered[key]
        means = np.zeros(len(spans), dtype=np.float64)
        for (batch, hidden), full in zip(self._passes(spans), remembered, strict=True):
            parts = [
                compare(self._forward.output_head(before.to(now.device)), self._forward.output_head(now))
                for before, now in zip(self._chunks(full), self._chunks(hidden), strict=True)
            ]
            means[batch] = _text_means(parts, [spans[i][1] for i in batch])
        return means

    def _passes(self, spans: Sequence[Span]) -> Iterator[tuple[list[int], Tensor]]:
        """Run all texts. Yields the indices of a pass's texts and their hidden states to read, [positions, hidden]."""
        for batch in self.batches([text for text, _ in spans]):
            places = [batch.path(spans[i][0][:-1])[-spans[i][1] :] for i in batch.examples]
            yield batch.examples, self._forward.hidden_states(batch.columns, np.concatenate(places))

    def _chunks(self, positions: Tensor) -> tuple[Tensor, ...]:
        return positions.split(max(1, _CHUNK // self._forward.vocabulary))


def _token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of one token per row of logits, float32 [rows]."""
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1).float()
    return chosen - logsumexp(logits)


def divergence(full: Tensor, edited: Tensor) -> Tensor:
    """KL(full || edited) per row of logits, in nats, float32 [rows], clamped to at least 0 against rounding."""
    before, now = full.float().log_softmax(dim=-1), edited.float().log_softmax(dim=-1)
    difference = before - now
    return row_sums(before.exp_() * difference).clamp_min(0.0)


def overlap(full: Tensor, edited: Tensor) -> Tensor:
    """1 - total variation distance of the two distributions per row of logits, float32 [rows], clamped to at most 1."""
    before, now = full.float().softmax(dim=-1), edited.float().softmax(dim=-1)
    return row_sums(torch.minimum(before, now)).clamp_max(1.0)


def whole_texts(split: PreparedSplit, tokenized: TokenizedSplit) -> list[Tokens]:
    """Return the prompts with their gold answers.

    Raises:
        UserError: A text has only one token.
    """
    texts = [(*prompt, *gold) for prompt, gold in zip(tokenized.prompts, tokenized.golds, strict=True)]
    for i, text in enumerate(texts):
        if len(text) < 2:
            where = f"task {split.task}, split {split.split}, example {i}"
            raise UserError(f"{where}: its text has one token, so none is predicted; leave the row out")
    return texts


def compared_spans(split: PreparedSplit, tokenized: TokenizedSplit, greedy: Sequence[Tokens]) -> list[Span]:
    """Return the texts and positions at which predictions are compared with the unedited model's.

    `greedy` are its greedy answers, for `positions: greedy`.

    Raises:
        UserError: An example has no answer to compare, or a text has only one token.
    """
    if split.positions == "text":
        return _whole(whole_texts(split, tokenized))
    answers = tuple(tokenized.golds if split.positions == "answer" else greedy)
    if not all(answers):
        where = f"task {split.task}, split {split.split}, example {answers.index(())}"
        raise UserError(f"{where}: it has no answer whose predictions could be compared; say positions: greedy or text")
    return [((*prompt, *answer), len(answer)) for prompt, answer in zip(tokenized.prompts, answers, strict=True)]


def _whole(texts: Sequence[Tokens]) -> list[Span]:
    return [(text, len(text) - 1) for text in texts]


def _text_means(parts: Sequence[Tensor], counts: Sequence[int]) -> NDArray[np.float64]:
    """Return the means of consecutive groups of `counts` values, checked to be finite."""
    values = torch.cat(list(parts)).double().cpu().numpy()
    wrong = np.count_nonzero(sums_by_owner((~np.isfinite(values)).astype(np.float64), counts))
    if wrong:
        raise CandidateError(f"non-finite logits for {wrong} of {len(counts)} texts of a batch")
    return sums_by_owner(values, counts) / np.asarray(counts)
