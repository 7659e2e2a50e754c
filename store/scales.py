"""How the fitness of searches is shown."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sqlalchemy import Connection, and_, select

from moevolve.evaluators.metrics import scale_of
from moevolve.evaluators.scales import ScaleName, common_scale
from moevolve.store.errors import parsing
from moevolve.store.tables import contexts, search_tasks, searches


@dataclass(frozen=True, slots=True)
class SearchScales:
    """How the numbers of one search are shown.

    Attributes:
        fitness: Scale of individuals' fitness: the one that the tasks share, or `percent` for a share of the unedited
            model's score (`task_aggregation: worst`).
        mean: Scale of weighted means over the tasks: the one that they share, or `percent`.
    """

    fitness: ScaleName = "percent"
    mean: ScaleName = "percent"


def read_scales(connection: Connection, search_id: str | None = None) -> dict[str, SearchScales]:
    """Return the scales of all searches, or of one, by id; searches that have no evaluation yet are left out."""
    s, t, c = searches.c, search_tasks.c, contexts.c
    there = and_(
        c.task_fingerprint == t.task_fingerprint,
        c.model_fingerprint == s.model_fingerprint,
        c.engine_fingerprint == s.engine_fingerprint,
    )
    query = select(s.id, c.metric).join_from(searches, search_tasks, t.search_id == s.id).join(contexts, there)
    query = query.where(t.weight > 0, t.split == "search").distinct()
    if search_id is not None:
        query = query.where(s.id == search_id)
    named: dict[str, list[ScaleName]] = {}
    for found, metric in connection.execute(query):
        named.setdefault(found, []).append(scale_of(metric))
    scales = {found: SearchScales(common_scale(each), common_scale(each)) for found, each in named.items()}
    others = [found for found, each in scales.items() if each.fitness != "percent"]
    for found in others:
        config, name = connection.execute(select(s.config, s.name).where(s.id == found)).one()
        with parsing(f"the configuration of search {name}"):
            worst = json.loads(config).get("task_aggregation") == "worst"
        if worst:
            scales[found] = SearchScales("percent", scales[found].mean)
    return scales


def scales_of(connection: Connection, search_id: str) -> SearchScales:
    """Return the scales of one search."""
    return read_scales(connection, search_id).get(search_id, SearchScales())
