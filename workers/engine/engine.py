"""The engine: greedy answers, gold log-probabilities and likelihoods of choices and texts from the resident model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.engine import Decided, Generation
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.harness.files import harness_version
from moevolve.evaluators.matching.base import cut
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.settings import ALL_SHORTCUTS, EngineConfig, Shortcuts
from moevolve.workers.engine.batches import Batch
from moevolve.workers.engine.choices import ChoiceScorer, Scored, means
from moevolve.workers.engine.decoding import Answers, decode, decoded_together, draft_lengths
from moevolve.workers.engine.forward import Forward, sums_by_owner, token_logprobs
from moevolve.workers.engine.products import use_products
from moevolve.workers.engine.reuse import LayerReuse
from moevolve.workers.engine.texts import Span, TextScorer, compared_spans, whole_texts
from moevolve.workers.engine.tokenizing import (
    TokenizedSplit,
    end_tokens,
    missing_bos,
    tokenize_split,
)

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

    from moevolve.workers.engine.harness import HarnessRun

_TEXTS = 1 << 17
"""Decoded answers remembered before starting over."""


class GenerationEngine:
    """Implements `moevolve.evaluators.fitness.engine.Engine` on a loaded `transformers` causal LM.

    The gold answer is fed along with its prompt, and one pass gives three things: the gold answer's log-probability,
    the first greedy token, and every further greedy token for as long as greedy decoding agrees with the gold answer
    (speculative decoding with the gold answer as the draft, so the tokens are the same). Only rows that left the gold
    answer and are not yet decided are decoded step by step, from the cached prompt.

    Results depend on the model, the split and the config: batches are planned from the split alone. Between calls only
    tokens, decoded texts and what `remember` was asked for are kept.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        shortcuts: Shortcuts = ALL_SHORTCUTS,
        reuse: LayerReuse | None = None,
    ) -> None:
        """Take a model to evaluate; edits made to it later are seen.

        Args:
            model: in eval mode; inputs go to the device of its input embeddings.
            tokenizer: the model's.
            config: batching and truncation. `threads` is not set here; see `configure_runtime`.
            shortcuts: which ways to compute less are taken.
            reuse: keeps hidden states from one candidate to the next (`moevolve.workers.engine.reuse`); the model's
                layers must be what its keys say.
        """
        use_products(model, config.matmul_backend)
        self._forward = Forward(model, config.batch_tokens, shortcuts.lean, reuse, shortcuts.prefixes)
        self._scorer = TextScorer(self._forward)
        self.tokenizer = tokenizer
        self.config = config
        self._choices = ChoiceScorer(self._forward)
        self._draft = shortcuts.draft
        self.bos = missing_bos(model, tokenizer)
        self._ends = end_tokens(model, tokenizer, config)
        self._tokenized: dict[str, TokenizedSplit] = {}
        self._greedy: dict[str, tuple[Tokens, ...]] = {}
        self._runs: dict[str, HarnessRun] = {}
        self._texts: dict[Tokens, str] = {}

    @property
    def forward(self) -> Forward:
        """What runs the model."""
        return self._forward

    @torch.inference_mode()
    def generate(self, split: PreparedSplit, decided: Decided) -> Generation:
        """Greedy answers and gold log-probabilities.

        Args:
            split: prompts; `max_new_tokens` bounds every answer.
            decided: see `moevolve.evaluators.fitness.engine.Decided`; must be a pure function.

        Returns:
            Texts without special tokens, cut where decoding stopped: at an end token, after `max_new_tokens`, or once
            decided. The gold log-probability leaves the end token out; it is 0 for an example without gold tokens.

        Raises:
            CandidateError: logits are not finite.
            UserError: the prompts can't be tokenised.
        """
        answers, logprobs = self._answers(split, decided)
        return Generation(answers.texts(), logprobs)

    def _answers(self, split: PreparedSplit, decided: Decided) -> tuple[Answers, NDArray[np.float64]]:
        """See `generate`."""
        tokenized = self.tokens_of(split)
        lengths = draft_lengths(tokenized.golds, split.max_new_tokens, decided, self._text)
        answers = Answers(len(lengths), split.max_new_tokens, self._ends, decided, self._text)
        logprobs = np.zeros(len(lengths), dtype=np.float64)
        drafts = [gold[:length] for gold, length in zip(tokenized.golds, lengths, strict=True)]
        drafted = [(*prompt, *draft) for prompt, draft in zip(tokenized.prompts, drafts, strict=True)]
        for batch in self._forward.batcher.batches(tuple((tokens,) for tokens in drafted)):
            examples = batch.examples
            cache = self._forward.new_cache() if self._forward.rewinds and split.max_new_tokens > 1 else None
            paths = [batch.path(drafted[i]) for i in examples]
            read = [path[-lengths[i] - 1 :] for i, path in zip(examples, paths, strict=True)]
            greedy, logprobs[examples] = self._read(batch, read, [tokenized.golds[i] for i in examples], cache)
            for i, tokens in zip(examples, greedy, strict=True):
                answers.take(i, drafts[i] if self._draft else (), tokens)
            going = {i: path for i, path in zip(examples, paths, strict=True) if not answers.finished[i]}
            if going and cache is not None:
                self._forward.complete(batch.columns, cache)
            for part in decoded_together([*map(len, going.values())], self.config.batch_tokens) if going else ():
                decode(self._forward, dict([*going.items()][part]), tokenized.prompts, cache, answers)
        return answers, logprobs

    @torch.inference_mode()
    def rank(self, split: PreparedSplit) -> tuple[NDArray[np.float64], ...]:
        """Mean log-probability per token of every choice of every example.

        Prompts run once; choices of several tokens then follow on copies of the cached prompts.

        Returns:
            Per example float64 [choices], in nats.

        Raises:
            CandidateError: logits are not finite.
            UserError: a choice has no tokens, or the prompts can't be tokenised.
        """
        tokenized = self.tokens_of(split)
        for i, choices in enumerate(tokenized.choices):
            if not all(choices):
                where = f"task {split.task}, split {split.split}, example {i}"
                raise UserError(f"{where}: a choice has no tokens; give it some text")
        scored = self._choices.score(tokenized.prompts, tokenized.choices)
        return tuple(means(sums, choices) for (sums, _), choices in zip(scored, tokenized.choices, strict=True))

    @torch.inference_mode()
    def continuations(self, prompts: Sequence[Tokens], choices: Sequence[Sequence[Tokens]]) -> list[Scored]:
        """Summed log-probabilities of continuations; see `moevolve.workers.engine.choices.ChoiceScorer.score`."""
        return self._choices.score(prompts, choices)

    @torch.inference_mode()
    def judged(self, split: PreparedSplit) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """See `moevolve.evaluators.fitness.engine.Engine`."""
        harness_version()  # says what to install
        from moevolve.workers.engine.harness import HarnessRun

        if split.fingerprint not in self._runs:
            self._runs[split.fingerprint] = HarnessRun(self, split)
        return self._runs[split.fingerprint].evaluate()

    @torch.inference_mode()
    def text_logprobs(self, split: PreparedSplit) -> NDArray[np.float64]:
        """See `moevolve.evaluators.fitness.engine.Engine`; prompts are truncated like those of other splits."""
        return self._scorer.logprobs(whole_texts(split, self.tokens_of(split)))

    @torch.inference_mode()
    def remember(self, split: PreparedSplit) -> None:
        """See `moevolve.evaluators.fitness.engine.Engine`; takes positions x hidden values of host memory per split."""
        if not self._scorer.knows(split.fingerprint):
            if split.positions == "greedy":
                self._greedy[split.fingerprint] = self._greedy_answers(split)
            self._scorer.remember(split.fingerprint, self._spans(split))

    @torch.inference_mode()
    def answered(self, split: PreparedSplit, rows: int) -> list[Tokens]:
        """The first prompts of a split with their answers: the gold one, or else the model's own greedy one.

        Texts that are read whole get no answer: those of a fitness that reads texts and compares at no answer.

        Args:
            split: greedy answers end as they do when they are scored, their end token left out.
            rows: how many prompts.

        Raises:
            CandidateError: logits are not finite.
            UserError: the prompts can't be tokenised.
        """
        tokenized = self.tokens_of(split)
        answers = dict(enumerate(tokenized.golds[:rows]))
        lacking = [row for row, answer in answers.items() if not answer]
        whole = FITNESSES[split.fitness].reads == "texts" and split.positions == "text"
        if lacking and not whole:
            own = self._own_answers(
                replace(split, examples=tuple(split.examples[row] for row in lacking), harness=None)
            )
            answers |= dict(zip(lacking, map(tuple, own.tokens), strict=True))
        return [(*tokenized.prompts[row], *answer) for row, answer in answers.items()]

    @torch.inference_mode()
    def divergences(self, split: PreparedSplit) -> NDArray[np.float64]:
        """See `moevolve.evaluators.fitness.engine.Engine`."""
        return self._scorer.divergences(split.fingerprint, self._remembered_spans(split))

    @torch.inference_mode()
    def agreements(self, split: PreparedSplit) -> NDArray[np.float64]:
        """See `moevolve.evaluators.fitness.engine.Engine`."""
        return self._scorer.agreements(split.fingerprint, self._remembered_spans(split))

    def _remembered_spans(self, split: PreparedSplit) -> list[Span]:
        if not self._scorer.knows(split.fingerprint):
            raise ValueError(f"{split.task}/{split.split}: the unedited model's predictions were not remembered")
        return self._spans(split)

    def _spans(self, split: PreparedSplit) -> list[Span]:
        return compared_spans(split, self.tokens_of(split), self._greedy.get(split.fingerprint, ()))

    def _greedy_answers(self, split: PreparedSplit) -> tuple[Tokens, ...]:
        """The model's own answers, none empty; after one that ended by itself its end token."""
        answers = self._own_answers(split)
        # The last token of a text is never read, only predicted: which of the end tokens it was makes no difference.
        end = min(self._ends, default=0)
        pairs = zip(answers.tokens, answers.ended, strict=True)
        return tuple((*tokens, end) if ended else tuple(tokens) for tokens, ended in pairs)

    def _own_answers(self, split: PreparedSplit) -> Answers:
        """Greedy answers up to the end token, a stop string or `max_new_tokens`."""
        return self._answers(split, lambda _, text: cut(text, split.matching.stop)[1])[0]

    def tokens_of(self, split: PreparedSplit) -> TokenizedSplit:
        """The split's tokens, made once."""
        if split.fingerprint not in self._tokenized:
            self._tokenized[split.fingerprint] = tokenize_split(self.tokenizer, split, self.config, self.bos)
        return self._tokenized[split.fingerprint]

    def token_text(self, token: int) -> str:
        """One token, decoded by itself."""
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _text(self, tokens: Tokens) -> str:
        """Decoded answer; remembered, because a split's answers repeat and decoding is slow."""
        text = self._texts.get(tokens)
        if text is None:
            if len(self._texts) >= _TEXTS:
                self._texts.clear()
            decoded = self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert isinstance(decoded, str)
            text = self._texts[tokens] = decoded
        return text

    def _read(
        self, batch: Batch, read: Sequence[NDArray[np.int64]], golds: Sequence[Tokens], cache: DynamicCache | None
    ) -> tuple[list[list[int]], NDArray[np.float64]]:
        """One pass over prompts and drafts.

        Args:
            batch: of examples.
            read: per example, the columns of its prompt's last token and of its draft's.
            golds: per example.
            cache: filled, if given.

        Returns:
            The most likely token after each of these columns, and float64 [examples], the mean log-probability of each
            gold answer's tokens.
        """
        places, index = np.unique(np.concatenate(read), return_inverse=True)
        logits = self._forward.logits(batch.columns, places, cache)
        starts = np.cumsum([0, *map(len, read)]).tolist()
        counts = [len(gold) for gold in golds]
        predicting = [start + place for start, count in zip(starts, counts, strict=False) for place in range(count)]
        logprobs = token_logprobs(logits, index[predicting].tolist(), [token for gold in golds for token in gold])
        means = sums_by_owner(logprobs, counts) / np.maximum(counts, 1)
        greedy = logits.argmax(dim=-1).cpu().numpy()[index].tolist()
        return [greedy[start:end] for start, end in pairwise(starts)], means
