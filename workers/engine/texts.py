"""Whole texts: how likely the resident model finds them, and how far its predictions are from the unedited model's."""

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
from moevolve.workers.engine.forward import Forward, sums_by_owner
from moevolve.workers.engine.tokenizing import TokenizedSplit

_CHUNK = 1 << 24
"""Logits computed at once. Over a vocabulary of 150,000 that is 100 positions, 64 MB in float32: enough for the output
embeddings to run near their full speed, little enough for a few copies of it."""


Span = tuple[Tokens, int]
"""A text, and how many of its positions are read: the closing ones, without the last, which predicts nothing."""


class TextScorer:
    """Reads texts with a model as it is now, and compares it with what it was when a split was remembered.

    Every position of a text but its last predicts the next token; these positions are read, all of them or, of each
    text, the closing ones only: those that predict its answer. A pass keeps
    the hidden states that go into the output embeddings; logits are made from them a chunk of positions at a time and
    normalised in float32, so no tensor of tokens x vocabulary ever exists. The same hidden states are remembered of the
    unedited model, tokens x hidden values in the model's dtype on the host: edits leave the output embeddings alone, so
    its logits can be made again from them, bit for bit.

    Results depend on the model, the texts and how they are put into batches.
    """

    def __init__(self, forward: Forward) -> None:
        """Take a model; edits made to it later are seen.

        Args:
            forward: runs it.
        """
        self._forward = forward
        self._remembered: dict[str, list[Tensor]] = {}

    def logprobs(self, texts: Sequence[Tokens]) -> NDArray[np.float64]:
        """Mean log-probability of every text's tokens after the first, float64 [texts], in nats.

        Args:
            texts: of two tokens at least.

        Raises:
            CandidateError: logits are not finite.
        """
        means = np.zeros(len(texts), dtype=np.float64)
        for batch, hidden in self._passes(_whole(texts)):
            targets = torch.tensor([token for i in batch for token in texts[i][1:]], device=hidden.device)
            parts = [
                _token_logprobs(self._forward.embedded(part), tokens)
                for part, tokens in zip(self._chunks(hidden), self._chunks(targets), strict=True)
            ]
            means[batch] = _text_means(parts, [len(texts[i]) - 1 for i in batch])
        return means

    def knows(self, key: str) -> bool:
        """Whether something is remembered under a key."""
        return key in self._remembered

    def remember(self, key: str, spans: Sequence[Span]) -> None:
        """Keep what the model, which must be unedited, predicts on texts.

        Args:
            key: to find it again.
            spans: texts of two tokens at least, and how many of their closing positions are compared.

        Raises:
            UserError: hidden states are not finite.
        """
        kept = []
        for _, hidden in self._passes(spans):
            if not hidden.sum(dtype=torch.float32).isfinite():
                raise UserError("the unedited model's hidden states are not finite; try model.dtype: float32")
            kept.append(hidden.cpu())
        self._remembered[key] = kept

    def divergences(self, key: str, spans: Sequence[Span]) -> NDArray[np.float64]:
        """KL(remembered || now) over the vocabulary, mean over every text's positions, float64 [texts], in nats.

        Args:
            key: under which the same texts were remembered.
            spans: those texts and positions.

        Raises:
            CandidateError: logits are not finite.
            KeyError: nothing is remembered under this key.
        """
        return self._compare(key, spans, _divergence)

    def agreements(self, key: str, spans: Sequence[Span]) -> NDArray[np.float64]:
        """sum_v min(remembered, now) over the vocabulary, mean over every text's positions, float64 [texts].

        Args:
            key: under which the same texts were remembered.
            spans: those texts and positions.

        Raises:
            CandidateError: logits are not finite.
            KeyError: nothing is remembered under this key.
        """
        return self._compare(key, spans, _overlap)

    def _compare(
        self, key: str, spans: Sequence[Span], compare: Callable[[Tensor, Tensor], Tensor]
    ) -> NDArray[np.float64]:
        means = np.zeros(len(spans), dtype=np.float64)
        for (batch, hidden), full in zip(self._passes(spans), self._remembered[key], strict=True):
            parts = [
                compare(self._forward.embedded(before.to(now.device)), self._forward.embedded(now))
                for before, now in zip(self._chunks(full), self._chunks(hidden), strict=True)
            ]
            means[batch] = _text_means(parts, [spans[i][1] for i in batch])
        return means

    def _passes(self, spans: Sequence[Span]) -> Iterator[tuple[list[int], Tensor]]:
        """Runs all texts: indices of each pass's texts, and [positions, hidden] of what is read, text by text."""
        # A text's last token predicts none of its own.
        groups = tuple((text[:-1],) for text, _ in spans)
        for batch in self._forward.batcher.batches(groups):
            places = [batch.path(groups[i][0])[-spans[i][1] :] for i in batch.examples]
            yield batch.examples, self._forward.hidden_states(batch.columns, np.concatenate(places))

    def _chunks(self, positions: Tensor) -> tuple[Tensor, ...]:
        return positions.split(max(1, _CHUNK // self._forward.vocabulary))


def _token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of a token per row of logits, float32 [rows]."""
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1).float()
    return chosen - logsumexp(logits.float())


def _divergence(full: Tensor, edited: Tensor) -> Tensor:
    """KL(full || edited) per row of logits, float32 [rows]; rounding makes it no smaller than 0."""
    before, now = full.float().log_softmax(dim=-1), edited.float().log_softmax(dim=-1)
    difference = before - now
    return row_sums(before.exp_() * difference).clamp_min(0.0)


def _overlap(full: Tensor, edited: Tensor) -> Tensor:
    """sum_v min(full, edited) of the two distributions per row of logits, float32 [rows]; rounding leaves it in [0, 1].

    It is 1 less their total variation distance.
    """
    before, now = full.float().softmax(dim=-1), edited.float().softmax(dim=-1)
    return row_sums(torch.minimum(before, now)).clamp_max(1.0)


def whole_texts(split: PreparedSplit, tokenized: TokenizedSplit) -> list[Tokens]:
    """Prompts with their gold answers.

    Raises:
        UserError: a text has one token only.
    """
    texts = [(*prompt, *gold) for prompt, gold in zip(tokenized.prompts, tokenized.golds, strict=True)]
    for i, text in enumerate(texts):
        if len(text) < 2:
            where = f"task {split.task}, split {split.split}, example {i}"
            raise UserError(f"{where}: its text has one token, so there is none to predict; leave the row out")
    return texts


def compared_spans(split: PreparedSplit, tokenized: TokenizedSplit, greedy: Sequence[Tokens]) -> list[Span]:
    """Texts whose predictions are compared with the unedited model's, and at how many of their positions.

    Args:
        split: whose `positions` say which.
        tokenized: its tokens.
        greedy: the unedited model's own answers, where these are compared.

    Raises:
        UserError: there is no answer to compare, or a text has one token only.
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
    """Means of consecutive stretches of `counts` values each.

    Raises:
        CandidateError: a value is not finite.
    """
    values = torch.cat(list(parts)).double().cpu().numpy()
    wrong = np.count_nonzero(sums_by_owner((~np.isfinite(values)).astype(np.float64), counts))
    if wrong:
        raise CandidateError(f"non-finite logits for {wrong} of {len(counts)} texts of a batch")
    return sums_by_owner(values, counts) / np.asarray(counts)
