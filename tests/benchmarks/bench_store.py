"""Measures the store: rate of `record()`, time of `history()`, latency of `best()`. Not a test: run it by hand.

    python tests/benchmarks/bench_store.py [--individuals 200000] [--searches 4] [--batch 64] [--plans]

The population is seeded. Individuals come in batches as a driver writes them: new individuals first (pending), then
their evaluations with the fitness. One in ten repeats the phenotype of an earlier one, one in fifty fails, one in a
thousand has dev scores. `history()` is timed on the first search.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import bench
import numpy as np
from sqlalchemy import text
from sqlalchemy.dialects import sqlite
from store_samples import decided, digest, evaluation, individual, search, split

from moevolve.evaluators.types import Split
from moevolve.store import queries
from moevolve.store.records import EvaluationRecord, IndividualRecord
from moevolve.store.repository import Store
from moevolve.store.session import transaction

EXPERTS = (2, 3, 4, 6)
GENOME_BYTES = 1024
EXAMPLES = 100
UNDECIDED = {"status": "pending", "fitness": None, "tie_break": None, "failure": None, "failure_kind": None}


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--individuals", type=int, default=200_000)
    parser.add_argument("--searches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--url", default=None, help="default: a SQLite file in a temporary folder")
    parser.add_argument("--plans", action="store_true", help="print SQLite's query plans of the rankings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = options.url or f"sqlite:///{Path(folder) / 'bench.db'}"
        with Store.open(url) as store:
            fill(store, options.individuals, options.searches, options.batch)
            read(store)
            if options.plans:
                plans(store)


def fill(store: Store, individuals: int, searches: int, batch: int) -> None:
    each = individuals // searches
    inside = busy = 0.0
    for number in range(searches):
        record = search(f"bench-{number}", seed=number)
        store.create_search(record, [split(), split(name="dev")])
        for start in range(0, each, batch):
            rows = population(number, start, min(batch, each - start))
            before, before_busy = time.perf_counter(), time.process_time()
            store.record(record.id, [replace(one, **UNDECIDED) for one in rows[0]])
            store.record(record.id, *rows)
            inside += time.perf_counter() - before
            busy += time.process_time() - before_busy
    print(f"record(): {each * searches / inside:,.0f} individuals/s in batches of {batch}, 2 transactions per batch")
    print(f"          ({each * searches:,} individuals; {inside:.1f} s in the store, {busy:.1f} s of them on a core)")


def population(number: int, start: int, count: int) -> tuple[list[IndividualRecord], list[EvaluationRecord]]:
    """Individuals of a search from an index on, and their evaluations."""
    rng = np.random.default_rng([number, start])
    individuals, evaluations = [], []
    for index in range(start, start + count):
        same = index if index % 10 else int(rng.integers(0, index + 1))
        phenotype = (number, same)
        draw = np.random.default_rng([number, same, 1])
        experts = EXPERTS[int(draw.integers(len(EXPERTS)))]
        # Accuracy on a hundred prompts: many ties, which the log-probability breaks.
        right, gold = float(draw.binomial(EXAMPLES, 0.6)) / EXAMPLES, -float(draw.exponential())
        score = None if same % 50 == 1 else right
        sizes = {"experts": experts, "parameters": experts * 1_000_000, "active_parameters": 2_000_000}
        made = individual(
            index,
            tuple(int(parent) for parent in rng.integers(0, start, size=2)) if start else (),
            phenotype,
            genome=rng.bytes(GENOME_BYTES),
            content_hash=digest(number, index),
            parameters_full=8_000_000,
            active_parameters_full=4_000_000,
            summary=f"{experts} of 8 experts",
            depth=index // 64,
            **sizes,
        )
        individuals.append(decided(made, score, gold))
        shared = sizes | {"seconds": 0.1, "worker": "w"}
        if score is not None:
            shared |= {"gold_logprob": gold, "outcomes": bytes(4 * EXAMPLES)}
        names: list[Split] = ["search"] if same % 1000 else ["search", "dev"]
        evaluations += [evaluation(phenotype, score, name=name, **shared) for name in names]
    return individuals, evaluations


def read(store: Store) -> None:
    before = time.perf_counter()
    rows = store.history("id-bench-0")
    print(f"history(): {len(rows):,} individuals in {time.perf_counter() - before:.2f} s")
    last = f"bench-0:{len(rows) - 1}"
    calls = {
        "best(task)": lambda: store.best("rte"),
        "best(task, by search)": lambda: store.best("rte", by="search"),
        "best(task, experts=4)": lambda: store.best("rte", experts=4),
        "best(task, experts=4, by search)": lambda: store.best("rte", experts=4, by="search"),
        "best(task, experts=4, active=2, search)": lambda: store.best("rte", 4, 2, "bench-1", by="search"),
        "best_of_search(10)": lambda: store.best_of_search("id-bench-0", 10),
        "individual()": lambda: store.individual(last),
        "ancestors()": lambda: store.ancestors(last),
        "pareto()": lambda: store.pareto("rte"),
        "pareto(by active parameters)": lambda: store.pareto("rte", size="active_parameters"),
        "full_score()": lambda: store.full_score("rte"),
        "hours()": lambda: store.hours("id-bench-0"),
        "searches()": store.searches,
    }
    for name, call in calls.items():
        call()
        seconds = []
        for _ in range(10):
            before = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - before)
        print(f"{name}: median {1e3 * statistics.median(seconds):.1f} ms, worst {1e3 * max(seconds):.1f} ms")


def plans(store: Store) -> None:
    with transaction(store._engine) as connection:
        contexts = {one.split: one for one in queries.task_contexts(connection, "rte", None)}
        asked = {
            "best": queries.candidates(contexts["search"], queries.Filter(), 10, [contexts["dev"].id]),
            "best with experts": queries.candidates(contexts["search"], queries.Filter(4), 10),
            "best_of_search": queries.best_indices("id-bench-0", 10),
        }
        for name, query in asked.items():
            sql = str(query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True}))
            print(f"{name}:")
            for row in connection.execute(text("EXPLAIN QUERY PLAN " + sql.replace(":", r"\:"))):
                print(f"  {row[-1]}")


if __name__ == "__main__":
    main()
