"""What a model is asked and what is scored of its answer, as its tokens say it; no weights are needed."""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.search.operations.evaluate import prepared_split
from moevolve.search.operations.subject import find_subject
from moevolve.search.requests import PromptsRequest
from moevolve.store.reader import StoreReader
from moevolve.workers.profiling.passes import PromptMeter


@dataclass(frozen=True, slots=True)
class AskedRow:
    """One example of a split, special tokens and truncation included.

    Attributes:
        row: its number in the split, from 0.
        prompt: what the model is given before it answers.
        gold: the right answer as it follows the prompt, whose log-probability is taken; empty where there is none.
        choices: likewise for every choice; empty where answers are open.
    """

    row: int
    prompt: str
    gold: str
    choices: tuple[str, ...]


def prompts(store: StoreReader, request: PromptsRequest) -> list[AskedRow]:
    """See `PromptsRequest`."""
    subject = find_subject(store, request.individual, request.search, request.model, weights=False)
    prepared = prepared_split(subject, request.task, request.split)
    meter = PromptMeter(subject.config.model, subject.config.engine)
    texts = meter.texts(prepared if request.limit is None else prepared.head(request.limit))
    return [AskedRow(row, *text) for row, text in enumerate(texts)]
