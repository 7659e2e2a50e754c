"""Whole searches on the demo's model with and without shortcuts: the stores hold the same."""

from __future__ import annotations

from contextlib import nullcontext
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
Searched = tuple[list[Any], dict[str, list[float]]]


def settings(prune: int, merge: int) -> RunConfig:
    """All kinds of fitness at once, a prune and a merge phase of so many evaluations."""
    counts = {"search": 4, "dev": 2}
    data = load_run_config(DEMO).model_dump(mode="json") | {
        "tasks": [{"name": name, "counts": counts} for name in TASKS],
        "phases": [{"kind": "prune", "evaluations": prune, "initial": 3}, {"kind": "merge", "evaluations": merge}],
        "genome": {"kind": "eep", "experts": 2, "groups": "per_layer"},
        "stop_at_recovery": None,
        "final": {"rerank": 2, "test": False},
        "window": 2,
    }
    return parse_run_config(data, "test")


def searched(
    folder: Path,
    activation_cache_bytes: int,
    shortcuts: Shortcuts = ALL_SHORTCUTS,
    library: Any = None,
    evaluations: tuple[int, int] = (6, 3),
) -> Searched:
    """All individuals and their evaluations, and the shares spared."""
    setup = set_up_new(settings(*evaluations))
    model, engine = setup.config.model, setup.config.engine
    spared: dict[str, list[float]] = {}

    def watching(worker: Evaluator, request: EvaluationRequest, splits: tuple[PreparedSplit, ...]) -> EvaluationReply:
        with library or nullcontext():
            reply = worker.evaluate(request, splits)
        for split in splits:
            spared.setdefault(split.task, []).append(reply.results[split.fingerprint].saved)
        return reply

    def make() -> Evaluator:
        return Guarded(EvaluationWorker(model, engine, shortcuts, activation_cache_bytes), watching)

    pool = LocalPool(make, setup.all_prepared)
    with Store.open(f"sqlite:///{folder / f'{activation_cache_bytes}-{shortcuts.draft}'}.db") as store:
        register(setup, store)
        report = execute(setup, store, Observer(), lambda _: pool)
        found: list[Any] = [report.winner and report.winner.split(":")[1]]
        for row in store.history(setup.search_id):
            found.append((row.index, row.genome, row.phenotype_hash, row.fitness, row.tie_break, row.parents))
            for one in store.individual(f"{setup.search_id}:{row.index}").evaluations:
                kept = (one.task, one.split, one.score, one.gold_logprob, one.examples_seen, one.failure)
                found.append(kept)
    return found, spared


def test_the_store_holds_the_same(tmp_path: Path) -> None:
    """Without room for hidden states, with room for all of them, and with room for some."""
    whole, nothing = searched(tmp_path, 0)
    roomy, spared = searched(tmp_path, 1 << 26)
    tight, less = searched(tmp_path, 3 << 20)
    assert roomy == whole and tight == whole
    assert len(whole) > 9 * 6
    sums = [[sum(shares[task]) for task in TASKS] for shares in (nothing, less, spared)]
    assert not any(sums[0])
    assert all(sums[2]), sums
    assert 0 < sum(sums[1]) < sum(sums[2]), sums


def test_the_store_holds_the_same_on_a_library_whose_products_depend_on_their_shapes(tmp_path: Path) -> None:
    """With all shortcuts, and without any."""
    library, evaluations = FickleLibrary(), (3, 2)
    on, _ = searched(tmp_path, 1 << 26, library=library, evaluations=evaluations)
    asked = library.asked
    off, _ = searched(tmp_path, 0, NO_SHORTCUTS, library, evaluations)
    assert on == off
    assert 1_000 < asked < library.asked
