"""The final table of a search from stored evaluations alone, and what would fill its gaps."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moevolve.evaluators.types import SPLITS, Split
from moevolve.search.config import RunConfig, StoredConfig
from moevolve.search.evaluation import FULL, interval
from moevolve.search.finalise import BEST_LABEL, FULL_LABEL, START_LABEL
from moevolve.search.ranking_values import weighted_means
from moevolve.store.records import FULL_MODEL, EvaluationRecord, HistoryRow, IndividualDetail, SearchRecord
from moevolve.store.repository import Store


@dataclass(frozen=True, slots=True)
class Cell:
    """A score in [0, 1] with its bounds, or why there is none.

    Attributes:
        low, high: 95 % interval over examples; of a mean over draws, the mean less and plus one standard deviation.
        spread: that standard deviation; None for a single model.
        failure: reason; score and bounds mean nothing then.
    """

    score: float
    low: float
    high: float
    examples: int
    spread: float | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant.

    Attributes:
        label: what it is.
        ref: `search:index`; None for the full model and for means over draws.
        cells: by task and split; pairs that nothing was measured for are left out.
        parameters, parameters_full: of its model and of the unedited one; None as long as there is no individual.
        summary: of its genome.
    """

    label: str
    ref: str | None
    cells: dict[tuple[str, str], Cell] = field(repr=False)
    parameters: int | None
    parameters_full: int | None
    summary: str = ""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that the final table lacks, and the command that would fill it."""

    what: str
    command: str


@dataclass(frozen=True)
class Standings:
    """The final table.

    Attributes:
        tasks: names, as configured.
        others: names of tasks that the best was tested on, too, and which it was not searched on.
        rows: full model, random draws, the method's start, the best; those that there are.
        gaps: what wasn't measured.
        winner: the best found.
        reranked: whether `dev` picked it.
    """

    tasks: tuple[str, ...]
    others: tuple[str, ...]
    rows: tuple[Row, ...]
    gaps: tuple[Gap, ...]
    winner: IndividualDetail | None
    reranked: bool


class Scorer:
    """Stored evaluations of one search, found by phenotype, on the search's own versions of its task splits.

    Attributes:
        tasks: names, as configured.
        names: what the configuration calls each task, for commands.
    """

    def __init__(self, store: Store, search: SearchRecord, config: StoredConfig) -> None:
        self._store, self._search = store, search
        records = store.search_tasks(search.id)
        self.tasks = tuple(dict.fromkeys(record.task for record in records))
        weights = {record.task: record.weight for record in records}
        self.weights = tuple(weights[task] for task in self.tasks)
        sections = config.tasks if isinstance(config, RunConfig) else ()
        self.names = dict(zip(self.tasks, (section.name for section in sections), strict=False))
        self._fingerprints = {(record.task, record.split): record.task_fingerprint for record in records}

    def learn(self, evaluations: Sequence[EvaluationRecord]) -> None:
        """Take over splits that the search doesn't have itself: a `test` evaluated by hand, or of another task."""
        for record in sorted(evaluations, key=lambda one: (one.created_at is None, one.created_at)):
            if record.task in self.tasks or record.split == "test":
                self._fingerprints.setdefault((record.task, record.split), record.task_fingerprint)

    @property
    def others(self) -> tuple[str, ...]:
        """Tasks that were not searched on (`final.held_out`, or evaluated by hand), by name."""
        return tuple(sorted({task for task, _ in self._fingerprints} - set(self.tasks)))

    def find(self, phenotypes: Sequence[str]) -> dict[tuple[str, str, str], EvaluationRecord]:
        """(phenotype, task, split) -> evaluation."""
        search, wanted = self._search, sorted(set(self._fingerprints.values()))
        found = self._store.evaluations(phenotypes, search.model_fingerprint, search.engine_fingerprint, wanted)
        return {
            (one.phenotype_hash, one.task, one.split): one
            for one in found
            if self._fingerprints.get((one.task, one.split)) == one.task_fingerprint
        }

    def cells(self, phenotype: str) -> dict[tuple[str, str], Cell]:
        """Of a single model, by task and split."""
        return {(task, split): _cell(record) for (_, task, split), record in self.find([phenotype]).items()}

    def mean_cells(self, rows: Sequence[HistoryRow]) -> dict[tuple[str, str], Cell]:
        """Means over individuals; a failed one scores nothing. A split that one of them lacks is left out."""
        found = self.find([row.phenotype_hash for row in rows])
        cells: dict[tuple[str, str], Cell] = {}
        for task, split in sorted(self._fingerprints):
            records = [found.get((row.phenotype_hash, task, split)) for row in rows]
            values = [
                0.0 if row.status == "failed" else None if record is None else record.score or 0.0
                for row, record in zip(rows, records, strict=True)
            ]
            known = [value for value in values if value is not None]
            if rows and len(known) == len(values) and any(record is not None for record in records):
                mean, spread = float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
                examples = max(record.examples_seen for record in records if record is not None)
                cells[task, split] = Cell(mean, mean - spread, mean + spread, examples, spread)
        return cells

    def weighted(self, phenotype: str, split: Split) -> tuple[float, float] | None:
        """Mean score and gold log-probability over the tasks; None where one is missing or failed."""
        found = self.find([phenotype])
        records = [found.get((phenotype, task, split)) for task in self.tasks]
        complete = tuple(record for record in records if record is not None and record.failure is None)
        return weighted_means(complete, self.weights) if complete and len(complete) == len(records) else None


def _cell(record: EvaluationRecord) -> Cell:
    if record.score is None:
        return Cell(0.0, 0.0, 0.0, record.examples_seen, failure=record.failure)
    if not record.outcomes:
        return Cell(record.score, record.score, record.score, record.examples_seen)
    return Cell(record.score, *interval(record), record.examples_seen)


def standings(store: Store, search: SearchRecord, config: StoredConfig, history: Sequence[HistoryRow]) -> Standings:
    """The final table of a search, as far as the store holds it.

    Args:
        store: where the search is.
        search: finished or not.
        config: its configuration.
        history: its individuals.
    """
    scorer = Scorer(store, search, config)
    winner, reranked = find_winner(store, search, config, scorer)
    if winner is not None:
        scorer.learn(winner.evaluations)
    whole = None if not history else store.individual(f"{search.name}:{history[0].index}").individual.parameters_full
    rows = [Row(FULL_LABEL, None, scorer.cells(FULL_MODEL), whole, whole)]
    draws = _draws(config, history)
    if draws:
        first = store.individual(f"{search.name}:{draws[0].index}").individual
        label = f"{config.genome.random_title}, {len(draws)} draws"
        rows.append(Row(label, None, scorer.mean_cells(draws), first.parameters, whole))
    if history and history[0].operator == "start" and history[0].status == "ok":
        start = store.individual(f"{search.name}:{history[0].index}")
        rows.append(_row(START_LABEL, start, scorer))
    if winner is not None:
        rows.append(_row(BEST_LABEL, winner, scorer))
    gaps = tuple(_gaps(search, scorer, rows))
    return Standings(scorer.tasks, scorer.others, tuple(rows), gaps, winner, reranked)


def _row(label: str, detail: IndividualDetail, scorer: Scorer) -> Row:
    one = detail.individual
    return Row(
        label, detail.ref, scorer.cells(one.phenotype_hash), one.parameters, one.parameters_full, summary=one.summary
    )


def find_winner(
    store: Store, search: SearchRecord, config: StoredConfig, scorer: Scorer
) -> tuple[IndividualDetail | None, bool]:
    """What the end of the search would pick, or has: the best on `dev` among the best few by fitness."""
    rerank = config.final.rerank if isinstance(config, RunConfig) else 0
    leaders = store.best_of_search(search.id, max(1, rerank))
    if not leaders:
        return None, False
    chosen, reranked = leaders[0], False
    if rerank:
        measured = [(scorer.weighted(row.phenotype_hash, "dev"), row) for row in leaders]
        ranked = [(-found[0], -found[1], row.index, row) for found, row in measured if found is not None]
        if ranked:
            chosen, reranked = min(ranked, key=lambda entry: entry[:3])[3], True
    return store.individual(f"{search.name}:{chosen.index}"), reranked


def _draws(config: StoredConfig, history: Sequence[HistoryRow]) -> list[HistoryRow]:
    """The random individuals that the final table is about, see `FinalSection`; without that setting, all of them."""
    drawn = [row for row in history if row.operator == "random" and row.status != "pending"]
    count = config.final.random_draws if isinstance(config, RunConfig) else 0
    return drawn[: count or len(drawn)]


def _gaps(search: SearchRecord, scorer: Scorer, rows: Sequence[Row]) -> list[Gap]:
    """What a complete table has and this one hasn't: `search` and `test` of all, `dev` of the best."""
    if search.status != "finished":
        whole = f"whatever is left of the search (it is {search.status}), and its final scores"
        return [Gap(whole, f"moevolve resume {shlex.quote(search.name)}")]
    gaps = []
    for row in rows:
        single = row.ref is not None or row.label == FULL_LABEL
        if not single:
            continue
        splits: tuple[Split, ...] = SPLITS if row.label == BEST_LABEL else ("search", "test")
        for task in scorer.tasks:
            for split in splits:
                if (task, split) not in row.cells:
                    subject = f"{FULL} --search {shlex.quote(search.name)}" if row.ref is None else shlex.quote(row.ref)
                    name = shlex.quote(scorer.names.get(task, task))
                    command = f"moevolve evaluate {subject} --task {name} --split {split}"
                    gaps.append(Gap(f"{row.label} on {task}, {split}", command))
    return gaps
