"""The smallest size that keeps a share of the full model's score: bisected by one-shot choices, then searched.

Every size that is tried is a search of its own in the store, so that a repeated request evaluates none of it again.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import FinalSection, RunConfig
from moevolve.search.interface.opening import opened_store
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.results.kept import Kept, full_kept, winner_kept
from moevolve.search.running.execute import ray_pool
from moevolve.search.running.launch import launch, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import with_changes
from moevolve.search.running.study import SharedWorkers
from moevolve.search.shrink.budget import clock, kept_score, possible_experts, seconds_of
from moevolve.search.shrink.choosing import folder_of, parsed, with_evaluations
from moevolve.search.shrink.dense import narrower_genomes
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.search.shrink.timing import plan_time
from moevolve.store.reader import StoreReader
from moevolve.store.repository import Store
from moevolve.workers.contract.facts import ModelFacts

_TOKENS = 32768
"""Calibration tokens, the same for all sizes so that they share one calibration. How many suffice depends on the size;
for a quarter of 32 experts on text it is 16,384 (`genome.calibration_loss`)."""
_SEARCHES = 2
"""Searches that a time is divided between: of the smallest size that a one-shot choice keeps enough with, and of the
next smaller one, which mostly keeps too little."""


def smallest(
    request: ShrinkOptions, data: Mapping[str, Any], probe: ModelProbe, observer: Observer, begun: float
) -> tuple[dict[str, Any], str]:
    """Search for the smallest size that keeps the share of the full model's score that a request asks for.

    Args:
        request: The request.
        data: Settings of the search at the largest size.
        probe: Process that describes the model, and becomes the first worker.
        observer: Its `on_note` takes a line for every size that is tried.
        begun: When the request was made, in seconds of `time.monotonic`.

    Returns:
        Settings of the search whose winner has the size, which is finished in the store, and a sentence about it.

    Raises:
        UserError: No size keeps so much, or `dev` has too few rows to show that one does.
    """
    assert request.keep_score is not None
    least, asked = kept_score(request.keep_score), f"--keep-score {request.keep_score}"
    setup = set_up_new(parsed(dict(data)), None, probe.call)
    unit, genomes = sizes_of_model(setup.facts)
    counts, evaluations = list(genomes), None
    steps = math.ceil(math.log2(len(counts) + 1))
    kept: dict[int, Kept | None] = {}

    def sized(count: int) -> dict[str, Any]:
        fixed = {"calibration_tokens": _TOKENS, "calibration_most": _TOKENS} if setup.facts.experts else {}
        genome = fixed | data["genome"] | genomes[count]
        changed = {**data, "name": f"{data['name']}-{count}", "genome": genome}
        return changed if evaluations is None else with_evaluations(changed, evaluations)

    def keeps(count: int, config: RunConfig, how: str) -> bool:
        kept[count] = trials.kept(config, f"{count} {unit}")
        found = kept[count]
        enough = found is not None and found.low >= least
        what = "nothing, since every candidate failed" if found is None else str(found)
        observer.on_note(f"{count} {unit} keep {what} by {how}, {'enough' if enough else 'too little'}")
        return enough

    def by_one_shots(count: int) -> bool:
        nonlocal steps
        now, config = time.monotonic(), one_shots(parsed(sized(count)))
        enough = keeps(count, config, f"the best of {len(config.phases[0].init)} one-shot choices")
        trials.check_rows(config.name, asked, least)
        steps -= 1
        if steps > 0:
            ends = clock(steps * (time.monotonic() - now))
            observer.on_note(f"{asked}: {steps} more sizes by one-shot choices until {ends}, then searches")
        return enough

    def by_search(count: int) -> bool:
        return keeps(count, parsed(sized(count)), "a search")

    def is_time() -> bool:
        return request.time is None or time.monotonic() - begun < seconds_of(request.time) * (1 - 1 / _SEARCHES)

    whole = parsed(sized(counts[0]))
    observer.on_note(
        f"{asked}: {counts[0]} to {counts[-1]} {unit}, of which at most {steps} sizes are tried by one-shot choices, "
        f"and {_SEARCHES} or more by a search of {sum(phase.evaluations for phase in whole.phases)} candidates"
    )
    with opened_store(whole.store if request.store is None else request.store, create=True) as store:
        with Trials(setup, store, observer, probe, folder_of(request)) as trials:
            start = min(bisect_left(counts, True, key=by_one_shots), len(counts) - 1)
        if request.time is not None:
            evaluations, _ = plan_time(request, parsed(sized(counts[start])), begun, probe, observer, _SEARCHES)
        with Trials(setup, store, observer, probe, folder_of(request)) as trials:
            place = settled(counts, start, by_search, is_time)
    if place is None:
        raise UserError(
            f"{asked}: {counts[-1]} {unit} keep {kept[counts[-1]]}, and fewer keep less; give a smaller share"
        )
    text = f"{asked}: {counts[place]} {unit} keep {kept[counts[place]]} of the full model's score on `dev`"
    below = kept.get(counts[place - 1]) if place else None
    return sized(counts[place]), text if below is None else f"{text}; {counts[place - 1]} keep {below}"


def settled(
    counts: Sequence[int], start: int, keeps: Callable[[int], bool], is_time: Callable[[], bool] = lambda: True
) -> int | None:
    """Go from a size to smaller ones as long as they keep enough, or to larger ones until one does.

    Args:
        counts: Sizes, ascending.
        start: Place of the first size to try.
        keeps: Whether a size keeps enough.
        is_time: Whether there is time for a smaller size.

    Returns:
        The place of the smallest size that was tried and keeps enough; None if there is none.
    """
    if not keeps(counts[start]):
        return next((place for place in range(start + 1, len(counts)) if keeps(counts[place])), None)
    place = start
    while place and is_time() and keeps(counts[place - 1]):
        place -= 1
    return place


def one_shots(config: RunConfig) -> RunConfig:
    """The search of the one-shot choices that a search begins with; the best on `search` is scored on `dev`."""
    first, final = config.phases[0], FinalSection(rerank=1, test=False)
    if not first.named:
        raise UserError("phases.0.init: --keep-score tries sizes by one-shot choices, and it names none")
    count = len(first.named)
    phase = first.model_copy(update={"evaluations": count, "initial": count, "init": first.named})
    return config.model_copy(update={"name": f"{config.name}-one-shots", "phases": (phase,), "final": final})


def sizes_of_model(facts: ModelFacts) -> tuple[str, dict[int, dict[str, Any]]]:
    """The sizes that a model can be made: words for what they count, and settings of genomes by size, ascending."""
    if facts.dense is not None:
        return f"of {facts.dense.width} neurons", narrower_genomes(facts.dense)
    possible = possible_experts(facts.experts, facts.rule.groups)[:-1]
    return f"of {facts.experts} experts", {count: {"experts": count} for count in possible}


class Trials:
    """Runs searches that differ in their genomes, phases and final scores on the same workers.

    Args:
        setup: A search that fits the model and the tasks; it isn't run.
        store: Store of the searches.
        observer: It is told the steps of every search.
        probe: Source of the first worker.
        folder: Folder of the request's checkpoint, for error messages.
    """

    def __init__(self, setup: SearchSetup, store: Store, observer: Observer, probe: ModelProbe, folder: Path) -> None:
        self._setup, self._store, self._observer, self._probe, self._folder = setup, store, observer, probe, folder
        self._workers = SharedWorkers(partial(ray_pool, probe=probe))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._workers.close()

    def kept(self, config: RunConfig, title: str) -> Kept | None:
        """Run a search, or what is left of it, and return what its winner keeps; None if every candidate failed."""
        refuse_other_settings(self._store, config, self._folder)
        changes = {name: getattr(config, name) for name in ("name", "genome", "phases", "final")}
        setup = with_changes(self._setup, **changes)
        observer = Observer(
            on_stage=lambda stage: self._observer.on_stage(f"{title}: {stage}"), on_progress=self._observer.on_progress
        )
        launch(setup, self._store, observer, or_resume=True, probe=self._probe, make_pool=self._workers.lend)
        found = winner_kept(self._store, self._store.search(config.name))
        return None if found is None else found.kept

    def check_rows(self, search: str, asked: str, least: float) -> None:
        """Raise UserError if the rows of `dev` are too few to show that anything keeps so much."""
        best = full_kept(self._store, self._store.search(search))
        if best.low < least:
            raise UserError(
                f"{asked}: `dev` has so few rows that even a candidate with all of the full model's answers is only "
                f"known to keep {100 * best.low:.1f} % with a confidence of 95 %; give more rows, or a smaller share"
            )


def refuse_other_settings(store: StoreReader, config: RunConfig, folder: Path) -> None:
    """Refuse a search of the same name with other settings, in terms of a shrink into a folder."""
    found = next((one.search for one in store.searches() if one.search.name == config.name), None)
    if found is not None and found.config_hash != config.config_hash:
        raise UserError(
            f"--output {folder}: the store has a search {config.name} with other settings; choose another folder, or "
            "another store with --store"
        )
