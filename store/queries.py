"""Queries: listings, individuals, and rankings (best per task and budget, best of a search).

A ranking walks an index of `evaluations` from its best end within each context (model, engine, task split), stops at
the limit, and then merges the contexts' rows. It sorts no more rows than it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Row,
    Select,
    String,
    and_,
    func,
    literal,
    or_,
    select,
    type_coerce,
    union,
)

from moevolve.evaluators.errors import suggestion
from moevolve.evaluators.metrics import mean_on_scale, scale_of
from moevolve.evaluators.scales import common_scale
from moevolve.evaluators.types import SCORED, SPLITS, Split
from moevolve.store.errors import NotFoundError, StoreError, damaged
from moevolve.store.leases import running
from moevolve.store.lineage import find_individual, find_search
from moevolve.store.records import (
    INDIVIDUAL_COLUMNS,
    SEARCH_COLUMNS,
    BestRow,
    EvaluationRecord,
    ExportRecord,
    IndividualDetail,
    IndividualRecord,
    Order,
    SearchRecord,
    SearchSummary,
)
from moevolve.store.scales import SearchScales, read_scales, scales_of
from moevolve.store.session import chunks
from moevolve.store.tables import contexts, evaluations, exports, individuals, parents, search_tasks, searches

StoredRow = Row[*tuple[object, ...]]


def read_searches(connection: Connection) -> list[SearchSummary]:
    """Return all searches with their counts, oldest first."""
    s, i, t = searches.c, individuals.c, search_tasks.c
    own = i.search_id == s.id
    # Indices have no gaps, so the highest one gives the total. Only the few rows without a fitness are counted.
    highest = select(func.max(i.idx, type_=BigInteger)).where(own).scalar_subquery()
    failed, pending = (
        select(func.count()).where(own, i.status == status).scalar_subquery() for status in ("failed", "pending")
    )
    best = select(func.max(i.fitness)).where(own, i.status == "ok").scalar_subquery()
    size = select(1.0 * i.parameters / i.parameters_full).where(own, i.idx == s.winner).scalar_subquery()
    query = select(*(s[name] for name in SEARCH_COLUMNS), highest, failed, pending, best, size)
    rows = list(connection.execute(query.order_by(s.created_at, s.id)))
    scores = _winners_scores(connection)
    tasks: dict[str, dict[str, None]] = {row.id: {} for row in rows}
    for search_id, task in connection.execute(
        select(t.search_id, t.task).where(t.weight > 0).order_by(t.search_id, t.position)
    ):
        if search_id in tasks:  # other rows are damage
            tasks[search_id][task] = None
    owners = {search_id: control.owner for search_id, control in running(connection).items()}
    scales = read_scales(connection)
    found = []
    for row in rows:
        *values, newest, lost, waiting, fitness, share = row
        search = SearchRecord(**dict(zip(SEARCH_COLUMNS, values, strict=True)))
        total = 0 if newest is None else newest + 1
        dev, test = scores.get((search.id, "dev")), scores.get((search.id, "test"))
        counts = total, total - lost - waiting, lost
        shown, about = scales.get(row.id, SearchScales()), (tuple(tasks[row.id]), owners.get(row.id))
        found.append(SearchSummary(search, *counts, fitness, dev, test, *about, share, shown.fitness, shown.mean))
    return found


def _winners_scores(connection: Connection) -> dict[tuple[str, Split], float]:
    """Weighted means of the winners' scores by search id and split; left out where a task has no score."""
    s, i, t, c, e = searches.c, individuals.c, search_tasks.c, contexts.c, evaluations.c
    there = and_(
        c.task_fingerprint == t.task_fingerprint,
        c.model_fingerprint == s.model_fingerprint,
        c.engine_fingerprint == s.engine_fingerprint,
    )
    query = (
        select(s.id, t.split, t.weight, e.score, type_coerce(c.metric, String))
        .join_from(searches, individuals, and_(i.search_id == s.id, i.idx == s.winner))
        .join(search_tasks, and_(t.search_id == s.id, t.weight > 0, t.split.in_(("dev", "test"))))
        .outerjoin(contexts, there)
        .outerjoin(evaluations, and_(e.context_id == c.id, e.phenotype_hash == i.phenotype_hash))
        .where(s.winner.is_not(None))
    )
    found: dict[tuple[str, Split], list[tuple[float | None, float, str]]] = {}
    for search_id, split, weight, score, metric in connection.execute(query):
        found.setdefault((search_id, split), []).append((score, weight, metric))
    means = {}
    for key, rows in found.items():
        scores, weights, metrics = zip(*rows, strict=True)
        if None not in scores:
            means[key] = mean_on_scale(scores, weights, common_scale(map(scale_of, metrics)))
    return means


def read_history(
    connection: Connection, search_id: str, indices: Sequence[int] | None = None
) -> list[IndividualRecord]:
    """Return all recorded individuals of a search, or those with some indices, sorted by index."""
    if indices is not None:
        return [row for some in chunks(sorted(indices)) for row in _history(connection, search_id, some)]
    return _history(connection, search_id, None)


def _history(connection: Connection, search_id: str, indices: Sequence[int] | None) -> list[IndividualRecord]:
    i, p = individuals.c, parents.c
    edges = select(p.child_idx, p.parent_idx).where(p.search_id == search_id).order_by(p.child_idx, p.position)
    columns = (i.idx, *(i[name] for name in INDIVIDUAL_COLUMNS))
    query = select(*columns).where(i.search_id == search_id).order_by(i.idx)
    if indices is not None:
        edges, query = edges.where(p.child_idx.in_(indices)), query.where(i.idx.in_(indices))
    parents_of: dict[int, list[int]] = {}
    for child, parent in connection.execute(edges):
        parents_of.setdefault(child, []).append(parent)
    names = ("index", *INDIVIDUAL_COLUMNS)
    found = [
        IndividualRecord(**dict(zip(names, row, strict=True)), parents=tuple(parents_of.get(row[0], ())))
        for row in connection.execute(query)
    ]
    for one in found:
        whole = None not in (one.fitness, one.tie_break) if one.status == "ok" else one.fitness is None
        if not whole or any(parent >= one.index for parent in one.parents):
            raise damaged(f"individual {find_search(connection, search_id).name}:{one.index}")
    return found


def read_page(
    connection: Connection, search_id: str, order: Order = "best", after: int | None = None, limit: int = 50
) -> list[IndividualRecord]:
    """Return a page of a search's individuals. Every page takes the same time, however large the search is.

    Args:
        search_id: Id of the search.
        order: `best` lists individuals with a fitness by rank; `newest` all, latest first; `failed` those that failed,
            latest first.
        after: Index of the last individual on the previous page; None for the first page.
        limit: Maximum number of individuals.

    Raises:
        NotFoundError: There is no individual `after`.
    """
    i = individuals.c
    last = None
    if after is not None:
        last = next(iter(read_history(connection, search_id, [after])), None)
        if last is None:
            raise NotFoundError(f"no individual {after} in search {search_id}")
    query = select(i.idx).where(i.search_id == search_id)
    if order == "best":
        query = query.where(i.status == "ok").order_by(i.fitness.desc(), i.tie_break.desc(), i.idx)
        if last is not None:
            # A row comparison can't mix directions. The redundant first condition lets the index seek to the start.
            same = and_(i.fitness == last.fitness, i.tie_break == last.tie_break, i.idx > last.index)
            less = and_(i.fitness == last.fitness, i.tie_break < last.tie_break)
            query = query.where(i.fitness <= last.fitness, or_(i.fitness < last.fitness, less, same))
    else:
        if order == "failed":
            query = query.where(i.status == "failed")
        query = query.order_by(i.idx.desc())
        if last is not None:
            query = query.where(i.idx < last.index)
    return _in_order(connection, search_id, query.limit(limit))


def read_best_of_search(connection: Connection, search_id: str, limit: int = 1) -> list[IndividualRecord]:
    """The best `ok` individuals of a search by (fitness desc, tie_break desc, index asc), each phenotype once."""
    return _in_order(connection, search_id, best_indices(search_id, limit))


def _in_order(connection: Connection, search_id: str, query: Select[int]) -> list[IndividualRecord]:
    """Return the individuals of a search whose indices a query selects, in its order."""
    indices = list(connection.execute(query).scalars())
    rows = {row.index: row for row in read_history(connection, search_id, indices)}
    return [rows[index] for index in indices]


def read_individual(connection: Connection, ref: str) -> IndividualDetail:
    """Return the individual `SEARCH:INDEX` (search name or id), with its evaluations and exports.

    Raises:
        NotFoundError: The reference has another form, or the search or individual doesn't exist; the message suggests
            similar ones.
    """
    search, row = find_individual(connection, ref)
    (individual,) = read_history(connection, search.id, [row.idx])
    here = context_ids(connection, search.model_fingerprint, search.engine_fingerprint)
    found = read_evaluations(connection, here, [individual.phenotype_hash])
    found.sort(key=lambda one: (one.task, SPLITS.index(one.split), one.task_fingerprint))
    e = exports.c
    query = select(e.path, e.form, e.checks, e.created_at).where(e.search_id == search.id, e.idx == individual.index)
    exported = [ExportRecord(*values) for values in connection.execute(query.order_by(e.created_at, e.id))]
    scale = scales_of(connection, search.id).fitness
    return IndividualDetail(search, individual, tuple(found), tuple(exported), scale)


def context_ids(
    connection: Connection, model: str, engine: str, task_fingerprints: Sequence[str] | None = None
) -> list[int]:
    """Return the ids of the contexts with these fingerprints of model, engine and, if given, task splits."""
    c = contexts.c
    query = select(c.id).where(c.model_fingerprint == model, c.engine_fingerprint == engine).order_by(c.id)
    if task_fingerprints is None:
        return list(connection.execute(query).scalars())
    found: list[int] = []
    for some in chunks(sorted(set(task_fingerprints))):
        found += connection.execute(query.where(c.task_fingerprint.in_(some))).scalars()
    return found


def read_evaluations(
    connection: Connection, context_ids: Sequence[int], hashes: Sequence[str]
) -> list[EvaluationRecord]:
    """Return the evaluations of some phenotypes in some contexts, sorted by phenotype hash and task fingerprint."""
    found: list[EvaluationRecord] = []
    e = evaluations.c
    for some in chunks(context_ids):
        about = {row.id: row for row in connection.execute(select(contexts).where(contexts.c.id.in_(some)))}
        for context_id in some:
            for few in chunks(hashes):
                query = select(evaluations).where(e.context_id == context_id, e.phenotype_hash.in_(few))
                for row in connection.execute(query):
                    values = row._asdict() | about[context_id]._asdict()
                    del values["context_id"], values["id"]
                    found.append(EvaluationRecord(**values))
    found.sort(key=lambda one: (one.phenotype_hash, one.task_fingerprint))
    return found


# Columns of an individual that a ranking shows.
_DESCRIPTION = (
    *("experts", "active", "parameters", "active_parameters", "parameters_full", "active_parameters_full"),
    *("summary", "depth", "phase", "operator", "phenotype_hash"),
)


@dataclass(frozen=True, slots=True)
class Filter:
    """Restrictions of a ranking, where None is no restriction."""

    experts: int | None = None
    active: int | None = None
    search: SearchRecord | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class ScoredPhenotype:
    """A scored phenotype whose individual is not known yet."""

    score: float
    gold_logprob: float
    phenotype_hash: str
    context: StoredRow
    split: Split


def known_tasks(connection: Connection) -> list[str]:
    """Return the names of the tasks that have evaluations or belong to a search."""
    return sorted(connection.execute(union(select(contexts.c.task), select(search_tasks.c.task))).scalars())


def read_best(
    connection: Connection,
    task: str | None = None,
    experts: int | None = None,
    active: int | None = None,
    search: str | None = None,
    limit: int = 10,
    by: Split = "dev",
    model: str | None = None,
) -> list[BestRow]:
    """Return the best candidates for a task.

    Only individuals with status `ok` appear, each phenotype (per model) once, under its earliest individual. Rows are
    sorted by score, then mean gold log-probability, then the search's age and the index.

    Args:
        task: Name of the task; None ranks every task, sorted by name, with `limit` rows each.
        experts: Number of experts n' that a configuration must have.
        active: Number of active experts k that a configuration must have.
        search: Name or id of the search that individuals must belong to.
        limit: Maximum number of rows.
        by: Split that ranks. `search` ranks by the search-split score. `dev` ranks configurations with a dev score
            first, by that score, and others after them by their search-split score; those that failed on dev do not
            appear. `test` ranks only configurations with a test score, by that score.
        model: Path of the model that configurations must be of, as searches have it.

    Raises:
        StoreError: The task or search is unknown; the message suggests similar names.
    """
    where = Filter(experts, active, find_named(connection, search), model)
    tasks = known_tasks(connection) if task is None else [task]
    return [row for one in tasks for row in _ranking(connection, one, where, limit, by)]


def find_named(connection: Connection, search: str | None) -> SearchRecord | None:
    """Return the search with this name or id; None if none is named."""
    return None if search is None else find_search(connection, search)


def _ranking(connection: Connection, task: str, where: Filter, limit: int, by: Split) -> list[BestRow]:
    if by not in SCORED or limit < 1:
        raise StoreError(
            f"a ranking needs a split of {', '.join(SCORED)} and a limit from 1 on, got {by!r} and {limit}"
        )
    here = task_contexts(connection, task, where.search, where.model)
    rows = top(connection, here, by, where, limit)
    if by == "dev" and len(rows) < limit:
        seen = {(row.phenotype_hash, row.model_fingerprint) for row in rows}
        others = top(connection, here, "search", where, limit, not_on="dev")
        rows += [row for row in others if (row.phenotype_hash, row.model_fingerprint) not in seen]
    return rows[:limit]


def best_indices(search_id: str, limit: int) -> Select[int]:
    """Return a query for the indices of a search's best `ok` individuals, each phenotype only under its first one."""
    earlier = individuals.alias("earlier")
    repeats = (
        select(literal(1))
        .where(earlier.c.phenotype_hash == individuals.c.phenotype_hash, earlier.c.search_id == search_id)
        .where(earlier.c.idx < individuals.c.idx, earlier.c.status == "ok")
        .exists()
    )
    return (
        select(individuals.c.idx)
        .where(individuals.c.search_id == search_id, individuals.c.status == "ok", ~repeats)
        .order_by(individuals.c.fitness.desc(), individuals.c.tie_break.desc(), individuals.c.idx)
        .limit(limit)
    )


def task_contexts(
    connection: Connection, task: str, search: SearchRecord | None, model: str | None = None
) -> list[StoredRow]:
    """Return the contexts of a task; for one search, those of its model, its engine and its versions of the splits.

    With a path of a model, only those of the models that searches have by this path.

    Raises:
        NotFoundError: No evaluation or search has this task.
    """
    found = list(connection.execute(select(contexts).where(contexts.c.task == task).order_by(contexts.c.id)))
    if not found:
        names = known_tasks(connection)
        if task not in names:
            raise NotFoundError(f"no task {task!r} in this store: {suggestion(task, names)}")
    if model is not None:
        query = select(searches.c.model_fingerprint).where(searches.c.model_path == model)
        known = set(connection.execute(query).scalars())
        found = [one for one in found if one.model_fingerprint in known]
    if search is None:
        return found
    own = _own_fingerprints(connection, [search.id], task)
    return [
        one
        for one in found
        if (one.model_fingerprint, one.engine_fingerprint) == (search.model_fingerprint, search.engine_fingerprint)
        and own.get((search.id, one.split), one.task_fingerprint) == one.task_fingerprint
    ]


def _own_fingerprints(connection: Connection, search_ids: Sequence[str], task: str) -> dict[tuple[str, str], str]:
    """Return the fingerprint of the split that each search uses, by search id and split."""
    found: dict[tuple[str, str], str] = {}
    for some in chunks(search_ids):
        query = select(search_tasks.c.search_id, search_tasks.c.split, search_tasks.c.task_fingerprint).where(
            search_tasks.c.task == task, search_tasks.c.search_id.in_(some)
        )
        found.update(((row.search_id, row.split), row.task_fingerprint) for row in connection.execute(query))
    return found


def top(
    connection: Connection,
    here: Sequence[StoredRow],
    split: Split,
    where: Filter,
    limit: int,
    not_on: Split | None = None,
    only: ColumnElement[bool] | None = None,
) -> list[BestRow]:
    """Return the best rows on one split over all contexts, each phenotype of a model once.

    Phenotypes that were evaluated on the split `not_on`, scored or failed, are left out.
    """
    # The best `limit` of all are among the best `limit` of each context.
    found: list[ScoredPhenotype] = []
    for context in here:
        if context.split == split:
            excluded = [one.id for one in here if one.split == not_on and _same_model(one, context)]
            query = candidates(context, where, limit, excluded)
            if only is not None:
                query = query.where(only)
            found += [ScoredPhenotype(row[0], row[1], row[2], context, split) for row in connection.execute(query)]
    found.sort(key=lambda one: (-one.score, -one.gold_logprob))
    firsts: dict[tuple[str, str], ScoredPhenotype] = {}
    for one in found:
        firsts.setdefault((one.phenotype_hash, one.context.model_fingerprint), one)
    distinct = list(firsts.values())
    if len(distinct) > limit:
        last = distinct[limit - 1]
        # Exact ties with the last one stay for now: age decides among them, which the next step reads.
        distinct = [one for one in distinct if (one.score, one.gold_logprob) >= (last.score, last.gold_logprob)]
    held = [(one, _earliest(connection, one, where.search)) for one in distinct]
    held.sort(key=lambda pair: (-pair[0].score, -pair[0].gold_logprob, pair[1].born, pair[1].search_id, pair[1].idx))
    return _rows(connection, here, held[:limit])


def _same_model(one: StoredRow, other: StoredRow) -> bool:
    return (one.model_fingerprint, one.engine_fingerprint) == (other.model_fingerprint, other.engine_fingerprint)


def candidates(
    context: StoredRow, where: Filter, limit: int, excluded: Sequence[int] = ()
) -> Select[float, float, str]:
    """Return a query for the best phenotypes in a context with an `ok` individual: score, gold_logprob, phenotype_hash.

    Args:
        context: Row of `evaluation_contexts`.
        excluded: Ids of contexts; phenotypes that were evaluated there, scored or failed, are left out.
    """
    e = evaluations
    query = select(e.c.score, e.c.gold_logprob, e.c.phenotype_hash)
    # A score without a log-probability is damage.
    query = query.where(e.c.context_id == context.id, e.c.score.is_not(None), e.c.gold_logprob.is_not(None))
    if where.experts is not None:
        query = query.where(e.c.experts == where.experts)
    if where.active is not None:
        query = query.where(e.c.active == where.active)
    held = select(literal(1)).where(
        individuals.c.phenotype_hash == e.c.phenotype_hash,
        individuals.c.status == "ok",
        searches.c.id == individuals.c.search_id,
        searches.c.model_fingerprint == context.model_fingerprint,
        searches.c.engine_fingerprint == context.engine_fingerprint,
    )
    if where.search is not None:
        held = held.where(individuals.c.search_id == where.search.id)
    query = query.where(held.exists())
    if excluded:
        other = e.alias("other")
        elsewhere = and_(other.c.context_id.in_(excluded), other.c.phenotype_hash == e.c.phenotype_hash)
        query = query.where(~select(literal(1)).where(elsewhere).exists())
    return query.order_by(e.c.score.desc(), e.c.gold_logprob.desc(), e.c.phenotype_hash.desc()).limit(limit)


def _earliest(connection: Connection, one: ScoredPhenotype, search: SearchRecord | None) -> StoredRow:
    """Return the individual that represents a candidate: the first one in the oldest search that has the phenotype."""
    other = individuals.alias("other")
    first = (
        select(other.c.idx)
        .where(other.c.phenotype_hash == one.phenotype_hash, other.c.search_id == searches.c.id)
        .where(other.c.status == "ok")
        .order_by(other.c.idx)
        .limit(1)
        .correlate(searches)
        .scalar_subquery()
    )
    columns = [individuals.c[name] for name in ("search_id", "idx", *_DESCRIPTION)]
    # One individual per search: a converged search may have its best phenotype thousands of times.
    query = (
        select(
            *columns, searches.c.name.label("search_name"), searches.c.genome_kind, searches.c.created_at.label("born")
        )
        .join_from(searches, individuals, and_(individuals.c.search_id == searches.c.id, individuals.c.idx == first))
        .where(searches.c.model_fingerprint == one.context.model_fingerprint)
        .where(searches.c.engine_fingerprint == one.context.engine_fingerprint)
        .order_by(searches.c.created_at, searches.c.id)
        .limit(1)
    )
    if search is not None:
        query = query.where(searches.c.id == search.id)
    return connection.execute(query).one()


def _rows(
    connection: Connection, here: Sequence[StoredRow], held: Sequence[tuple[ScoredPhenotype, StoredRow]]
) -> list[BestRow]:
    """Return the rows of a ranking, with the scores on all splits filled in."""
    scores = _scores(connection, [one.id for one in here], {one.phenotype_hash for one, _ in held})
    task = here[0].task if here else ""
    own = _own_fingerprints(connection, sorted({individual.search_id for _, individual in held}), task)
    rows = []
    for one, individual in held:
        by_split: dict[str, float | None] = dict.fromkeys(SPLITS)
        # Later contexts overwrite earlier ones: the newest version of a split, then the search's own version.
        related = [context for context in here if _same_model(context, one.context)]
        related.sort(key=lambda c: (own.get((individual.search_id, c.split)) == c.task_fingerprint, c.id))
        for context in related:
            score = scores.get((context.id, one.phenotype_hash))
            by_split[context.split] = by_split[context.split] if score is None else score
        by_split[one.split] = one.score
        rows.append(
            BestRow(
                task=task,
                ranked_by=one.split,
                search_id=individual.search_id,
                search_name=individual.search_name,
                index=individual.idx,
                genome_kind=individual.genome_kind,
                gold_logprob=one.gold_logprob,
                model_fingerprint=one.context.model_fingerprint,
                search_score=by_split["search"],
                dev_score=by_split["dev"],
                test_score=by_split["test"],
                scale=scale_of(one.context.metric),
                **{name: getattr(individual, name) for name in _DESCRIPTION},
            )
        )
    return rows


def _scores(connection: Connection, context_ids: Sequence[int], phenotypes: set[str]) -> dict[tuple[int, str], float]:
    """Return the scores by context id and phenotype hash; failed evaluations are left out."""
    found: dict[tuple[int, str], float] = {}
    e = evaluations.c
    for context_id in context_ids:
        for some in chunks(sorted(phenotypes)):
            query = select(e.phenotype_hash, e.score).where(e.context_id == context_id, e.phenotype_hash.in_(some))
            found.update(((context_id, row[0]), row[1]) for row in connection.execute(query) if row[1] is not None)
    return found
