"""Predicts the sizes of the forward passes that the engine needs to score a split, without running a model.

Batches are planned by the engine's `Batcher`, and the passes are those of `GenerationEngine`, `score_choices` and
`TextScorer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.checkpoints.loading import load_tokenizer
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.batches import Batch, Batcher
from moevolve.workers.engine.chat import chat_template
from moevolve.workers.engine.columns import Layout
from moevolve.workers.engine.decoding import decoded_together, draft_lengths
from moevolve.workers.engine.texts import choice_sequences
from moevolve.workers.engine.tokenizing import PromptTokenizer, TokenizedSplit
from moevolve.workers.model.describe import meta_model


@dataclass(frozen=True, slots=True)
class SplitTokens:
    """The tokens of a split's prompts and answers.

    Attributes:
        answers: Tokens that are run after every prompt: the draft of the gold answer if the fitness reads generations,
            the rest of the text if it reads texts.
    """

    fitness: str
    prompts: tuple[Tokens, ...] = field(repr=False)
    answers: tuple[Tokens, ...] = field(repr=False)
    choices: tuple[tuple[Tokens, ...], ...] = field(repr=False)
    max_new_tokens: int

    @property
    def read(self) -> int:
        """Number of tokens of prompts and answers."""
        return sum(map(len, (*self.prompts, *self.answers)))

    @classmethod
    def of_lengths(
        cls,
        fitness: str,
        prompts: Sequence[int],
        answers: Sequence[int],
        choices: Sequence[Sequence[int]],
        max_new_tokens: int,
    ) -> SplitTokens:
        """Make up tokens for sequences of known lengths, such that no two prompts share a prefix."""
        return cls(
            fitness,
            tuple((i,) * length for i, length in enumerate(prompts)),
            tuple((0,) * length for length in answers),
            tuple(tuple((i,) * length for i, length in enumerate(lengths)) for lengths in choices),
            max_new_tokens,
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass, or several consecutive ones of equal size.

    Attributes:
        tokens: Positions that are run, including padding.
        at_once: Positions whose logits are computed at once; None if they are computed in chunks of a fixed size.
        cached: Positions in the KV cache before the first pass.
        longest: Tokens of the longest sequence in the last pass, including cached ones.
        retained: Positions in the KV cache of another pass that is still in memory.
        compares: True if logits are compared with the unedited model's.
    """

    tokens: int
    at_once: int | None
    cached: int = 0
    kept: bool = False
    steps: int = 1
    longest: int = 0
    retained: int = 0
    compares: bool = False


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward passes of one evaluation.

    Attributes:
        required: Passes that every candidate needs.
        decoding: Passes of one column that decode the answers. A candidate needs none of them if all its answers are
            decided by the pass over gold answers, and all of them if each answer has the maximum length.
    """

    required: tuple[Pass, ...] = field(repr=False)
    decoding: tuple[Pass, ...] = field(default=(), repr=False)


class PromptMeter:
    """Tokenises splits as a worker does. The checkpoint needs a config and a tokenizer, but no weights.

    Raises:
        UserError: The checkpoint has no tokenizer. Methods raise it for a prompt without tokens, and for a chat
            template that is unknown or refuses a prompt.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self._tokenizer = load_tokenizer(model)
        # Tokenizers of some families load without any file, with only special tokens.
        if len(self._tokenizer) < 10:
            raise UserError(f"model {model.path} has no tokenizer; add its files to the folder")
        self._prompts = PromptTokenizer.of(meta_model(model), self._tokenizer, engine)
        self._engine = engine

    def wraps(self, split: PreparedSplit) -> bool:
        """Return whether a split's prompts are wrapped in a chat template."""
        return split.chat and chat_template(self._tokenizer, self._engine) is not None

    def tokens(self, split: PreparedSplit) -> SplitTokens:
        tokenized = self._tokenized(split)
        answers = self._answers(split, tokenized.golds)
        return SplitTokens(split.fitness, tokenized.prompts, answers, tokenized.choices, split.max_new_tokens)

    def texts(self, split: PreparedSplit) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return every prompt, gold answer and choices of a split, decoded from their tokens with special tokens."""
        tokenized = self._tokenized(split)
        return [
            (self._text(prompt), self._text(gold), tuple(map(self._text, choices)))
            for prompt, gold, choices in zip(tokenized.prompts, tokenized.golds, tokenized.choices, strict=True)
        ]

    def prompts_cut(self, split: PreparedSplit) -> int:
        """Return the number of prompts that are cut for the model's context."""
        return self._tokenized(split).cut

    def most_tokens(self, split: PreparedSplit) -> int:
        """Return the maximum number of tokens of a split's prompts with their gold or else generated answers."""
        tokenized = self._tokenized(split)
        pairs = zip(tokenized.prompts, tokenized.golds, strict=True)
        return sum(len(prompt) + (len(gold) or split.max_new_tokens) for prompt, gold in pairs)

    def _tokenized(self, split: PreparedSplit) -> TokenizedSplit:
        return self._prompts.split(split)

    def _answers(self, split: PreparedSplit, golds: Sequence[Tokens]) -> tuple[Tokens, ...]:
        fitness = FITNESSES[split.fitness]
        if fitness.reads != "generation":
            greedy = fitness.compares and split.positions == "greedy"
            return tuple((0,) * split.max_new_tokens if greedy else gold for gold in golds)
        lengths = draft_lengths(golds, split.max_new_tokens, fitness.decided(split), partial(self._text, plain=True))
        return tuple(gold[:length] for gold, length in zip(golds, lengths, strict=True))

    def _text(self, tokens: Tokens, plain: bool = False) -> str:
        """Decode tokens, without special tokens if `plain`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=plain, clean_up_tokenization_spaces=False))


def passes_of(split: SplitTokens, batch_tokens: int, layout: Layout = "packed", caches: bool = True) -> Passes:
    """Plan the passes of one evaluation. Those of lm-eval's fitness can't be planned.

    With `caches` decoding continues from the KV cache; otherwise prompts run again.
    """
    batcher = Batcher(layout, batch_tokens, torch.device("cpu"))
    reads = FITNESSES[split.fitness].reads
    if reads == "generation":
        return _generating(split, batcher, caches, batch_tokens)
    return Passes(tuple(_ranking(split, batcher) if reads == "choices" else _reading(split, batcher)))


def _generating(split: SplitTokens, batcher: Batcher, caches: bool, batch_tokens: int) -> Passes:
    required, decoding = [], []
    steps = split.max_new_tokens - 1
    drafted = [(*prompt, *answer) for prompt, answer in zip(split.prompts, split.answers, strict=True)]
    for batch in batcher.batches(tuple((tokens,) for tokens in drafted)):
        paths = [batch.path(drafted[i])[len(split.prompts[i]) - 1 :] for i in batch.examples]
        read = len(np.unique(np.concatenate(paths)))
        kept = caches and steps > 0
        required.append(_first(batch, read, kept))
        if steps > 0:
            lengths = [len(drafted[i] if caches else split.prompts[i]) for i in batch.examples]
            retained = batch.columns.ids.numel() if caches else 0
            for part in decoded_together(lengths, batch_tokens):
                decoding += _steps(lengths[part], steps, retained) if caches else _again(lengths[part], steps)
    return Passes(tuple(required), tuple(decoding))


def _steps(lengths: Sequence[int], steps: int, retained: int = 0) -> list[Pass]:
    """Decoding steps after sequences of these lengths, and `retained` columns of another pass, in the KV cache."""
    rows, columns = len(lengths), max(lengths)
    return [Pass(rows, rows, rows * columns, True, steps, columns + steps, retained)]


def _again(lengths: Sequence[int], steps: int) -> list[Pass]:
    """Decoding without a KV cache: prompts of these lengths run again, with an answer's first token."""
    rows, columns = len(lengths), max(lengths) + 1
    again = Pass(rows * columns, rows, 0, True, 1, columns)
    return [again, *_steps([columns] * rows, steps - 1)] if steps > 1 else [again]


def _ranking(split: SplitTokens, batcher: Batcher) -> Iterator[Pass]:
    groups = tuple(choice_sequences(*pair) for pair in zip(split.prompts, split.choices, strict=True))
    for batch in batcher.batches(groups):
        paths = [batch.path(asked)[len(split.prompts[i]) - 1 :] for i in batch.examples for asked in groups[i]]
        yield _first(batch, len(np.unique(np.concatenate(paths))))


def _reading(split: SplitTokens, batcher: Batcher) -> Iterator[Pass]:
    """Passes over whole texts, whose logits are computed in chunks."""
    texts = [(*prompt, *answer)[:-1] for prompt, answer in zip(split.prompts, split.answers, strict=True)]
    for batch in batcher.batches(tuple((text,) for text in texts)):
        yield replace(_first(batch, None), compares=FITNESSES[split.fitness].compares)


def _first(batch: Batch, at_once: int | None, kept: bool = False) -> Pass:
    columns = batch.columns
    return Pass(columns.ids.numel(), at_once, 0, kept, 1, columns.places.shape[1])
