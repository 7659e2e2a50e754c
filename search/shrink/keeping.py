"""The smallest size that keeps a share of the full model's score: bisected by one-shot choices, then searched.

Every size that is tried is a search of its own in the store, so that a repeated request evaluates none of it again.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import FinalSection, RunConfig
from moevolve.search.interface.opening import opened_store
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.results.kept import Kept, full_kept, winner_kept
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import recorded, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import with_changes
from moevolve.search.running.study import SharedWorkers
from moevolve.search.shrink.budget import clock, kept_score, possible_experts, seconds_of
from moevolve.search.shrink.choosing import folder_of, parsed, with_evaluations
from moevolve.search.shrink.dense import narrower_genomes
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.search.shrink.timing import guard_seconds, plan_time
from moevolve.store.reader import StoreReader
from moevolve.store.records import SearchRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import ModelFacts

_TOKENS = 32768
"""Calibration tokens, the same for all sizes so that they share one calibration. How many suffice depends on the size;
for a quarter of 32 experts on text it is 16,384 (`genome.calibration_loss`)."""


def smallest(
    request: ShrinkOptions,
    data: dict[str, Any],
    probe: ModelProbe,
    workers: SharedWorkers,
    observer: Observer,
    begun: float,
) -> tuple[dict[str, Any], str]:
    """Search for the smallest size that keeps the share of the full model's score that a request asks for.

    Args:
        request: The request.
        data: Settings of the search at the largest size.
        probe: Process that describes the model.
        workers: Workers of all searches.
        observer: Its `on_note` takes a line for every size that is tried.
        begun: When the request was made, in seconds of `time.monotonic`.

    Returns:
        Settings of the search whose winner has the size, which is finished in the store, and a sentence about it.

    Raises:
        UserError: No size keeps so much, or `dev` has too few rows to show that one does.
    """
    config = parsed(data)
    setup = set_up_new(config, None, probe.call)
    with opened_store(config.store if request.store is None else request.store, create=True) as store:
        trials = SizeTrials(request, data, setup, store, observer, probe, workers)
        counts = trials.counts
        start = min(bisect_left(counts, True, key=trials.by_one_shots), len(counts) - 1)
        if request.time is not None:
            trials.limit_candidates(counts[start], begun)

        def is_time() -> bool:
            if request.time is None:
                return True
            return time.monotonic() - begun + trials.took + guard_seconds(request) < seconds_of(request.time)

        place = settled(counts, start, trials.by_search, is_time)
    if place is None:
        raise UserError(f"{trials.phrase(counts[-1])}, and fewer keep less; give a smaller share")
    text = f"{trials.phrase(counts[place])} of the full model's score on `dev`"
    below = trials.kept.get(counts[place - 1]) if place else None
    return trials.settings(counts[place]), text if below is None else f"{text}; {counts[place - 1]} keep {below}"


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
    """The search of the one-shot choices that a search begins with, whose best is repaired as that of the search is.

    The best on `search` is scored on `dev`.
    """
    first, last, final = config.phases[0], config.phases[-1], FinalSection(rerank=1, test=False)
    if not first.named:
        raise UserError("phases.0.init: --keep-score tries sizes by one-shot choices, and it names none")
    count = len(first.named)
    phases = [first.model_copy(update={"evaluations": count, "initial": count, "init": first.named})]
    if last.kind == "repair":
        phases.append(last.model_copy(update={"evaluations": 1}))
    return config.model_copy(update={"name": f"{config.name}-one-shots", "phases": tuple(phases), "final": final})


def sizes_of_model(facts: ModelFacts) -> tuple[str, dict[int, dict[str, Any]]]:
    """The sizes that a model can be made: words for what they count, and settings of genomes by size, ascending."""
    if facts.dense is not None:
        return f"of {facts.dense.width} neurons", narrower_genomes(facts.dense)
    possible = possible_experts(facts.experts, facts.rule.groups)[:-1]
    return f"of {facts.experts} experts", {count: {"experts": count} for count in possible}


class SizeTrials:
    """Runs searches that differ in the size of their candidates, on the same workers and with the same calibration.

    Args:
        request: The request.
        data: Settings of the search at the largest size.
        setup: That search.
        store: Store of the searches.
        observer: See `smallest`.
        probe: Process that describes the model.
        workers: Workers of the searches.

    Attributes:
        counts: The sizes, ascending.
        kept: What the winner of the last search at a size keeps; None if every candidate failed.
        took: Seconds that the last search took, without calibrating, which no other size does again.
    """

    def __init__(
        self,
        request: ShrinkOptions,
        data: dict[str, Any],
        setup: SearchSetup,
        store: Store,
        observer: Observer,
        probe: ModelProbe,
        workers: SharedWorkers,
    ) -> None:
        assert request.keep_score is not None
        self._request, self._setup, self._store = request, setup, store
        self._observer, self._probe, self._workers = observer, probe, workers
        self._asked, self._least = f"--keep-score {request.keep_score}", kept_score(request.keep_score)
        self._unit, self._genomes = sizes_of_model(setup.facts)
        fixed = {"calibration_tokens": _TOKENS, "calibration_most": _TOKENS} if setup.facts.experts else {}
        # A winner that is as good as was asked for on `search` may not be on `dev`.
        self._data = data | {"genome": fixed | data["genome"], "skip_phases_at": None}
        self.counts = list(self._genomes)
        self.kept: dict[int, Kept | None] = {}
        self.took = 0.0
        self._steps = math.ceil(math.log2(len(self.counts) + 1))
        evaluations = sum(phase.evaluations for phase in setup.config.phases)
        observer.on_note(
            f"{self._asked}: {self.counts[0]} to {self.counts[-1]} {self._unit}, of which at most {self._steps} sizes "
            f"are tried by one-shot choices, and mostly two by a search of {evaluations} candidates"
        )

    def settings(self, count: int) -> dict[str, Any]:
        """The settings of the search at a size."""
        genome = self._data["genome"] | self._genomes[count]
        return self._data | {"name": f"{self._data['name']}-{count}", "genome": genome}

    def phrase(self, count: int) -> str:
        """Say what is kept at a size."""
        found = self.kept[count]
        return f"{self._asked}: {count} {self._unit} keep {'nothing, since all failed' if found is None else found}"

    def by_one_shots(self, count: int) -> bool:
        """Whether the best one-shot choice of a size keeps enough.

        Raises:
            UserError: The rows of `dev` are too few to show that anything does.
        """
        config = one_shots(parsed(self.settings(count)))
        enough = self._keeps(count, config, "the best one-shot choice")
        best = full_kept(self._store, self._store.search(config.name))
        if best is not None and best.low < self._least:
            raise UserError(
                f"{self._asked}: `dev` has so few rows that even a candidate with all of the full model's answers is "
                f"only known to keep {100 * best.low:.1f} % with a confidence of 95 %; give more rows, or a smaller "
                "share"
            )
        self._steps -= 1
        if self._steps > 0:
            ends = clock(self._steps * self.took)
            self._observer.on_note(f"{self._asked}: {self._steps} more by one-shot choices until about {ends}")
        return enough

    def by_search(self, count: int) -> bool:
        """Whether the winner of a search at a size keeps enough."""
        config, found = parsed(self.settings(count)), self.kept.get(count)
        if found is not None and found.low < self._least and one_shots(config).phases == config.phases:
            return False  # the search has no other candidates
        return self._keeps(count, config, "a search")

    def limit_candidates(self, count: int, begun: float) -> None:
        """Choose the number of candidates so that two searches fit into the request's time, if none has begun yet."""
        config = parsed(self.settings(count))
        found = _stored(self._store, config.name)
        if found is not None:
            evaluations = sum(phase.evaluations for phase in parse_stored_config(found.config).phases)
        else:
            evaluations, _ = plan_time(self._request, config, begun, self._probe, self._workers.lend, self._observer, 2)
        self._data = with_evaluations(self._data, evaluations)

    def _keeps(self, count: int, config: RunConfig, how: str) -> bool:
        now, known = time.monotonic(), self._store.calibrations()
        self.kept[count] = found = self._winner_kept(count, config)
        contents = map(self._store.calibration, set(self._store.calibrations()).difference(known))
        calibrating = sum(Calibration.from_bytes(content).seconds for content in contents if content is not None)
        self.took = time.monotonic() - now - calibrating
        enough = found is not None and found.low >= self._least
        self._observer.on_note(f"{self.phrase(count)} by {how}, {'enough' if enough else 'too little'}")
        return enough

    def _winner_kept(self, count: int, config: RunConfig) -> Kept | None:
        """Run a search, or what is left of it."""
        refuse_other_settings(self._store, config, folder_of(self._request))
        changes = {name: getattr(config, name) for name in ("name", "genome", "phases", "final", "skip_phases_at")}
        setup = with_changes(self._setup, **changes)
        observer = Observer(
            on_stage=lambda stage: self._observer.on_stage(f"{count} {self._unit}: {stage}"),
            on_progress=self._observer.on_progress,
        )
        execute(recorded(setup, self._store, call=self._probe.call), self._store, observer, self._workers.lend)
        found = winner_kept(self._store, self._store.search(config.name))
        return None if found is None else found.kept


def refuse_other_settings(store: StoreReader, config: RunConfig, folder: Path) -> None:
    """Refuse a search of the same name with other settings, in terms of a shrink into a folder."""
    found = _stored(store, config.name)
    if found is not None and found.config_hash != config.config_hash:
        raise UserError(
            f"--output {folder}: the store has a search {config.name} with other settings; choose another folder, or "
            "another store with --store"
        )


def _stored(store: StoreReader, name: str) -> SearchRecord | None:
    """The search of a name; None if there is none."""
    return next((one.search for one in store.searches() if one.search.name == name), None)
