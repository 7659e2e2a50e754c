"""Small records for the tests of the store."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from moevolve.evaluators.types import Split
from moevolve.store.leases import this_process
from moevolve.store.records import (
    EvaluationRecord,
    IndividualRecord,
    SearchRecord,
    SearchTaskRecord,
)
from moevolve.store.repository import Store

MODEL, ENGINE = "m" * 64, "e" * 64


def digest(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


def gone_owner() -> str:
    """A process of this machine that has ended, as leases name it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    return this_process().replace(f" {os.getpid()} ", f" {child.pid} ")


def search(name: str = "alpha", **other: Any) -> SearchRecord:
    values: dict[str, Any] = {
        "id": f"id-{name}",
        "name": name,
        "config": '{"seed": 7}',
        "config_hash": digest("config"),
        "model_fingerprint": MODEL,
        "model_path": "models/tiny",
        "engine_fingerprint": ENGINE,
        "seed": 2**62,
        "genome_kind": "eep",
        "software_version": "0.1.0",
    }
    return SearchRecord(**(values | other))


def split(task: str = "rte", name: Split = "search", weight: float = 1.0) -> SearchTaskRecord:
    return SearchTaskRecord(task, name, digest(task, name), weight)


def individual(index: int, parents: Sequence[int] = (), phenotype: object = None, **other: Any) -> IndividualRecord:
    values: dict[str, Any] = {
        "index": index,
        "phase": "prune",
        "operator": "mutate",
        "genome": f"genome {index}".encode() + b"\x00\xff",
        "phenotype_hash": digest("phenotype", index if phenotype is None else phenotype),
        "experts": 4,
        "active": 2,
        "parameters": 2_000,
        "active_parameters": 1_000,
        "parameters_full": 2**40,
        "active_parameters_full": 2**39,
        "summary": "4 of 8",
        "parents": tuple(parents),
    } | other
    return IndividualRecord(**{"content_hash": hashlib.sha256(values["genome"]).hexdigest()} | values)


def evaluation(
    phenotype: object, score: float | None, task: str = "rte", name: Split = "search", **other: Any
) -> EvaluationRecord:
    values: dict[str, Any] = {
        "phenotype_hash": digest("phenotype", phenotype),
        "model_fingerprint": MODEL,
        "engine_fingerprint": ENGINE,
        "task_fingerprint": digest(task, name),
        "task": task,
        "split": name,
        "metric": "accuracy",
        "score": score,
        "gold_logprob": None if score is None else -1.0,
        "failure": "logits are not finite" if score is None else None,
        "experts": 4,
        "active": 2,
        "parameters": 2_000,
    }
    return EvaluationRecord(**(values | other))


def decided(one: int | IndividualRecord, value: float | None, tie: float = -1.0) -> IndividualRecord:
    """An individual, by itself or by index, with its fitness, or failed."""
    made = individual(one) if isinstance(one, int) else one
    if value is None:
        return replace(made, status="failed", failure="logits are not finite", failure_kind="candidate")
    return replace(made, status="ok", fitness=value, tie_break=tie)


def scored(store: Store, search_id: str, index: int, score: float | None, **other: Any) -> None:
    """Records a decided individual together with its evaluation on rte/search."""
    gold = other.pop("gold", -1.0)
    one = individual(index, **other)
    names = ("experts", "active", "parameters", "active_parameters")
    shape = {name: getattr(one, name) for name in names}
    found = evaluation(index, score, phenotype_hash=one.phenotype_hash, **shape)
    if score is not None:
        found = evaluation(index, score, phenotype_hash=one.phenotype_hash, gold_logprob=gold, **shape)
    store.record(search_id, [decided(one, score, gold)], [found])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """A SQLite store that somebody else writes to all the while."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")
