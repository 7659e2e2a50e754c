"""Requests that look something up in the store, or change what users have written there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.contract.phases import START
from moevolve.search.genomes.registry import KINDS, outline_of
from moevolve.search.operations.subject import find_subject
from moevolve.search.requests.answers import GenomeView, Pareto, TradeOff, TradeOffs
from moevolve.search.requests.searches import (
    BestRequest,
    ControlRequest,
    GenomeRequest,
    LabelRequest,
    LineageRequest,
    ParetoRequest,
    SearchesRequest,
    SearchRequest,
    ShowRequest,
    TradeOffsRequest,
)
from moevolve.search.requests.tables import Rows
from moevolve.store.pareto import Size, unbeaten
from moevolve.store.reader import StoreReader
from moevolve.store.records import (
    FULL_MODEL,
    BestRow,
    Control,
    IndividualDetail,
    LineageGraph,
    SearchRecord,
    SearchSummary,
)
from moevolve.store.repository import Store
from moevolve.workers.contract.facts import DTYPE_BYTES


def searches(store: StoreReader, request: SearchesRequest) -> Rows[SearchSummary]:
    """See `SearchesRequest`."""
    return Rows(selected(store.searches(), request))


def selected(found: Sequence[SearchSummary], request: SearchesRequest) -> list[SearchSummary]:
    """Filter and sort searches as a request asks for.

    Args:
        found: All searches, oldest first.
        request: The filter and the order.
    """
    text = (request.text or "").casefold()
    rows = [
        row
        for row in found
        if row.search.archived == request.archived
        and request.status in (None, row.search.status)
        and (request.tag is None or request.tag in row.search.tags)
        and (request.task is None or request.task in row.tasks)
        and any(text in each.casefold() for each in _texts(row.search))
    ]
    match request.sort:
        case "oldest":
            return rows
        case "newest":
            return rows[::-1]
        case "name":
            return sorted(rows, key=lambda row: row.search.name.casefold())
        case "best" | "dev" | "test":
            scores = [row.best_fitness if request.sort == "best" else getattr(row, request.sort) for row in rows]
            order = sorted(range(len(rows)), key=lambda place: (scores[place] is None, -(scores[place] or 0.0)))
            return [rows[place] for place in order]


def _texts(search: SearchRecord) -> tuple[str, ...]:
    return search.name, " ".join(search.tags), search.note, search.model_path, search.genome_kind


def label(store: Store, request: LabelRequest) -> SearchRecord:
    """See `LabelRequest`."""
    if request.tags is None and request.note is None and request.archived is None:
        raise UserError("say which tags or which note the search is to have, or whether it is to be archived")
    tags = None if request.tags is None else list(dict.fromkeys(request.tags.split()))
    search_id = store.search(request.search).id
    store.label(search_id, tags, request.note, request.archived)
    return store.search(search_id)


def search(store: StoreReader, request: SearchRequest) -> SearchRecord:
    """See `SearchRequest`."""
    return store.search(request.search)


def control(store: StoreReader, request: ControlRequest) -> Control:
    """See `ControlRequest`."""
    return store.control(store.search(request.search).id)


def best(store: StoreReader, request: BestRequest) -> Rows[BestRow]:
    """See `BestRequest`."""
    found = store.best(request.task, request.experts, request.active, request.search, request.limit, request.by)
    return Rows(found)


def pareto(store: StoreReader, request: ParetoRequest) -> Pareto:
    """See `ParetoRequest`."""
    size: Size = "active_parameters" if request.size == "flops" else "parameters"
    where = request.task, request.split, request.search
    front = tuple(store.pareto(*where, size))
    return Pareto(
        request.task,
        request.split,
        request.size,
        {"parameters": 1.0, "flops": 2.0}.get(request.size) or _bytes_each(store, request),
        front,
        tuple(store.marks(*where, _unsearched())),
        tuple(store.candidate_cells(*where, size)) if request.candidates else (),
    )


def tradeoffs(store: StoreReader, request: TradeOffsRequest) -> TradeOffs:
    """See `TradeOffsRequest`."""
    search = store.search(request.search)
    tasks = [task for task in store.search_tasks(search.id) if task.split == request.split]
    rows = {row.phenotype_hash: row for row in reversed(store.history(search.id)) if row.status == "ok"}
    fingerprints = [task.task_fingerprint for task in tasks]
    found = store.evaluations([FULL_MODEL, *rows], search.model_fingerprint, search.engine_fingerprint, fingerprints)
    by_key = {(one.phenotype_hash, one.task_fingerprint): one.score for one in found}

    def scores(phenotype: str) -> tuple[float | None, ...]:
        return tuple(by_key.get((phenotype, fingerprint)) for fingerprint in fingerprints)

    measured = []
    for row in sorted(rows.values(), key=lambda row: row.index):
        known = tuple(score for score in scores(row.phenotype_hash) if score is not None)
        if tasks and len(known) == len(tasks):
            measured.append(TradeOff(f"{search.name}:{row.index}", known, row.parameters, row.summary))
    front = unbeaten([one.scores for one in measured])
    return TradeOffs(
        request.split, tuple(task.task for task in tasks), scores(FULL_MODEL), tuple(measured[place] for place in front)
    )


@cache
def _unsearched() -> frozenset[str]:
    """Operators of individuals that weren't searched: random ones, starts and one-shot methods."""
    return frozenset({"random", START, *(name for kind in KINDS.values() for name in kind.baselines)})


def _bytes_each(store: StoreReader, request: ParetoRequest) -> float:
    """Bytes of a parameter.

    Raises:
        UserError: the dtype isn't in the configuration of the search.
    """
    if request.search is None:
        named = [one.search for one in store.searches() if request.task in one.tasks]
    else:
        named = [store.search(request.search)]
    found = DTYPE_BYTES.get(parse_stored_config(named[-1].config).model.parameter_dtype) if named else None
    if found is None:
        raise UserError(f"{request.task}: the dtype of the weights isn't known, so their bytes aren't either")
    return float(found)


def show(store: StoreReader, request: ShowRequest) -> IndividualDetail:
    """See `ShowRequest`."""
    return store.individual(request.individual)


def lineage(store: StoreReader, request: LineageRequest) -> LineageGraph:
    """See `LineageRequest`."""
    follow = store.descendants if request.descendants else store.ancestors
    return follow(request.individual, request.depth)


def genome(store: StoreReader, request: GenomeRequest) -> GenomeView:
    """See `GenomeRequest`."""
    ref = store.individual(request.individual).ref
    if request.against is None:
        return GenomeView(ref, _outline(store, ref))
    against = store.individual(request.against).ref
    return GenomeView(ref, _outline(store, ref), against, _outline(store, against))


def _outline(store: StoreReader, ref: str) -> GenomeOutline:
    found = find_subject(store, ref, weights=False).genome
    assert found is not None
    return outline_of(found)
