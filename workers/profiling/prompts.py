"""Tokenises the prompts and answers of a split as a worker does, to count or to show them without loading a model."""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.checkpoints.loading import load_tokenizer
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.chat import chat_template
from moevolve.workers.engine.tokenizing import PromptTokenizer
from moevolve.workers.model.describe import meta_model


@dataclass(frozen=True, slots=True)
class PromptCounts:
    """The prompts of a split in numbers.

    Attributes:
        prompts: Number of prompts, or of windows of running text.
        tokens: Number of tokens of all prompts with their gold answers, or with as many as may be generated.
        longest: Largest number of tokens of a prompt with one of its answers.
        cut: Number of prompts that are cut for the model's context.
    """

    prompts: int
    tokens: int
    longest: int
    cut: int = 0


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
        return split.chat is True and chat_template(self._tokenizer, self._engine) is not None

    def prompts(self, split: PreparedSplit) -> tuple[Tokens, ...]:
        """Return the prompts of a split, cut for the model's context."""
        return self._prompts.split(split).prompts

    def counts(self, split: PreparedSplit) -> PromptCounts:
        found = self._prompts.split(split)
        generated = split.max_new_tokens if split.window is None else 0
        decoded = 0 if FITNESSES[split.fitness].reads in ("texts", "choices") else generated
        tokens = longest = 0
        for prompt, gold, choices in zip(found.prompts, found.golds, found.choices, strict=True):
            answer = len(gold) or generated
            tokens += len(prompt) + answer
            longest = max(longest, len(prompt) + max(answer, decoded, *map(len, choices)))
        return PromptCounts(len(found.prompts), tokens, longest, found.cut)

    def texts(self, split: PreparedSplit) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return every prompt, gold answer and choices of a split, decoded from their tokens with special tokens."""
        found = self._prompts.split(split)
        return [
            (self._text(prompt), self._text(gold), tuple(map(self._text, choices)))
            for prompt, gold, choices in zip(found.prompts, found.golds, found.choices, strict=True)
        ]

    def _text(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
