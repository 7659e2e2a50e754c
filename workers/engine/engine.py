"""The engine: computes greedy answers, and log-probabilities of gold answers, choices and texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.engine import Decided, Generation
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.harness.files import harness_version
from moevolve.evaluators.matching.base import cut
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.settings import ALL_SHORTCUTS, EngineConfig, Shortcuts
from moevolve.workers.engine.batches import Batch
from moevolve.workers.engine.columns import Columns
from moevolve.workers.engine.decoding import (
    DecodedAnswers,
    SampledAnswers,
    decode,
    decode_whole,
    decoded_together,
    draft_lengths,
)
from moevolve.workers.engine.forward import Forward, sums_by_owner, token_logprobs
from moevolve.workers.engine.products import make_rows_independent
from moevolve.workers.engine.texts import (
    Span,
    TextScorer,
    choice_batches,
    compared_spans,
    divergence,
    overlap,
    score_choices,
    whole_texts,
)
from moevolve.workers.engine.tokenizing import PromptTokenizer, TokenizedSplit, end_tokens

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

    from moevolve.workers.engine.harness import ResidentLM


class GenerationEngine:
    """Implements `moevolve.evaluators.fitness.engine.Engine`, which describes its methods, with `transformers`.

    Gold answers are run together with their prompts. One pass then gives the gold answer's log-probability, the first
    greedy token, and every further greedy token for as long as greedy decoding agrees with the gold answer: speculative
    decoding with the gold answer as the draft. Only answers that leave the gold answer and aren't decided yet are
    decoded token by token, from the cached prompt, or where layers are run one after the other, in passes of their own.

    Results depend only on the model, the split and the config, because batches are planned from the split alone.
    Methods raise CandidateError if logits are not finite, and UserError if a split's texts can't be tokenised.

    Args:
        model: Model in eval mode. Edits made to it later take effect.
        tokenizer: The model's tokenizer.
        config: Batching and truncation. `threads` isn't applied here.
        shortcuts: Optimisations to use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        shortcuts: Shortcuts = ALL_SHORTCUTS,
    ) -> None:
        make_rows_independent(model)
        self.forward = Forward(model, config.batch_tokens, shortcuts.prefixes)
        self._scorer = TextScorer(self.forward)
        self.tokenizer = tokenizer
        self.config = config
        self._draft = shortcuts.draft
        self._prompts = PromptTokenizer.of(model, tokenizer, config)
        self._embedded: int = model.get_input_embeddings().weight.shape[0]
        self._ends = end_tokens(model, tokenizer, config)
        self._tokenized: dict[str, TokenizedSplit] = {}
        self._judged: dict[str, ResidentLM] = {}
        # A split's answers repeat from candidate to candidate, and decoding is slow.
        self._text: Callable[[Tokens], str] = lru_cache(maxsize=1 << 17)(self._decoded)

    @torch.inference_mode()
    def generate(self, split: PreparedSplit, decided: Decided) -> Generation:
        """Answers are decoded up to an end token, `max_new_tokens` or the token that decided the answer.

        Gold log-probabilities exclude the end token; they are 0 for examples without gold tokens.
        """
        answers, logprobs = self._answers(split, decided)
        return Generation(answers.texts(), logprobs)

    def _answers(self, split: PreparedSplit, decided: Decided) -> tuple[DecodedAnswers, NDArray[np.float64]]:
        tokenized, by_layer = self.tokens_of(split), self.forward.layers is not None
        drafts, batches = self._drafted(split)
        answers = DecodedAnswers(self._limits(split), self._ends, decided, self._text)
        steady = self._steady(split)
        logprobs = np.zeros(len(drafts), dtype=np.float64)
        caches = self.forward.rewinds and split.max_new_tokens > 1 and not by_layer
        for batch in batches:
            examples = batch.examples
            cache = self.forward.new_cache() if caches else None
            paths = [batch.path((*tokenized.prompts[i], *drafts[i])) for i in examples]
            read = [path[-len(drafts[i]) - 1 :] for i, path in zip(examples, paths, strict=True)]
            greedy, logprobs[examples] = self._read(batch, read, [tokenized.golds[i] for i in examples], cache)
            for i, tokens in zip(examples, greedy, strict=True):
                if steady[i]:
                    answers.take(i, drafts[i] if self._draft else (), tokens)
            pairs = zip(examples, paths, strict=True)
            unfinished = {i: path for i, path in pairs if steady[i] and not answers.finished[i]}
            if not unfinished or by_layer:
                continue
            together = {i: len(path) for i, path in unfinished.items()}
            if not self.forward.pads_left:
                # Prompts run again, with what has been answered, in rows of one length.
                together = {i: len(tokenized.prompts[i]) + len(answers.tokens[i]) for i in unfinished}
                together = dict(sorted(together.items(), key=lambda item: item[1]))
            order, equal = [*together], not self.forward.pads_left
            for part in decoded_together([*together.values()], self.config.batch_tokens, equal):
                rows = {i: unfinished[i] for i in order[part]}
                decode(self.forward, rows, tokenized.prompts, cache, answers)
        if by_layer or not all(steady):
            decode_whole(self.forward, tokenized.prompts, answers)
        return answers, logprobs

    def _limits(self, split: PreparedSplit) -> list[int]:
        """Return the number of tokens at which every answer ends: the split's, or the end of the model's context."""
        context = self._prompts.context
        most = [split.max_new_tokens if context is None else context - len(p) for p in self.tokens_of(split).prompts]
        return [min(split.max_new_tokens, room) for room in most]

    def _steady(self, split: PreparedSplit) -> list[bool]:
        """Say for every prompt whether its rotary embeddings stay the same with all that may be put behind it.

        If not, every token of the answer needs a pass of its own over everything before it.
        """
        tokenized, scale = self.tokens_of(split), self.forward.batcher.scale
        lengths = zip(map(len, tokenized.prompts), map(len, tokenized.golds), self._limits(split), strict=True)
        return [scale(prompt) == scale(prompt + max(gold, limit)) for prompt, gold, limit in lengths]

    def _drafted(self, split: PreparedSplit) -> tuple[list[Tokens], list[Batch]]:
        """Return the draft of every answer, and the batches in which prompts run with them.

        They depend on the split alone, and not on when decoding of an answer may stop.
        """
        tokenized, decided = self.tokens_of(split), FITNESSES[split.fitness].decided(split)
        lengths = draft_lengths(tokenized.golds, split.max_new_tokens, decided, self._text)
        # Text lengths count one token after what runs (`lay_out`), so the last one never runs where these matter.
        cases = zip(tokenized.golds, lengths, self._steady(split), strict=True)
        drafts = [gold[: length if steady else max(len(gold) - 1, 0)] for gold, length, steady in cases]
        pairs = zip(tokenized.prompts, drafts, strict=True)
        return drafts, self.forward.batcher.batches(tuple(((*prompt, *draft),) for prompt, draft in pairs))

    @torch.inference_mode()
    def rank(self, split: PreparedSplit) -> tuple[NDArray[np.float64], ...]:
        tokenized = self.tokens_of(split)
        for i, choices in enumerate(tokenized.choices):
            if not all(choices):
                where = f"task {split.task}, split {split.split}, example {i}"
                raise UserError(f"{where}: a choice has no tokens; give it some text")
        scored = score_choices(self.forward, tokenized.prompts, tokenized.choices)
        pairs = zip(scored, tokenized.choices, strict=True)
        return tuple(sums / [len(choice) for choice in choices] for (sums, _), choices in pairs)

    @torch.inference_mode()
    def judged(self, split: PreparedSplit) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        harness_version()  # raises an error that says what to install
        from moevolve.workers.engine.harness import ResidentLM

        if split.fingerprint not in self._judged:
            self._judged[split.fingerprint] = ResidentLM(self.forward, self._prompts, self.generate, split)
        return self._judged[split.fingerprint].evaluate()

    @torch.inference_mode()
    def text_logprobs(self, split: PreparedSplit) -> NDArray[np.float64]:
        return self._scorer.logprobs(whole_texts(split, self.tokens_of(split)))

    @property
    def memory(self) -> dict[str, tuple[Sequence[Span], list[Tensor]]]:
        """What is kept of the unedited model. Another model with the same output head can be compared with it."""
        return self._scorer.remembered

    def remembers(self, split: PreparedSplit) -> bool:
        """Return whether the unedited model's predictions are known, or the fitness compares with none."""
        return not FITNESSES[split.fitness].compares or self._scorer.knows(split.fingerprint)

    @torch.inference_mode()
    def remember(self, split: PreparedSplit) -> None:
        """Keep the unedited model's predictions, which takes positions x hidden values of host memory."""
        if not self._scorer.knows(split.fingerprint):
            greedy: tuple[Tokens, ...] = ()
            if split.positions == "greedy":
                answers = self._own_answers(split)
                # The last token of a text is only predicted, never run, so any of the end tokens will do.
                end = min(self._ends, default=0)
                pairs = zip(answers.tokens, answers.ended, strict=True)
                greedy = tuple((*tokens, end) if ended else tuple(tokens) for tokens, ended in pairs)
            self._scorer.remember(split.fingerprint, compared_spans(split, self.tokens_of(split), greedy))

    def passes(self, split: PreparedSplit) -> Sequence[Columns] | None:
        """Return the layouts of the passes that score a split, or None where they depend on the model's answers.

        Of short answers those with the drafts, which others may follow (`decode_whole`). If the split's fitness
        compares with the unedited model, that must be remembered, or must read given texts.
        """
        tokenized, reads = self.tokens_of(split), FITNESSES[split.fitness].reads
        if FITNESSES[split.fitness].decodes(split.max_new_tokens):
            return None
        batches: Sequence[Batch]
        if reads == "generation":
            batches = self._drafted(split)[1]
        elif reads == "choices":
            batches = choice_batches(self.forward, tokenized.prompts, tokenized.choices)
        elif reads == "texts" and self._scorer.knows(split.fingerprint):
            batches = self._scorer.batches([text for text, _ in self._scorer.remembered[split.fingerprint][0]])
        elif reads == "texts" and not FITNESSES[split.fitness].compares:
            batches = self._scorer.batches(whole_texts(split, tokenized))
        elif reads == "texts" and split.positions != "greedy":
            batches = self._scorer.batches([text for text, _ in compared_spans(split, tokenized, ())])
        else:
            return None
        return [batch.columns for batch in batches]

    @torch.inference_mode()
    def answered(self, split: PreparedSplit, rows: int) -> list[Tokens]:
        """Return the first `rows` prompts of a split with their gold answers, or else the model's greedy answers.

        Greedy answers end as they do in scoring, without the end token. Splits of whole texts get no answers.
        """
        tokenized = self.tokens_of(split)
        answers = dict(enumerate(tokenized.golds[:rows]))
        missing = [row for row, answer in answers.items() if not answer]
        whole = FITNESSES[split.fitness].reads == "texts" and split.positions == "text"
        if missing and not whole:
            own = self._own_answers(
                replace(split, examples=tuple(split.examples[row] for row in missing), harness=None)
            )
            answers |= dict(zip(missing, map(tuple, own.tokens), strict=True))
        return [(*tokenized.prompts[row], *answer) for row, answer in answers.items()]

    @torch.inference_mode()
    def continued(self, starts: Sequence[Tokens], limits: Sequence[int], rng: np.random.Generator) -> list[Tokens]:
        """Return token sequences with what the model continues them with, drawn from its predictions.

        Args:
            starts: Sequences of one token or more.
            limits: Most tokens to add to each, up to an end token, which is left out.
            rng: Source of the draws.
        """
        answers, empty = SampledAnswers(limits, self._ends, rng), np.zeros(0, np.int64)
        order = sorted(range(len(starts)), key=lambda row: len(starts[row]))
        equal = not self.forward.pads_left
        lengths = [len(starts[row]) + (0 if equal else limits[row]) for row in order]
        for part in decoded_together(lengths, self.config.batch_tokens, equal):
            decode(self.forward, dict.fromkeys(order[part], empty), starts, None, answers)
        return [(*start, *added) for start, added in zip(starts, answers.tokens, strict=True)]

    def divergences(self, split: PreparedSplit) -> NDArray[np.float64]:
        return self._compared(split, divergence)

    def agreements(self, split: PreparedSplit) -> NDArray[np.float64]:
        return self._compared(split, overlap)

    @torch.inference_mode()
    def _compared(self, split: PreparedSplit, compare: Callable[[Tensor, Tensor], Tensor]) -> NDArray[np.float64]:
        if not self._scorer.knows(split.fingerprint):
            raise ValueError(f"{split.task}/{split.split}: the unedited model's predictions were not remembered")
        return self._scorer.compare(split.fingerprint, compare)

    def _own_answers(self, split: PreparedSplit) -> DecodedAnswers:
        """Greedy answers up to the end token, a stop string or `max_new_tokens`."""
        return self._answers(split, lambda _, text: cut(text, split.matching.stop)[1])[0]

    def tokens_of(self, split: PreparedSplit) -> TokenizedSplit:
        """Return the tokens of a split, tokenised once."""
        if split.fingerprint not in self._tokenized:
            made = self._prompts.split(split)
            last = max(
                (token for tokens in chain(made.prompts, made.golds, *made.choices) for token in tokens), default=0
            )
            if last >= self._embedded:  # it would be an error of the device
                raise UserError(
                    f"task {split.task}, split {split.split}: a text has the token {self.token_text(last)!r} of id "
                    f"{last}, and the model has embeddings for ids below {self._embedded}; leave it out of the texts, "
                    "or use the weights' own tokenizer"
                )
            self._tokenized[split.fingerprint] = made
        return self._tokenized[split.fingerprint]

    def token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def _decoded(self, tokens: Tokens) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _read(
        self, batch: Batch, read: Sequence[NDArray[np.int64]], golds: Sequence[Tokens], cache: DynamicCache | None
    ) -> tuple[list[list[int]], NDArray[np.float64]]:
        """Run one pass over a batch's prompts and drafts, and fill `cache` unless it is None.

        `read` are the places of every example's last prompt token and draft tokens, and `golds` their gold answers.
        Returns the most likely token after each of these places, and the mean log-probability of every gold answer's
        tokens, float64 [examples].
        """
        places, index = np.unique(np.concatenate(read), return_inverse=True)
        logits = self.forward.logits(batch.columns, places, cache)
        starts = np.cumsum([0, *map(len, read)]).tolist()
        counts = [len(gold) for gold in golds]
        predicting = [start + offset for start, count in zip(starts, counts, strict=False) for offset in range(count)]
        logprobs = token_logprobs(logits, index[predicting].tolist(), [token for gold in golds for token in gold])
        means = sums_by_owner(logprobs, counts) / np.maximum(counts, 1)
        greedy = logits.argmax(dim=-1).cpu().numpy()[index].tolist()
        return [greedy[start:end] for start, end in pairwise(starts)], means
