"""The forward passes that scoring a model on a split takes, as sizes: what the engine would run, without a model.

What runs together is planned by the engine's own `plan_batches`; passes are those of `GenerationEngine`, `ChoiceScorer`
and `TextScorer`, with every example run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.matching import make_matcher
from moevolve.evaluators.types import COMPARING_KINDS, FitnessKind, Positions, PreparedSplit
from moevolve.workers.answers import draft_lengths
from moevolve.workers.batching import TokenizedSplit, Tokens, missing_bos, tokenize_split
from moevolve.workers.config import EngineConfig, ModelConfig
from moevolve.workers.facts import meta_model
from moevolve.workers.loading import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LEAST_VOCABULARY = 10


@dataclass(frozen=True, slots=True)
class SplitLengths:
    """How long the prompts and answers of a split are, in tokens.

    Attributes:
        fitness: how they are scored.
        prompts: per example.
        answers: per example: with `generate` the gold answer's tokens that are fed along; with fitness kinds that read
            a text, the tokens behind the prompt.
        choices: per example the tokens of every choice; read by `rank` only.
        max_new_tokens: most that `generate` generates.
        positions: what `kl` and `agreement` compare.
    """

    fitness: FitnessKind
    prompts: tuple[int, ...] = field(repr=False)
    answers: tuple[int, ...] = field(repr=False)
    choices: tuple[tuple[int, ...], ...] = field(repr=False)
    max_new_tokens: int
    positions: Positions = "text"


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over a padded batch, or several alike.

    Attributes:
        rows, columns: of the batch.
        cached: columns that are in the cache before it.
        real: positions that hold a token; feed-forward blocks run on these only (`moevolve.workers.lean`).
        read: of these, positions that the last layer's block runs on.
        logits: positions whose logits are computed, in all.
        at_once: of these, most at once.
        kept: whether its keys and values are kept.
        steps: how many there are, each one cached column more than the one before.
    """

    rows: int
    columns: int
    cached: int
    real: int
    read: int
    logits: int
    at_once: int
    kept: bool = False
    steps: int = 1

    @property
    def pairs(self) -> int:
        """Pairs of positions of which one attends to the other, padding and masked ones included, in all steps."""
        attended = self.steps * (self.cached + self.columns) + self.steps * (self.steps - 1) // 2
        return self.rows * self.columns * attended


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

    def lengths(self, split: PreparedSplit) -> SplitLengths:
        """The lengths of a split.

        Raises:
            UserError: a prompt has no tokens.
        """
        tokenized = tokenize_split(self._tokenizer, split, self._engine, self._bos)
        return SplitLengths(
            split.fitness,
            tuple(map(len, tokenized.prompts)),
            _answers(self._tokenizer, split, tokenized),
            tuple(tuple(map(len, choices)) for choices in tokenized.choices),
            split.max_new_tokens,
            split.positions,
        )


def _answers(tokenizer: PreTrainedTokenizerBase, split: PreparedSplit, tokenized: TokenizedSplit) -> tuple[int, ...]:
    if split.fitness != "generate":
        greedy = split.fitness in COMPARING_KINDS and split.positions == "greedy"
        return tuple(split.max_new_tokens if greedy else len(gold) for gold in tokenized.golds)
    matcher = make_matcher(split.matching)

    def text(tokens: Tokens) -> str:
        decoded = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(decoded, str)
        return decoded

    def decided(example: int, answer: str) -> bool:
        return matcher.decided(answer, split.examples[example])

    return draft_lengths(tokenized.golds, split.max_new_tokens, decided, text)


def passes_of(lengths: SplitLengths, batch_tokens: int, caches: bool = True) -> Passes:
    """The passes of one evaluation.

    Args:
        lengths: of the split.
        batch_tokens: `engine.batch_tokens`.
        caches: whether the model's cache can be gone on from; else prompts run again for decoding.
    """
    if lengths.fitness == "generate":
        return _generating(lengths, batch_tokens, caches)
    if lengths.fitness == "rank":
        return _ranking(lengths, batch_tokens)
    return Passes(tuple(_reading(lengths, batch_tokens)))


def _generating(lengths: SplitLengths, batch_tokens: int, caches: bool) -> Passes:
    sure, decoding = [], []
    steps = lengths.max_new_tokens - 1
    for batch in plan_batches(lengths.prompts, lengths.answers, batch_tokens):
        prompts, drafts = [lengths.prompts[i] for i in batch], [lengths.answers[i] for i in batch]
        rows, columns = len(batch), max(prompts) + max(drafts)
        read = rows + sum(drafts)
        kept = caches and steps > 0
        sure.append(Pass(rows, columns, 0, sum(prompts) + sum(drafts), read, read, read, kept))
        if steps > 0:
            if not caches:
                decoding.append(Pass(rows, columns, 0, sum(prompts) + rows, rows, rows, rows, True))
            decoding.append(Pass(rows, 1, columns, rows, rows, rows, rows, True, steps))
    return Passes(tuple(sure), tuple(decoding))


def _ranking(lengths: SplitLengths, batch_tokens: int) -> Passes:
    sure = []
    for batch in plan_batches(lengths.prompts, [0] * len(lengths.prompts), batch_tokens):
        prompts = [lengths.prompts[i] for i in batch]
        rows, columns = len(batch), max(prompts)
        chosen = [length for i in batch for length in lengths.choices[i]]
        longer = sorted(length for length in chosen if length > 1)
        sure.append(Pass(rows, columns, 0, sum(prompts), rows, rows, rows, bool(longer)))
        step = max(1, batch_tokens // (columns + max(chosen, default=1) - 1))
        for start in range(0, len(longer), step):
            part = longer[start : start + step]
            width = max(part) - 1
            real = sum(part) - len(part)
            logits = len(part) * width
            sure.append(Pass(len(part), width, columns, real, real, logits, logits, True))
    return Passes(tuple(sure))


def _reading(lengths: SplitLengths, batch_tokens: int) -> Sequence[Pass]:
    """Texts: the logits of what is read, those of the unedited model again where predictions are compared."""
    compares = lengths.fitness in COMPARING_KINDS
    texts = [prompt + answer for prompt, answer in zip(lengths.prompts, lengths.answers, strict=True)]
    whole = not compares or lengths.positions == "text"
    counts = [text - 1 if whole else answer for text, answer in zip(texts, lengths.answers, strict=True)]
    passes = []
    for batch in plan_batches(texts, [0] * len(texts), batch_tokens):
        rows, columns = len(batch), max(texts[i] for i in batch)
        keep = max(counts[i] for i in batch) + 1
        read = sum(min(texts[i], keep) for i in batch)
        positions = sum(counts[i] for i in batch)
        logits = positions * (2 if compares else 1) + rows
        passes.append(Pass(rows, columns, 0, sum(texts[i] for i in batch), read, logits, positions))
    return passes
