"""Whole searches on the demo's model with and without shortcuts: the stores hold the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fickle_library import FickleLibrary
from local_workers import Guarded

from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.files import load_run_config, parse_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.pools.local import Evaluator, LocalPool
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.store.repository import Store
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.contract.settings import ALL_SHORTCUTS, Shortcuts
from moevolve.workers.worker import EvaluationWorker

DEMO = Path(__file__).parents[3] / "configs" / "runs" / "demo.yaml"
TASKS = ("demo-span", "demo-relation@rank", "demo-kin@perplexity", "demo-compare@kl", "demo-calendar@agreement")
NO_SHORTCUTS = Shortcuts(draft=False, prefixes=False)


def settings() -> RunConfig:
    """All kinds of fitness at once, a prune and a merge phase."""
    counts = {"search": 4, "dev": 2}
    data = load_run_config(DEMO).model_dump(mode="json") | {
        "tasks": [{"name": name, "counts": counts} for name in TASKS],
        "phases": [{"kind": "prune", "evaluations": 5, "initial": 3}, {"kind": "merge", "evaluations": 3}],
        "genome": {"kind": "eep", "experts": 2, "groups": "per_layer"},
        "skip_phases_at": None,
        "final": {"rerank": 2, "test": False},
        "window": 2,
    }
    return parse_run_config(data, "test")


def searched(library: FickleLibrary, shortcuts: Shortcuts) -> list[Any]:
    """All individuals and their evaluations."""
    setup = set_up_new(settings())
    model, engine = setup.config.model, setup.config.engine

    def watching(worker: Evaluator, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        with library:
            return worker.evaluate(request, splits)

    def make() -> Evaluator:
        return Guarded(EvaluationWorker(model, engine, shortcuts=shortcuts), watching)

    with Store.open("sqlite://") as store:
        register(setup, store)
        report = execute(setup, store, Observer(), lambda _: LocalPool(make, setup.all_prepared))
        found: list[Any] = [report.winner and report.winner.split(":")[1]]
        for row in store.history(setup.search_id):
            found.append((row.index, row.genome, row.phenotype_hash, row.fitness, row.tie_break, row.parents))
            for one in store.individual(f"{setup.search_id}:{row.index}").evaluations:
                kept = (one.task, one.split, one.score, one.gold_logprob, one.examples_seen, one.failure)
                found.append(kept)
    return found


def test_the_store_holds_the_same_on_a_library_whose_products_depend_on_their_shapes() -> None:
    library = FickleLibrary()
    on = searched(library, ALL_SHORTCUTS)
    asked = library.asked
    off = searched(library, NO_SHORTCUTS)
    assert on == off and len(on) > 8 * 6
    assert 1_000 < asked < library.asked - asked
