"""What a model is asked and what is scored of its answer, as its tokens say it; no weights are needed."""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.evaluators.types import Split
from moevolve.search.service.evaluate import prepared_split
from moevolve.search.service.subject import find_subject
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


def prompts(
    store: StoreReader,
    reference: str,
    task: str,
    split: Split,
    limit: int | None = None,
    search: str | None = None,
    model: str | None = None,
) -> list[AskedRow]:
    """What is asked and scored where an individual, or its full model, is evaluated on one split of a task.

    Args:
        store: where the individual is.
        reference: `SEARCH:INDEX`, or `full`.
        task: any task.
        split: one of its splits.
        limit: most rows, from the first on.
        search, model: as `find_subject` has them.

    Raises:
        StoreError: no such individual or search.
        UserError: unknown task or split, or there is no tokenizer; as `find_subject`.
    """
    subject = find_subject(store, reference, search, model, weights=False)
    prepared = prepared_split(subject, task, split)
    meter = PromptMeter(subject.config.model, subject.config.engine)
    texts = meter.texts(prepared if limit is None else prepared.head(limit))
    return [AskedRow(row, *text) for row, text in enumerate(texts)]
