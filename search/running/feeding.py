"""Feeds loggers while a search runs. What they do or fail to do changes nothing of the search."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread

from moevolve.evaluators.errors import own_words
from moevolve.evaluators.scales import SCALES
from moevolve.search.loop.final_table import build_final_table
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.running.loggers import LOGGERS, LoggedSearch
from moevolve.search.running.observer import Observer
from moevolve.store.errors import StoreError
from moevolve.store.records import Progress
from moevolve.store.repository import Store

# Shortest time between two looks into the store.
_PAUSE_S = 1.0
# How long the end of a search waits for a logger, whose server may be slow or gone.
_WAIT_S = 60.0
# The same if the search was interrupted: someone waits for its end.
_SHORT_WAIT_S = 5.0

_Values = Mapping[str, float]


@contextmanager
def feeding_loggers(setup: SearchSetup, store: Store, observer: Observer) -> Iterator[Observer]:
    """Feed the loggers of a search's configuration in the `with` block; yields the observer for that.

    A logger that fails gets nothing more. The observer's `on_note` gets a line about it once.
    """
    if not setup.config.loggers:
        yield observer
        return
    search = LoggedSearch(setup.config.name, setup.search_id, json.loads(setup.config.canonical_json()))
    feeder = _Feeder(setup, store, observer, search)

    def on_progress(progress: Progress) -> None:
        observer.on_progress(progress)
        feeder.take(progress)

    finished = False
    try:
        yield replace(observer, on_progress=on_progress)
        finished = True
    finally:
        feeder.close(finished)


class _Feeder:
    """Reads what is new of a search in its store, and passes it on."""

    def __init__(self, setup: SearchSetup, store: Store, observer: Observer, search: LoggedSearch) -> None:
        self._setup, self._store, self._observer = setup, store, observer
        self._threads = [_LoggerThread(name, search) for name in setup.config.loggers]
        self._scale = SCALES[setup.scale]
        self._logged: set[int] = set()
        self._first = 0
        self._best: int | None = None
        self._progress: Progress | None = None
        self._looked = -_PAUSE_S

    def take(self, progress: Progress) -> None:
        self._progress = progress
        if time.monotonic() - self._looked >= _PAUSE_S:
            self._looked = time.monotonic()
            self._pass_on()
            self._report()

    def _pass_on(self) -> None:
        self._candidates()
        progress, self._progress = self._progress, None
        if progress is None:
            return
        values = {} if progress.rate is None else {"evaluations_per_second": progress.rate}
        if progress.full is not None:
            values["full_fitness"] = self._scale.value(progress.full)
        if progress.best is not None:
            index, fitness = progress.best
            values["best_fitness"] = self._scale.value(fitness)
            if index != self._best:
                self._best = index
                values["best_parameters"] = self._parameters(index)
        self._put(values, progress.done)

    def close(self, finished: bool) -> None:
        """Pass on the rest, and the final scores of a search that has finished, and wait for the loggers."""
        final: _Values | None = None
        with nullcontext() if finished else suppress(StoreError):  # which may be why it hasn't
            if self._best is None and self._progress is None:  # a search that had ended makes no progress
                self._progress = self._store.control(self._setup.search_id).progress
            self._pass_on()
            final = self._final() if finished else None
        seconds = _WAIT_S if finished else _SHORT_WAIT_S
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.put(final, None)
        for thread in self._threads:
            thread.wait(until - time.monotonic())
        self._report()

    def _candidates(self) -> None:
        found = self._store.fitness_by_index(self._setup.search_id, self._first)
        for index, fitness in sorted(found):
            if index not in self._logged:
                self._logged.add(index)
                self._put({"fitness": self._scale.value(fitness)}, index)
        # No individual before these can still be under evaluation; those that failed have no fitness.
        self._first = max(self._first, max(self._logged, default=0) - self._setup.schedule.window)
        self._logged = {index for index in self._logged if index >= self._first}

    def _parameters(self, index: int) -> float:
        return self._store.individual(f"{self._setup.config.name}:{index}").individual.parameters

    def _final(self) -> dict[str, float]:
        store, search = self._store, self._store.search(self._setup.search_id)
        table = build_final_table(store, search, self._setup.config, store.history(search.id))
        values: dict[str, float] = {}
        for name, entry in (("test", table.best), ("full_test", table.full)):
            for score in () if entry is None else entry.scores:
                if score.split == "test" and score.score is not None:
                    values[f"{name}/{score.task}"] = SCALES[score.scale].value(score.score)
        if table.best is not None and table.best.parameters is not None:
            values["winner_parameters"] = table.best.parameters
        return values

    def _put(self, values: _Values, step: int) -> None:
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        if finite:
            for thread in self._threads:
                thread.put(finite, step)

    def _report(self) -> None:
        for thread in list(self._threads):
            if thread.failure is not None:
                self._threads.remove(thread)
                self._observer.on_note(f"loggers: {thread.failure}; it gets nothing more, and the search goes on")


class _LoggerThread:
    """A logger in a thread of its own, since a server that is slow or gone must not hold up evaluations."""

    def __init__(self, name: str, search: LoggedSearch) -> None:
        self.failure: str | None = None
        self._name, self._search = name, search
        self._queue: SimpleQueue[tuple[_Values | None, int | None]] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def put(self, values: _Values | None, step: int | None) -> None:
        """Pass values on; those without a step are the final ones."""
        self._queue.put((values, step))

    def wait(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self.failure = f"{self._name} has not taken everything before the end"

    def _run(self) -> None:
        try:
            logger = LOGGERS[self._name](self._search)
            while True:
                values, step = self._queue.get()
                if values is None or step is None:
                    logger.close(values)
                    return
                logger.log(values, step)
        except ImportError as error:
            self.failure = f"{self._name} can't be imported ({own_words(error)}): pip install 'moevolve[{self._name}]'"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tracker's client raises ends no search
            self.failure = f"{self._name} has failed: {own_words(error)}"
