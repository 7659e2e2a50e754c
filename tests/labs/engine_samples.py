"""What tests of an engine's numbers have in common: prompts of words, every question, and edits of all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from families import family_edit

from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.engine.engine import GenerationEngine
from moevolve.workers.methods.eep.edit import EepEdit

Numbers = list[Any]


def words_split(
    lengths: Sequence[int], common: int, endings: Sequence[int], choices: tuple[str, ...], most: int
) -> PreparedSplit:
    """Prompts of words with answers of 1 to 3 words.

    Args:
        lengths: words of the prompts.
        common, endings: further prompts begin with the same `common` words, and go on with so many each.
        choices: Choices that every prompt offers.
        most: tokens of an answer.
    """
    rng = np.random.default_rng(5)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(4, 60, size=count))

    beginning = words(common)
    prompts = [*map(words, lengths), *(f"{beginning} {words(count)}" for count in endings)]
    examples = tuple(Example(prompt, (words(1 + i % 3),), choices) for i, prompt in enumerate(prompts))
    return PreparedSplit("words", "search", "generate", "accuracy", Matching(), most, " ", examples)


def answers(engine: GenerationEngine, split: PreparedSplit) -> Numbers:
    """Texts and gold log-probabilities; some answers are decided before their end."""
    made = engine.generate(split, lambda _, text: text.startswith("w1"))
    return [made.texts, made.gold_logprobs.tolist()]


def ranks(engine: GenerationEngine, split: PreparedSplit) -> Numbers:
    """Log-probabilities of every prompt's choices."""
    return [[each.tolist() for each in engine.rank(split)]]


def others(engine: GenerationEngine, split: PreparedSplit) -> Numbers:
    """All else that an engine can be asked of a split that it remembers."""
    texts = [engine.text_logprobs(split), engine.divergences(split), engine.agreements(split)]
    return [*ranks(engine, split), *(each.tolist() for each in texts)]


def edit_of_family(family: str, kind: str, seed: int = 0) -> EepEdit:
    """An edit of any family of experts, see `edit_of_kind`, in a router space that it has."""
    return family_edit(family, kind, space="logits" if family == "gpt_oss" else "probs", seed=seed)
