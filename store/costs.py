"""What a search cost."""

from __future__ import annotations

from sqlalchemy import Connection, distinct, func, select

from moevolve.store.models import contexts, evaluations, individuals, search_tasks, searches
from moevolve.store.records import SearchCost


def read_cost(connection: Connection, search_id: str) -> SearchCost:
    """The evaluations that a search's individuals needed on its search and dev splits, whoever had them run."""
    s, t, c, e, i = searches.c, search_tasks.c, contexts.c, evaluations.c, individuals.c
    own = (
        select(c.id)
        .join(searches, (s.model_fingerprint == c.model_fingerprint) & (s.engine_fingerprint == c.engine_fingerprint))
        .join(search_tasks, (t.search_id == s.id) & (t.task_fingerprint == c.task_fingerprint))
        .where(s.id == search_id, t.split != "test")
    )
    held = select(i.phenotype_hash).where(i.search_id == search_id)
    query = select(func.count(distinct(e.phenotype_hash)), func.count(), func.coalesce(func.sum(e.seconds), 0.0)).where(
        e.context_id.in_(own), e.phenotype_hash.in_(held)
    )
    return SearchCost(*connection.execute(query).one())
