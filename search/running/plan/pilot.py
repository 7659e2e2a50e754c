"""Measuring a search: a few of its individuals are evaluated, in a store that is removed afterwards.

Those of the first phase are the search's own first ones, so that what was measured of them need not be measured again.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import SCORED, PreparedSplit, Split
from moevolve.search.config.run import FinalSection, RunConfig
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.calibration import stored_fingerprint
from moevolve.search.running.execute import PoolFactory, execute
from moevolve.search.running.launch import register
from moevolve.search.running.observer import Observer
from moevolve.search.running.plan.counts import final_models
from moevolve.search.running.plan.records import Pilot
from moevolve.search.running.set_up import Call, call_here, with_changes
from moevolve.store.reader import StoreReader
from moevolve.store.records import FULL_MODEL, EvaluationRecord, Progress
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Calibration

# Fewest individuals of a phase, since a worker's first one is slower than the others.
_LEAST = 2


def measure(
    setup: SearchSetup,
    individuals: int,
    make_pool: PoolFactory | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    keep: Store | None = None,
    call: Call = call_here,
) -> Pilot:
    """Run a search with fewer individuals, and scale to the whole search; see `execute`.

    Nothing is scored on `dev` or `test`.

    Args:
        setup: The search; the store gets no record of it.
        individuals: Number of individuals. Every phase gets its share, at least two.
        make_pool: See `execute`.
        on_stage, on_progress: See `Observer`.
        keep: Store that gets the calibrations and evaluations, so that the search finds them there. A calibration that
            it has already isn't made again.
        call: Calls what imports torch.
    """
    scored = [split for split in setup.all_prepared.values() if split.split in SCORED]
    tokens = call(_tokens, setup.config, scored)
    with tempfile.TemporaryDirectory(prefix="moevolve-pilot-") as folder:
        short = _shortened(setup, individuals, Path(folder))
        begun = time.monotonic()
        with Store.open(short.config.store) as store:
            register(short, store)
            known = {} if keep is None else _known_calibration(short, store, keep)
            for fingerprint, content in known.items():
                store.add_calibration(fingerprint, content)
            observer = Observer(on_stage=lambda stage: on_stage(f"pilot: {stage}"), on_progress=on_progress)
            execute(short, store, observer, make_pool)
            history, search = store.history(short.search_id), store.search(short.search_id)
            tasks = [task.task_fingerprint for task in store.search_tasks(search.id)]
            models = [FULL_MODEL, *(row.phenotype_hash for row in history)]
            found = store.evaluations(models, search.model_fingerprint, search.engine_fingerprint, tasks)
            calibrations = {each: store.calibration(each) or b"" for each in store.calibrations() if each not in known}
            if keep is not None:
                keep.add_evaluations([one for one in found if one.failure is None])
                for fingerprint, content in calibrations.items():
                    keep.add_calibration(fingerprint, content)
            full = sum(one.seconds for one in found if one.phenotype_hash == FULL_MODEL)
            taken = [(row.phase, [one for one in found if one.phenotype_hash == row.phenotype_hash]) for row in history]
        wall = time.monotonic() - begun
    calibrating = sum(Calibration.from_bytes(content).seconds for content in calibrations.values())
    pilot = replace(_measured(taken, wall - full), calibration_seconds=calibrating, full_seconds=full)
    final = pilot.final(final_models(setup.config), tokens)
    searching = pilot.searching((phase.kind, phase.evaluations) for phase in setup.config.phases)
    hours = (pilot.other_seconds + full + searching + final) / 3600
    return replace(pilot, final_seconds=final, hours=hours)


def _tokens(config: RunConfig, splits: Sequence[PreparedSplit]) -> Counter[Split]:
    """Count the tokens of all tasks by split."""
    from moevolve.workers.profiling.prompts import PromptMeter

    meter, tokens = PromptMeter(config.model, config.engine), Counter[Split]()
    for split in splits:
        tokens[split.split] += meter.counts(split).tokens
    return tokens


def _known_calibration(short: SearchSetup, store: StoreReader, keep: StoreReader) -> dict[str, bytes]:
    """Return the calibration of a recorded search by its fingerprint, if another store has it."""
    wanted = short.space.measurement
    if wanted is None:
        return {}
    fingerprint = stored_fingerprint(wanted, short.config, store, short.search_id, short.facts.fingerprint)
    content = keep.calibration(fingerprint)
    return {} if content is None else {fingerprint: content}


def _shortened(setup: SearchSetup, individuals: int, folder: Path) -> SearchSetup:
    config = setup.config
    total = sum(phase.evaluations for phase in config.phases)
    phases = []
    for phase in config.phases:
        share = max(_LEAST, len(phase.named), round(individuals * phase.evaluations / total))
        count = min(share, phase.evaluations)
        phases.append(phase.model_copy(update={"evaluations": count, "initial": min(count, phase.initial)}))
    final = FinalSection(rerank=0, test=False)
    store = f"sqlite:///{folder / 'pilot.db'}"
    short = with_changes(setup, phases=tuple(phases), final=final, loggers=(), store=store)
    searched = {name: short.prepared[name] for name in short.prepared if name not in ("dev", "test")}
    return replace(short, prepared=searched)


def _measured(found: Sequence[tuple[str, Sequence[EvaluationRecord]]], wall: float) -> Pilot:
    """Summarise (phase, evaluations) of the individuals, which took `wall` seconds in all."""
    taken: dict[str, list[float]] = {}
    workers = set()
    for phase, evaluations in found:
        searched = [one for one in evaluations if one.split == "search" and one.failure is None]
        if searched:
            taken.setdefault(phase, []).append(sum(one.seconds for one in searched))
            workers |= {one.worker for one in searched}
    if not taken:
        raise UserError("pilot: no individual could be evaluated; `moevolve launch` says why")
    # A phase takes as long as its longest evaluation at least, during which other workers may wait.
    busy = sum(max(*each, sum(each) / len(workers)) for each in taken.values())
    counts = {kind: len(each) for kind, each in taken.items()}
    return Pilot(counts, len(workers), {kind: mean(each) for kind, each in taken.items()}, max(0, wall - busy))
