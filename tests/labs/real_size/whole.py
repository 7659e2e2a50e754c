"""A whole search with one layer at a time, and the export of its winner: what a shrink does, in this process."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.modules import module as modules

from moevolve.evaluators.types import SCORED
from moevolve.search.config.files import parse_run_config, with_preset
from moevolve.search.config.run import RunConfig
from moevolve.search.interface.checkpoints.export import ExportRequest
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.search_loop import SearchLoop
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.local import LocalPool
from moevolve.search.running.calibration import calibrated_setup
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.set_up import set_up
from moevolve.search.running.weights import facts_text
from moevolve.search.strategies.phased import make_strategy
from moevolve.store.records import SearchRecord, SearchTaskRecord
from moevolve.store.repository import Store
from moevolve.workers.checkpoints import shards, stored_experts
from moevolve.workers.contract.capacity import NeededMemory
from moevolve.workers.contract.settings import engine_fingerprint
from moevolve.workers.export import export
from moevolve.workers.families.decoder import decoder_layers
from moevolve.workers.methods.repair import fits
from moevolve.workers.worker import EvaluationWorker

NAME = "whole"
# Where each stage happens: what is called, by its owner and name.
_STAGES: tuple[tuple[str, Any, str], ...] = (
    ("reading", stored_experts.StoredExperts, "read"),
    ("fit", fits.LayerFits, "fit"),
    ("writing", shards.ShardWriter, "write"),
    ("reading back", export, "verify"),
)


@dataclass(frozen=True)
class Part:
    """A search or an export.

    Attributes:
        title: which.
        seconds: Wall time by stage, all layers and candidates together.
        peak, planned: most bytes in tensors on the device, and the same as `plan` predicts it for the search; an export
            needs no more.
        note: Size and score of the result, for people.
    """

    title: str
    seconds: Mapping[str, float]
    peak: int
    planned: int
    note: str


class Clock:
    """Seconds by stage. What happens in a stage within another one counts for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open = ["rest"]
        self._since = time.perf_counter()

    def begin(self, stage: str) -> None:
        self.book()
        self._open.append(stage)

    def end(self) -> None:
        self.book()
        self._open.pop()

    def book(self) -> None:
        """Add the time since the last change of stage to the present one."""
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def watching(self, layer: type[nn.Module]) -> Iterator[None]:
        """Context manager in which stages are timed; a forward pass is one of decoder layers of this class."""
        with ExitStack() as stack:
            for stage, owner, name in _STAGES:
                stack.enter_context(patch.object(owner, name, self._timed(stage, getattr(owner, name))))
            before = modules.register_module_forward_pre_hook(
                lambda module, _: self.begin("forward") if type(module) is layer else None
            )
            after = modules.register_module_forward_hook(
                lambda module, _, __: self.end() if type(module) is layer else None
            )
            stack.callback(before.remove)
            stack.callback(after.remove)
            yield

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.begin(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return timed


def shrink(model: Path, task: Path, folder: Path, batch: int) -> Iterator[Part]:
    """Search for half of the neurons by the preset `counts`, with the experts on the disk, and export the winner.

    Args:
        model: Folder of the checkpoint.
        task: from `write_task`.
        folder: Folder for the store and the new checkpoint.
        batch: tokens of a forward pass.
    """
    config = _config(model, task, batch)
    memory = estimate(config).memory["disk"]
    with Store.open(f"sqlite:///{folder}/store.db") as store:
        setup = set_up(config, f"{NAME}-1")
        _record(setup, store)
        layer, found = _search(setup, store, NeededMemory(memory, 1.0))
        rows = store.history(setup.search_id)
        failed = [row.failure for row in rows if row.failure is not None]
        if failed:
            raise RuntimeError(failed[0])
        best = max(rows, key=lambda row: row.fitness or 0.0)
        note = f"{len(rows)} candidates, the best {best.index}: {best.fitness:.3f}"
        yield Part("search", *found, memory.device, note)
        with _measured(layer) as found:
            report = ExportRequest(f"{NAME}:{best.index}", folder / "new").answer(store)
        yield Part("export", *found, memory.device, f"{report.form}, {report.size_bytes / 1e9:.2f} GB")


def _config(model: Path, task: Path, batch: int) -> RunConfig:
    data: dict[str, Any] = {
        "name": NAME,
        "model": {"path": str(model), "device": "cuda", "expert_offload": "disk"},
        "tasks": [{"name": f"{task}@agreement"}],
        "genome": {"neuron_share": 0.5},
        "preset": "counts",
        "window": 1,
        "workers": {"num_gpus": 1},
        "engine": {"threads": 1, "batch_tokens": batch},
        "final": {"rerank": 0, "test": False},
    }
    return parse_run_config(with_preset(data, NAME), NAME)


def _record(setup: SearchSetup, store: Store) -> None:
    """Record the search. The product's own way to do so needs Ray, which is missing where GPUs are lent."""
    config, facts = setup.config, setup.facts
    record = SearchRecord(
        id=setup.search_id,
        name=NAME,
        config=config.canonical_json(),
        config_hash=config.config_hash,
        model_fingerprint=facts.fingerprint,
        model_path=config.model.path,
        engine_fingerprint=engine_fingerprint(config.model, config.engine),
        seed=config.seed,
        genome_kind=config.genome.kind,
        software_version=version("moevolve"),
    )
    scored = [each for split, group in setup.prepared.items() if split in SCORED for each in group]
    tasks = [SearchTaskRecord(each.task, each.split, each.fingerprint, 1.0) for each in scored]
    store.create_search(record, [*tasks, *setup.auxiliary_tasks], facts_text(facts))


def _search(setup: SearchSetup, store: Store, needed: NeededMemory) -> tuple[type[nn.Module], list[Any]]:
    """Run the search on a worker that is gone afterwards; returns the class of decoder layers, and as `_measured`."""
    config = setup.config
    engine = engine_fingerprint(config.model, config.engine)
    worker = EvaluationWorker(config.model, config.engine, needed)
    pool = LocalPool(lambda: worker, setup.all_prepared)
    layer = type(decoder_layers(worker.resident.model)[0])
    with _measured(layer) as found:
        setup = calibrated_setup(setup, store, pool.calibrate)
        cache = EvaluationCache(store, pool, setup.search_id, setup.facts.fingerprint, engine)
        SearchLoop(setup, make_strategy(config, setup.space, setup.schedule), store, cache).run()
    return layer, found


@contextmanager
def _measured(layer: type[nn.Module]) -> Iterator[list[Any]]:
    """Context manager whose list has the seconds by stage, and the peak on the device, once it has ended."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    clock, found = Clock(), list[Any]()
    with clock.watching(layer):
        yield found
    clock.book()
    found += [dict(clock.seconds), torch.cuda.max_memory_allocated()]
