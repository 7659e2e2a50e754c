"""Records as plain data: what commands print with `--json`, and what a server would send.

Most records are what their fields are. Those that are shown otherwise say how: the store's here, others beside the use
case that they come from (`as_data.register`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import singledispatch
from typing import Any

from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.store.records import BestRow, IndividualDetail, SearchSummary


@singledispatch
def as_data(value: Any) -> Any:
    """A record, or a collection of them, as what JSON knows: dictionaries, lists, text, numbers, truth values and None.

    What JSON doesn't know (paths, times) becomes text.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: as_data(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_data(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


@as_data.register
def _(row: SearchSummary) -> dict[str, Any]:
    return {
        "id": row.search.id,
        "name": row.search.name,
        "status": row.search.status,
        "reason": row.search.status_reason,
        "run_by": row.owner,
        "tasks": as_data(row.tasks),
        "individuals": row.individuals,
        "evaluated": row.evaluated,
        "failed": row.failed,
        "best_fitness": row.best_fitness,
        "genome": row.search.genome_kind,
        "model": row.search.model_path,
        "seed": row.search.seed,
        "created_at": as_data(row.search.created_at),
    }


@as_data.register
def _(row: BestRow) -> dict[str, Any]:
    return {
        "id": row.ref,
        "search": row.search_name,
        "task": row.task,
        "ranked_by": row.ranked_by,
        "genome_kind": row.genome_kind,
        "scores": {"search": row.search_score, "dev": row.dev_score, "test": row.test_score},
        "experts": row.experts,
        "active": row.active,
        "parameters": row.parameters,
        "parameters_full": row.parameters_full,
        "parameters_kept": row.parameters / row.parameters_full,
        "active_parameters": row.active_parameters,
        "genome": row.summary,
        "lineage_depth": row.depth,
        "phase": row.phase,
        "operator": row.operator,
        "gold_logprob": row.gold_logprob,
        "phenotype_hash": row.phenotype_hash,
    }


@as_data.register
def _(detail: IndividualDetail) -> dict[str, Any]:
    record = detail.individual
    return {
        "id": detail.ref,
        "search": detail.search.name,
        "genome_kind": detail.search.genome_kind,
        "genome": record.summary,
        "phase": record.phase,
        "operator": record.operator,
        "parents": [f"{detail.search.name}:{parent}" for parent in record.parents],
        "lineage_depth": record.depth,
        "experts": record.experts,
        "active": record.active,
        "parameters": record.parameters,
        "active_parameters": record.active_parameters,
        "parameters_full": record.parameters_full,
        "status": record.status,
        "fitness": record.fitness,
        "tie_break": record.tie_break,
        "failure": record.failure,
        "failure_kind": record.failure_kind,
        "content_hash": record.content_hash,
        "phenotype_hash": record.phenotype_hash,
        "evaluations": [
            {
                "task": item.task,
                "split": item.split,
                "score": item.score,
                "gold_logprob": item.gold_logprob,
                "examples": item.examples_seen,
                "failure": item.failure,
                "seconds": item.seconds,
                "worker": item.worker,
                "attempt": item.attempt,
            }
            for item in detail.evaluations
        ],
        "exports": as_data(detail.exports),
    }


@as_data.register
def _(task: TaskConfig) -> dict[str, Any]:
    return {
        "name": task.name,
        "description": task.description,
        "fitness": task.fitness,
        "splits": list(task.splits),
    }
