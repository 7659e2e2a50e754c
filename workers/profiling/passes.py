"""The forward passes that scoring a model on a split takes, as sizes: what the engine would run, without a model.

What runs together is planned by the engine's own `Batcher`; passes are those of `GenerationEngine`, `ChoiceScorer` and
`TextScorer`, with every example run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from moevolve.workers.engine.choices import asked_sequences
from moevolve.workers.engine.columns import Layout
from moevolve.workers.engine.decoding import decoded_together, draft_lengths
from moevolve.workers.engine.tokenizing import TokenizedSplit, missing_bos, tokenize_split
from moevolve.workers.model.describe import meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEAST_VOCABULARY = 10


@dataclass(frozen=True, slots=True)
class SplitTokens:
    """The prompts and answers of a split as tokens.

    Attributes:
        fitness: name of how they are scored.
        prompts: per example.
        answers: per example: for a fitness that reads generations the gold answer's tokens that are fed along; for one
            that reads texts, the tokens behind the prompt.
        choices: per example every choice; read by a fitness that reads choices only.
        max_new_tokens: most that are generated.
    """

    fitness: str
    prompts: tuple[Tokens, ...] = field(repr=False)
    answers: tuple[Tokens, ...] = field(repr=False)
    choices: tuple[tuple[Tokens, ...], ...] = field(repr=False)
    max_new_tokens: int

    @classmethod
    def of_lengths(
        cls,
        fitness: str,
        prompts: Sequence[int],
        answers: Sequence[int],
        choices: Sequence[Sequence[int]],
        max_new_tokens: int,
    ) -> SplitTokens:
        """Where only lengths are known: tokens that no two prompts begin alike with."""
        return cls(
            fitness,
            tuple((i,) * length for i, length in enumerate(prompts)),
            tuple((0,) * length for length in answers),
            tuple(tuple((i,) * length for i, length in enumerate(lengths)) for lengths in choices),
            max_new_tokens,
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass, or several alike.

    Attributes:
        tokens: positions that run, padding included.
        real: positions that hold a token; feed-forward blocks run on these only (`moevolve.workers.engine.lean`).
        at_once: positions whose logits are made at once; None where they are made in chunks of a fixed size.
        cached: positions that are in the cache before it.
        kept: whether its keys and values are kept.
        steps: how many there are, each after all that the one before has cached.
        longest: tokens of the longest sequence, with those that are cached before, in the last step.
        beside: positions of another pass whose keys and values are still held.
    """

    tokens: int
    real: int
    at_once: int | None
    cached: int = 0
    kept: bool = False
    steps: int = 1
    longest: int = 0
    beside: int = 0


@dataclass(frozen=True, slots=True)
class Passes:
    """What one evaluation runs.

    Attributes:
        sure: passes that every candidate needs.
        decoding: passes of one column that finish the answers. A candidate needs none where its answers are decided by
            the pass over the gold answers, and all of them where each answer goes on to the last token; what lies
            between depends on the candidate.
    """

    sure: tuple[Pass, ...] = field(repr=False)
    decoding: tuple[Pass, ...] = field(default=(), repr=False)


class PromptMeter:
    """Measures splits with a model's own tokenizer."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        """Load the tokenizer.

        Args:
            model: whose config and tokenizer there must be; weights needn't.
            engine: truncation.

        Raises:
            UserError: there is no tokenizer.
        """
        self._tokenizer = load_tokenizer(model)
        if len(self._tokenizer) < _LEAST_VOCABULARY:
            # Some families' tokenizers load without any file, and know nothing but special tokens.
            raise UserError(f"model {model.path}: there is no tokenizer")
        self._bos = missing_bos(meta_model(model), self._tokenizer)
        self._engine = engine

    def wraps(self, split: PreparedSplit) -> bool:
        """Whether a split's prompts are wrapped in a chat template.

        Raises:
            UserError: there is no such template.
        """
        return split.chat and chat_template(self._tokenizer, self._engine) is not None

    def tokens(self, split: PreparedSplit) -> SplitTokens:
        """The tokens of a split.

        Raises:
            UserError: a prompt has no tokens.
        """
        tokenized = tokenize_split(self._tokenizer, split, self._engine, self._bos)
        return SplitTokens(
            split.fitness,
            tokenized.prompts,
            _answers(self._tokenizer, split, tokenized),
            tokenized.choices,
            split.max_new_tokens,
        )

    def texts(self, split: PreparedSplit) -> list[tuple[str, str, tuple[str, ...]]]:
        """Every prompt of a split, its right answer and its choices, as their tokens read; special tokens are kept.

        Raises:
            UserError: a prompt has no tokens.
        """
        tokenized = tokenize_split(self._tokenizer, split, self._engine, self._bos)
        return [
            (self._text(prompt), self._text(gold), tuple(map(self._text, choices)))
            for prompt, gold, choices in zip(tokenized.prompts, tokenized.golds, tokenized.choices, strict=True)
        ]

    def _text(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def most_tokens(self, split: PreparedSplit) -> int:
        """Of a split's prompts and answers, gold ones or, where there are none, those that the model gives.

        Raises:
            UserError: a prompt has no tokens.
        """
        tokenized = tokenize_split(self._tokenizer, split, self._engine, self._bos)
        pairs = zip(tokenized.prompts, tokenized.golds, strict=True)
        return sum(len(prompt) + (len(gold) or split.max_new_tokens) for prompt, gold in pairs)


def _answers(tokenizer: PreTrainedTokenizerBase, split: PreparedSplit, tokenized: TokenizedSplit) -> tuple[Tokens, ...]:
    fitness = FITNESSES[split.fitness]
    if fitness.reads != "generation":
        greedy = fitness.compares and split.positions == "greedy"
        return tuple((0,) * split.max_new_tokens if greedy else gold for gold in tokenized.golds)

    def text(tokens: Tokens) -> str:
        decoded = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(decoded, str)
        return decoded

    lengths = draft_lengths(tokenized.golds, split.max_new_tokens, fitness.decided(split), text)
    return tuple(gold[:length] for gold, length in zip(tokenized.golds, lengths, strict=True))


def passes_of(split: SplitTokens, batch_tokens: int, layout: Layout = "packed", caches: bool = True) -> Passes:
    """The passes of one evaluation.

    Args:
        split: what is evaluated.
        batch_tokens: `engine.batch_tokens`.
        layout: how the model lets sequences lie.
        caches: whether the model's cache can be gone on from; else prompts run again for decoding.

    Raises:
        ValueError: the fitness asks for what can't be planned.
    """
    batcher = Batcher(layout, batch_tokens, torch.device("cpu"))
    match FITNESSES[split.fitness].reads:
        case "generation":
            return _generating(split, batcher, caches, batch_tokens)
        case "choices":
            return Passes(tuple(_ranking(split, batcher)))
        case "texts":
            return Passes(tuple(_reading(split, batcher)))
        case "harness":
            raise ValueError(f"passes of {split.fitness} can't be planned")


def _generating(split: SplitTokens, batcher: Batcher, caches: bool, batch_tokens: int) -> Passes:
    sure, decoding = [], []
    steps = split.max_new_tokens - 1
    drafted = [(*prompt, *answer) for prompt, answer in zip(split.prompts, split.answers, strict=True)]
    for batch in batcher.batches(tuple((tokens,) for tokens in drafted)):
        paths = [batch.path(drafted[i])[len(split.prompts[i]) - 1 :] for i in batch.examples]
        read = len(np.unique(np.concatenate(paths)))
        kept = caches and steps > 0
        sure.append(_first(batch, read, kept))
        if steps > 0:
            lengths = [len(drafted[i] if caches else split.prompts[i]) for i in batch.examples]
            beside = batch.columns.ids.numel() if caches else 0
            for part in decoded_together(lengths, batch_tokens):
                decoding += _steps(lengths[part], steps, beside) if caches else _again(lengths[part], steps)
    return Passes(tuple(sure), tuple(decoding))


def _steps(lengths: Sequence[int], steps: int, beside: int = 0) -> list[Pass]:
    """Decoding, a token per sequence and step; sequences of these lengths are cached, and `beside` other columns."""
    rows, columns = len(lengths), max(lengths)
    return [Pass(rows, rows, rows, rows * columns, True, steps, columns + steps, beside)]


def _again(lengths: Sequence[int], steps: int) -> list[Pass]:
    """Decoding where nothing is cached: prompts of these lengths run again, with an answer's first token."""
    rows, columns = len(lengths), max(lengths) + 1
    again = Pass(rows * columns, sum(lengths) + rows, rows, 0, True, 1, columns)
    return [again, *_steps([columns] * rows, steps - 1)] if steps > 1 else [again]


def _ranking(split: SplitTokens, batcher: Batcher) -> Iterator[Pass]:
    groups = tuple(asked_sequences(*pair) for pair in zip(split.prompts, split.choices, strict=True))
    for batch in batcher.batches(groups):
        paths = [batch.path(asked)[len(split.prompts[i]) - 1 :] for i in batch.examples for asked in groups[i]]
        yield _first(batch, len(np.unique(np.concatenate(paths))))


def _reading(split: SplitTokens, batcher: Batcher) -> Iterator[Pass]:
    """Texts, whose logits are made in chunks."""
    texts = [(*prompt, *answer)[:-1] for prompt, answer in zip(split.prompts, split.answers, strict=True)]
    for batch in batcher.batches(tuple((text,) for text in texts)):
        yield _first(batch, None)


def _first(batch: Batch, at_once: int | None, kept: bool = False) -> Pass:
    columns = batch.columns
    tokens = columns.ids.numel()
    real = tokens if columns.mask is None else sum(columns.lengths)
    return Pass(tokens, real, at_once, 0, kept, 1, max(columns.lengths))
