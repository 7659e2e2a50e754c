"""The smallest size that keeps a share of the full model's score, bisected by one-shot choices.

Every size that is tried is a search of its own in the store, so that a repeated request evaluates none of it again.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import as_override, changed_config
from moevolve.search.config.run import FinalSection, RunConfig
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.results.kept import Kept, full_kept, winner_kept
from moevolve.search.running.execute import execute
from moevolve.search.running.launch import recorded, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.set_up import with_changes
from moevolve.search.running.study import SharedWorkers
from moevolve.search.shrink.amounts import possible_experts
from moevolve.search.shrink.dense import Genome, narrower_genomes
from moevolve.search.shrink.goal import Amount
from moevolve.search.shrink.record import Journal, SizeTrial
from moevolve.search.text import clock
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import ModelFacts

# Calibration tokens, the same for all sizes so that they share one calibration. How many suffice depends on the size:
# 16,384 for a quarter of 32 experts on text (`genome.calibration_loss`).
_TOKENS = 32768


def smallest(
    amount: Amount,
    config: RunConfig,
    store: Store,
    journal: Journal,
    probe: ModelProbe,
    workers: SharedWorkers,
    observer: Observer,
) -> tuple[RunConfig, str]:
    """Find the smallest size whose best one-shot choice keeps the share of the full model's score that is asked for.

    Args:
        amount: The share.
        config: Settings of the search at the largest size.
        store: Store of the searches.
        journal: Gets every size that is tried.
        probe: Process that describes the model.
        workers: Workers of all searches.
        observer: Its `on_note` takes a line for every size that is tried.

    Returns:
        Settings of the search at the size, and a sentence about what its one-shot choice keeps.

    Raises:
        UserError: No size keeps so much, or `dev` has too few rows to show that one does.
    """
    trials = SizeTrials(amount, set_up_new(config, probe.call), store, journal, probe, workers, observer)
    place = bisect_left(trials.counts, True, key=trials.keeps)
    if place == len(trials.counts):
        raise UserError(f"{trials.phrase(trials.counts[-1])}, and fewer keep less; give a smaller share")
    size = trials.counts[place]
    return trials.config(size), f"{trials.phrase(size)} of the full model's score on `dev`, by one-shot choices"


def one_shots(config: RunConfig) -> RunConfig:
    """Return a search of the one-shot choices that another one begins with.

    The best on `search` is repaired as that search's is, and scored on `dev`.
    """
    first, last, final = config.phases[0], config.phases[-1], FinalSection(rerank=1, test=False)
    if not first.named:
        raise UserError("phases.0.init: --keep-score tries sizes by one-shot choices, and it names none")
    count = len(first.named)
    phases = [first.model_copy(update={"evaluations": count, "initial": count, "init": first.named})]
    if last.kind == "repair":
        phases.append(last.model_copy(update={"evaluations": 1}))
    return config.model_copy(update={"name": f"{config.name}-one-shots", "phases": tuple(phases), "final": final})


def genomes_by_size(facts: ModelFacts) -> tuple[str, dict[int, Genome]]:
    """Return words for what the sizes of a model count, and settings of genomes by size, ascending."""
    if facts.dense is not None:
        return f"of {facts.dense.width} neurons", narrower_genomes(facts.dense)
    possible = possible_experts(facts.experts, facts.rule.groups)[:-1]
    return f"of {facts.experts} experts", {count: {"experts": count} for count in possible}


def refuse_losing(journal: Journal, store: Store, amount: Amount, config: RunConfig) -> None:
    """Record what the winner of the search at the size found keeps.

    Raises:
        UserError: It keeps less than is asked for, although a one-shot choice has kept enough.
    """
    point = winner_kept(store, store.search(config.name))
    kept, found = None if point is None else point.kept, journal.record.sizes
    size = min(trial.size for trial in found if trial.enough and not trial.searched)
    enough = kept is not None and amount.share is not None and kept.low >= amount.share
    if not any(trial.searched for trial in found):
        journal.note(sizes=(*found, SizeTrial(size, config.name, True, kept, enough)))
    if not enough:
        larger = min((trial.size for trial in found if trial.size > size and trial.enough), default=size + 1)
        raise UserError(
            f"{amount}: the search's winner with {size} {journal.record.unit} keeps {kept or 'nothing'}, less than its "
            f"one-shot choice kept; give {larger} of them, or a smaller share"
        )


class SizeTrials:
    """Runs searches of one-shot choices that differ in size, on the same workers and with the same calibration.

    Args:
        amount, store, journal, probe, workers, observer: See `smallest`.
        setup: The search at the largest size.

    Attributes:
        counts: The sizes, ascending.
    """

    def __init__(
        self,
        amount: Amount,
        setup: SearchSetup,
        store: Store,
        journal: Journal,
        probe: ModelProbe,
        workers: SharedWorkers,
        observer: Observer,
    ) -> None:
        assert amount.share is not None
        self._amount, self._least, self._setup = amount, amount.share, setup
        self._store, self._journal, self._probe = store, journal, probe
        self._workers, self._observer = workers, observer
        self._unit, self._genomes = genomes_by_size(setup.facts)
        self.counts = list(self._genomes)
        self._left = math.ceil(math.log2(len(self.counts) + 1))
        self._kept: dict[int, Kept | None] = {}
        journal.note(unit=self._unit)
        observer.on_note(
            f"{amount}: {self.counts[0]} to {self.counts[-1]} {self._unit}; at most {self._left} sizes are tried by "
            "one-shot choices, then one is searched"
        )

    def config(self, size: int) -> RunConfig:
        """Return the settings of the search at a size."""
        config = self._setup.config
        changes: dict[str, object] = {f"genome.{name}": value for name, value in self._genomes[size].items()}
        if self._setup.facts.experts:
            changes |= {"genome.calibration_tokens": _TOKENS, "genome.calibration_most": _TOKENS}
        # A winner that is as good as is asked for on `search` may not be on `dev`.
        changes |= {"name": f"{config.name}-{size}", "skip_phases_at": None}
        return changed_config(config, [as_override(key, value) for key, value in changes.items()], str(self._amount))

    def phrase(self, size: int) -> str:
        """Say what is kept at a size."""
        found = self._kept[size]
        return f"{self._amount}: {size} {self._unit} keep {'nothing, since all failed' if found is None else found}"

    def keeps(self, size: int) -> bool:
        """Return whether the best one-shot choice of a size keeps enough.

        Raises:
            UserError: The rows of `dev` are too few to show that anything does.
        """
        config = one_shots(self.config(size))
        begun, known = time.monotonic(), self._store.calibrations()
        changes = {name: getattr(config, name) for name in ("name", "genome", "phases", "final", "skip_phases_at")}
        observer = Observer(
            on_stage=lambda stage: self._observer.on_stage(f"{size} {self._unit}: {stage}"),
            on_progress=self._observer.on_progress,
        )
        setup = recorded(with_changes(self._setup, **changes), self._store, call=self._probe.call)
        execute(setup, self._store, observer, self._workers.lend)
        search = self._store.search(config.name)
        point = winner_kept(self._store, search)
        self._kept[size] = kept = None if point is None else point.kept
        enough = kept is not None and kept.low >= self._least
        trial = SizeTrial(size, config.name, False, kept, enough)
        self._journal.note(sizes=(*(each for each in self._journal.record.sizes if each.search != config.name), trial))
        self._observer.on_note(
            f"{self.phrase(size)} by the best one-shot choice, {'enough' if enough else 'too little'}"
        )
        best = full_kept(self._store, search)
        if best is not None and best.low < self._least:
            raise UserError(
                f"{self._amount}: `dev` has so few rows that even a candidate with all of the full model's answers is "
                f"only known to keep {100 * best.low:.1f} % with a confidence of 95 %; give more rows, or a smaller "
                "share"
            )
        self._say_end(time.monotonic() - begun - self._calibrating(known))
        return enough

    def _calibrating(self, known: list[str]) -> float:
        """Return the seconds of calibrations since those that are known, which no other size makes again."""
        contents = map(self._store.calibration, set(self._store.calibrations()).difference(known))
        return sum(Calibration.from_bytes(content).seconds for content in contents if content is not None)

    def _say_end(self, took: float) -> None:
        self._left -= 1
        if self._left > 0:
            ends = clock(self._left * took)
            self._observer.on_note(f"{self._amount}: {self._left} more by one-shot choices until about {ends}")
