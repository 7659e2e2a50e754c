"""The end of a search: its winner and final table, from stored evaluations alone, and the evaluations they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.types import Split, SplitRef
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.phases import START
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.scores import ModelScores, Score, SearchScores, compare, mean_score, ranking_of
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.strategies.base import rank_key
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, IndividualRecord, SearchRecord
from moevolve.workers.contract.facts import DTYPE_BYTES
from moevolve.workers.contract.messages import EvaluationRequest

FULL_LABEL = "full model"
START_LABEL = "unsearched start"
BEFORE_LABEL = "best before repair"
BEST_LABEL = "best found"

# p-value above which two candidates count as equally good.
EQUAL_P = 0.05


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of a final table.

    Attributes:
        ref: `search:index` of an individual; None for the full model and for means over draws.
        scores: One score per task and evaluated split.
        parameters: Number of parameters; None if it isn't stored yet.
        active_parameters: Number of parameters used per token; None if it isn't stored yet.
        draws: Number of random individuals in the mean; 0 for a single model.
        phenotype: Phenotype hash of the evaluations; None for means over draws.
    """

    __repr__ = short_repr

    label: str
    ref: str | None
    scores: tuple[Score, ...] = field(repr=False)
    parameters: int | None
    active_parameters: int | None
    summary: str = ""
    draws: int = 0
    phenotype: str | None = field(default=None, repr=False)

    def score(self, task: str, split: Split) -> Score | None:
        """Return the score on one split of one task; None if it isn't evaluated."""
        return next((each for each in self.scores if (each.task, each.split) == (task, split)), None)


@dataclass(frozen=True)
class FinalTable:
    """The winner and the final table of a search.

    Attributes:
        tasks: Names of the tasks of the fitness, as configured.
        others: Names of further tasks with a score on `test`.
        entries: The full model, the mean of random draws if configured, the method's unsearched start if it has one,
            the one-shot baselines that phases begin with, the best before a repair phase, and the winner, if any.
        winner: `search:index` of the best individual; None without one.
        reranked: True if scores on `dev` picked the winner.
        parameters_full: Number of parameters of the unedited model; None before the first individual.
        dtype_bytes: Bytes per parameter; None for dtype `auto` if the checkpoint's own isn't stored.
    """

    __repr__ = short_repr

    search: str
    tasks: tuple[str, ...]
    others: tuple[str, ...]
    entries: tuple[Entry, ...]
    winner: str | None
    reranked: bool
    parameters_full: int | None
    dtype_bytes: int | None

    @property
    def full(self) -> Entry:
        return self.entries[0]

    @property
    def best(self) -> Entry | None:
        return None if self.winner is None else self.entries[-1]

    def weight_bytes(self, parameters: int | None) -> int | None:
        """Return the size of so many parameters in bytes; None if it isn't known."""
        return None if parameters is None or self.dtype_bytes is None else parameters * self.dtype_bytes


def build_final_table(
    store: StoreReader,
    search: SearchRecord,
    config: RunConfig,
    history: Sequence[IndividualRecord],
) -> FinalTable:
    """Return the winner and the final table, from the evaluations that are stored.

    Args:
        store: Store of the search.
        search: Record of the search, which may be unfinished.
        config: Its configuration.
        history: Its individuals, in order of index.
    """
    scores = SearchScores(store, search)
    winner, reranked = winner_of(store, search, config)

    def single(label: str, row: IndividualRecord) -> Entry:
        detail = store.individual(f"{search.name}:{row.index}")
        if label == BEST_LABEL:
            scores.learn(detail.evaluations)
        one, (model,) = detail.individual, scores.of([row.phenotype_hash])
        sizes = one.parameters, one.active_parameters
        return Entry(label, detail.ref, model.scores, *sizes, one.summary, phenotype=row.phenotype_hash)

    best = None if winner is None else single(BEST_LABEL, winner)  # first, because it adds splits to the scores
    whole, active = (history[0].parameters_full, history[0].active_parameters_full) if history else (None, None)
    (full,) = scores.of([FULL_MODEL])
    entries = [Entry(FULL_LABEL, None, full.scores, whole, active, phenotype=FULL_MODEL)]
    draws = random_draws(config, history)
    if draws:
        first = store.individual(f"{search.name}:{draws[0].index}").individual
        label, sizes = f"{config.genome.random_title}, {len(draws)} draws", (first.parameters, first.active_parameters)
        models = drawn(scores, draws)
        # Means on the splits on which all draws were evaluated, without intervals.
        means = (mean_score(models, split, task) for task, split in models[0].weights)
        shown = tuple(replace(score, low=None, high=None) for score in means if score is not None)
        entries.append(Entry(label, None, shown, *sizes, draws=len(draws)))
    entries += [single(label, row) for label, row in auxiliary_entries(config, history, winner)]
    entries += [] if best is None else [best]
    return FinalTable(
        search=search.name,
        tasks=tuple(scores.tasks),
        others=scores.others,
        entries=tuple(entries),
        winner=None if best is None else best.ref,
        reranked=reranked,
        parameters_full=whole,
        dtype_bytes=DTYPE_BYTES.get(config.model.parameter_dtype),
    )


def winner_of(store: StoreReader, search: SearchRecord, config: RunConfig) -> tuple[IndividualRecord | None, bool]:
    """Return the individual that wins the search, and whether scores on `dev` picked it.

    The `final.rerank` best by fitness are ranked again by their scores on `dev` without penalties, as
    `task_aggregation` and `tie_break` say, then by index; those that failed there can't win. Among those that a paired
    test of their scores can't tell apart from the first, one with a stock checkpoint wins, then the smaller, by whole
    percents of the full model's parameters. Without reranking, or if some aren't evaluated on `dev` yet or all failed
    there, the best by fitness wins.
    """
    rerank = config.final.rerank
    leaders = store.best_of_search(search.id, max(1, rerank))
    scores = SearchScores(store, search)
    ranked = ranked_on_dev(scores, config, leaders) if rerank and leaders else None
    return (preferred(scores, config, ranked), True) if ranked else (leaders[0] if leaders else None, False)


def ranked_on_dev(
    scores: SearchScores, config: RunConfig, rows: Sequence[IndividualRecord]
) -> list[IndividualRecord] | None:
    """Return the individuals that didn't fail on `dev`, best first; None if one of them isn't evaluated there.

    With `task_aggregation: worst` also if the full model isn't, or scores 0.
    """
    full, *models = scores.of([FULL_MODEL, *(row.phenotype_hash for row in rows)])
    whole = [record for record in full.on("dev") or () if record is not None]
    if config.task_aggregation == "worst" and not (len(whole) == len(scores.tasks) and all(one.score for one in whole)):
        return None  # a share needs the full model's scores
    keys: dict[int, tuple[float, float, int]] = {}
    for row, model in zip(rows, models, strict=True):
        found = model.on("dev")
        if found is None:
            return None
        records = [record for record in found if record is not None]
        if records:
            score, tie_break = ranking_of(config, [*scores.tasks.values()], records, whole)
            keys[row.index] = (-score, -tie_break, row.index)
    return sorted((row for row in rows if row.index in keys), key=lambda row: keys[row.index])


def preferred(scores: SearchScores, config: RunConfig, ranked: Sequence[IndividualRecord]) -> IndividualRecord:
    """Return the winner of individuals that were ranked on `dev`; see `winner_of`."""

    def less_wanted(row: IndividualRecord) -> tuple[bool, int]:
        return not row.stock, round(100 * row.parameters / row.parameters_full)

    first = ranked[0]
    better = sorted((row for row in ranked if less_wanted(row) < less_wanted(first)), key=less_wanted)
    if not better or config.task_aggregation == "worst":  # whose score isn't a mean that can be tested
        return first
    best, *others = scores.of([row.phenotype_hash for row in (first, *better)])
    for row, model in zip(better, others, strict=True):
        test = compare([best], [model], "dev")
        if test is not None and test.p > EQUAL_P:
            return row
    return first


def random_draws(config: RunConfig, history: Sequence[IndividualRecord]) -> list[IndividualRecord]:
    """Return the first random initial individuals, at most `final.random_baselines`; no score influences the choice."""
    rows = [row for row in history if row.operator == "random"][: config.final.random_baselines]
    return [row for row in rows if row.status != "pending"]


def drawn(scores: SearchScores, draws: Sequence[IndividualRecord]) -> list[ModelScores]:
    """Return the stored scores of random draws; failed ones score 0."""
    models = scores.of([row.phenotype_hash for row in draws])
    return [replace(model, failed=row.status == "failed") for model, row in zip(models, draws, strict=True)]


def auxiliary_entries(
    config: RunConfig, history: Sequence[IndividualRecord], winner: IndividualRecord | None
) -> list[tuple[str, IndividualRecord]]:
    """Return the individuals in the final table other than the winner, with their labels; none of them failed.

    They are the method's unsearched start, the one-shot baselines that phases begin with, each from the first phase
    that has it, and in a search with a repair phase the best unrepaired individual.
    """
    made_in = [phase for phase in config.phases for _ in range(phase.evaluations)]
    found = [(START_LABEL, row) for row in history if row.operator == START][:1]
    planned = [row for row in history if row.index < len(made_in)]
    for row in planned:
        phase = made_in[row.index]
        if row.operator in phase.baselines and not row.parents:
            label = row.operator if phase.repair is None else f"{row.operator}, repaired"
            if label not in dict(found):
                found.append((label, row))
    if any(phase.kind == "repair" for phase in config.phases):
        unrepaired = [row for row in planned if made_in[row.index].repair is None and row.status == "ok"]
        found += [(BEFORE_LABEL, row) for row in sorted(unrepaired, key=rank_key)[:1]]
    return [
        (label, row) for label, row in found if row.status == "ok" and (winner is None or row.index != winner.index)
    ]


def evaluate_final_table(setup: SearchSetup, store: StoreReader, cache: EvaluationCache) -> None:
    """Score the leaders on `dev`, then the table's entries on the other splits; stored evaluations are reused.

    What a candidate is scored on is one request where possible, since it may have to be repaired for each. The full
    model comes last: any worker can run it, and a candidate may be repaired already on one of them.

    Raises:
        UserError: The full model can't be scored on a split, for example since a row of it can't be.
    """

    def refs(*splits: Split) -> tuple[SplitRef, ...]:
        return tuple(ref for split in splits for ref in setup.splits(split))

    def request(row: IndividualRecord | None, splits: tuple[SplitRef, ...]) -> EvaluationRequest:
        return setup.request(None if row is None else setup.space.from_bytes(row.genome), splits)

    def settle(requests: Sequence[EvaluationRequest]) -> None:
        for item in cache.settle(requests):
            if item.failure_kind == "candidate" and item.request.edit.phenotype_hash == FULL_MODEL:
                splits = ", ".join(sorted({split.split for split in item.request.splits}))
                raise UserError(
                    f"model.path {setup.config.model.path}: the unedited model can't be scored on {splits}: "
                    f"{item.failure}"
                )

    final = setup.config.final
    test: tuple[Split, ...] = ("test",) if final.test else ()
    leaders = store.best_of_search(setup.search_id, max(1, final.rerank))
    if final.rerank and leaders:
        # The first one is mostly the winner, which is scored on `test`, too.
        others = (*leaders[1:], None)
        settle([request(leaders[0], refs("dev", *test)), *(request(row, refs("dev")) for row in others)])
    search, history = store.search(setup.search_id), store.history(setup.search_id)
    winner, _ = winner_of(store, search, setup.config)
    # Only leaders are scored on dev: another individual could outrank the winner in listings.
    single = [] if winner is None else [winner]
    single += [row for _, row in reversed(auxiliary_entries(setup.config, history, winner))]
    draws = [row for row in random_draws(setup.config, history) if row.status == "ok"]
    splits = refs("search", *test)
    held_out = tuple(item.ref for item in setup.held_out)
    requests = [request(row, splits + held_out) for row in single]
    requests += [request(row, splits) for row in draws]
    settle([*requests, request(None, splits + held_out)])
