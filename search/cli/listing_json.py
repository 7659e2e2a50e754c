"""What the listings print with `--json`: one object per search, ranked configuration or individual."""

from __future__ import annotations

from typing import Any

from moevolve.store.records import BestRow, IndividualDetail, SearchSummary


def search_json(row: SearchSummary) -> dict[str, Any]:
    """A line of `searches`."""
    return {
        "id": row.search.id,
        "name": row.search.name,
        "status": row.search.status,
        "reason": row.search.status_reason,
        "tasks": row.tasks,
        "individuals": row.individuals,
        "evaluated": row.evaluated,
        "failed": row.failed,
        "best_fitness": row.best_fitness,
        "genome": row.search.genome_kind,
        "model": row.search.model_path,
        "seed": row.search.seed,
        "created_at": row.search.created_at,
    }


def best_json(row: BestRow) -> dict[str, Any]:
    """A line of `best`."""
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


def individual_json(detail: IndividualDetail) -> dict[str, Any]:
    """What `show` knows."""
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
        "exports": detail.exports,
    }
