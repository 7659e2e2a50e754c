"""The record of a shrink: what it has decided, done and found, kept in the store.

The shrink alone writes it, a step at a time. A repeated command, pages and the HTTP API read it, on whatever machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import JsonValue, TypeAdapter

from moevolve.evaluators.errors import UserError
from moevolve.search.interface.opening import opened_store
from moevolve.search.results.kept import Kept
from moevolve.search.running.observer import Observer
from moevolve.search.shrink.findings import Speed, TaskCheck, TaskLook, Written
from moevolve.search.shrink.goal import Goal
from moevolve.search.shrink.loops import Loops
from moevolve.store.errors import MissingStoreError, parsing
from moevolve.store.leases import this_process
from moevolve.store.reader import StoreReader
from moevolve.store.records import StoredShrink
from moevolve.store.repository import Store

Stage = Literal["data", "settings", "look", "sizes", "plan", "search", "checks", "export", "speed"]
Status = Literal["running", "finished", "refused", "interrupted", "failed"]

STAGES: Mapping[Stage, str] = {
    "data": "reading the data",
    "settings": "choosing settings for the model and this machine",
    "look": "asking the full model",
    "sizes": "trying sizes",
    "plan": "measuring how many candidates there is time for",
    "search": "searching",
    "checks": "checking the winner's answers",
    "export": "writing the checkpoint, and comparing it with the model",
    "speed": "measuring speed and memory",
}


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A size that was tried, and what its winner keeps of the full model's score.

    Attributes:
        size: Number of experts per layer, or of neurons of a dense model's networks.
        search: Name of the search whose winner was scored.
        searched: True for the search at the size found, false for the one-shot choices.
        kept: What is kept on `dev`; None if every candidate failed.
        enough: True if at least the requested share is kept with 95 % confidence.
    """

    size: int
    search: str
    searched: bool
    kept: Kept | None
    enough: bool


@dataclass(frozen=True, slots=True)
class Checks:
    """What a winner's answers are like.

    Attributes:
        winner: The individual that was checked.
        seconds: Longest time for the answers.
        tasks: By task, then by domain of the general set.
        loops: Of all prompts together; None if nothing was answered.
    """

    winner: str
    seconds: float
    tasks: tuple[TaskCheck, ...]
    loops: Loops | None

    @property
    def about_loops(self) -> str:
        """What is known of loops, as a sentence without its full stop."""
        if self.loops is None:
            return (
                "Nothing was answered, since neither the full model nor the candidate fits on the device: loops, "
                "broken JSON and lost calls are unknown"
            )
        return str(self.loops)

    @property
    def faults(self) -> list[str]:
        """What exceeds the limits, each as a sentence."""
        found = [f"{check.task}: the candidate {fault}" for check in self.tasks for fault in check.faults]
        if self.loops is not None and self.loops.fault is not None:
            found.append(f"all prompts: the candidate {self.loops.fault}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkRecord:
    """The state of a shrink.

    Attributes:
        name: Name of the shrink, and of its search, or the beginning of its searches' names with --keep-score.
        asked: Parameters of the request, by name.
        request: What its settings depend on, by option; see `Goal.signature`.
        amount: The option that says how much is kept, with its value.
        unit: What the sizes of --keep-score count, such as `of 32 experts`; else empty.
        model: The model's path or id.
        folder: Folder of the new checkpoint.
        run_file: Its settings as a run file, for people and for `moevolve launch`.
        owner: Name of the process that works on it, or did last; see `this_process`.
        failure: Why it failed or was interrupted; None otherwise.
        ends_at: End that was planned for --time; None without it, and before it is planned.
        config: Settings of the search as JSON, with --keep-score at the largest size until one is found; None before
            they are chosen.
        choices: Sentences about what is kept, and what was chosen for a time or a score.
        weight_bytes: Bytes of the source checkpoint's weight files.
        search: Name of the search whose winner is exported; None until it is known.
        seconds: Duration of each stage that has ended; of one that was continued, of its last part.
    """

    name: str
    asked: Mapping[str, JsonValue]
    request: Mapping[str, str]
    amount: str
    model: str
    folder: Path
    run_file: Path
    status: Status = "running"
    owner: str = ""
    stage: Stage = "data"
    failure: str | None = None
    ends_at: datetime | None = None
    config: str | None = None
    choices: tuple[str, ...] = ()
    look: tuple[TaskLook, ...] | None = None
    unit: str = ""
    weight_bytes: int = 0
    sizes: tuple[SizeTrial, ...] = ()
    search: str | None = None
    checks: Checks | None = None
    written: Written | None = None
    speed: Speed | None = None
    seconds: Mapping[Stage, float] = field(default_factory=dict)

    @property
    def searches(self) -> tuple[str, ...]:
        """Names of its searches, in the order in which they ran."""
        return tuple(dict.fromkeys([*(trial.search for trial in self.sizes), *filter(None, [self.search])]))

    @property
    def is_over(self) -> bool:
        """Whether no step is left, but of the same command if that is given again."""
        return self.status != "running"


_ADAPTER = TypeAdapter(ShrinkRecord)


def read_shrinks(store: StoreReader) -> list[ShrinkRecord]:
    """Return the records of all shrinks of a store, the one that changed last first.

    Raises:
        DamagedError: One has another form.
    """
    return [_read(stored) for stored in store.shrinks()]


def find_shrink(store: StoreReader, name: str) -> ShrinkRecord | None:
    """Return the record of the shrink of a name, or of the one that made the search of this name; None without."""
    stored = store.shrinks()
    found = next((one for one in stored if one.name == name), None)
    found = found or next((one for one in stored if name in one.searches), None)
    return None if found is None else _read(found)


def known_store(goal: Goal) -> AbstractContextManager[Store | None]:
    """Open the request's store; None for a dry run or without a store yet: a refused request makes none.

    Raises:
        StoreError: It can't be opened, or can't be made.
    """
    if goal.open_store is not None:
        return nullcontext(None if goal.request.dry_run else goal.open_store)
    try:
        store = opened_store(goal.store)
    except MissingStoreError:
        return nullcontext()
    if goal.request.dry_run:
        with store:
            return nullcontext()
    return store


def known_record(goal: Goal, store: Store | None) -> ShrinkRecord | None:
    """Return the record of the same request; None for a new one. Nothing is written.

    Raises:
        UserError: The store has a search or a shrink of this name for another request, or the folder is taken; the
            message says all of that.
    """
    asked, known = goal.signature(), None if store is None else find_shrink(store, goal.name)
    empty = goal.folder.is_dir() and not any(goal.folder.iterdir())
    taken = goal.folder.is_symlink() or (goal.folder.exists() and not empty)
    other = "another --output" if taken else "another --output or --store"
    if store is not None and known is not None and dict(known.request) != asked:
        if any(_is_stored(store, search) for search in known.searches):
            raise UserError(
                f"--output {goal.folder}: {goal.name} was asked for something else: {_difference(known, asked)}; "
                f"repeat that command with the same files, or choose {other}"
            )
        known = None
    if store is not None and known is None and _is_stored(store, goal.name):
        raise UserError(f"--output {goal.folder}: the store has a search {goal.name} already; choose {other}")
    if taken and (known is None or known.written is None):
        raise UserError(f"--output {goal.folder} exists and isn't empty; choose another folder, or remove it")
    return known


def parse_record(text: str) -> ShrinkRecord:
    """Return the record in the column of shrinks."""
    return _ADAPTER.validate_json(text)


def _read(stored: StoredShrink) -> ShrinkRecord:
    with parsing(f"the record of shrink {stored.name}"):
        return parse_record(stored.content)


class Journal:
    """Writes the record of one shrink, as it goes on.

    Args:
        store: Store of the record; None keeps it in this process alone.
        observer: Told of every stage.
        record: The state so far.
    """

    def __init__(self, store: Store | None, observer: Observer, record: ShrinkRecord) -> None:
        self._store, self._observer = store, observer
        self.record = record

    @classmethod
    def begin(cls, goal: Goal, store: Store | None, observer: Observer, known: ShrinkRecord | None) -> Self:
        """Begin the record of a request, or go on with the `known` one of the same request."""
        record = known or ShrinkRecord(
            name=goal.name,
            asked=goal.asked,
            request=goal.signature(),
            amount=str(goal.amount),
            model=goal.request.model,
            folder=goal.folder.resolve(),
            run_file=goal.files / "run.yaml",
        )
        journal = cls(store, observer, record)
        journal.note(status="running", failure=None, owner=this_process())
        return journal

    def keep_in(self, store: Store) -> None:
        """Keep the record in a store from now on."""
        self._store = store
        self.note()

    def note(self, **changes: Any) -> None:
        """Change fields of the record, in the store as well."""
        self.record = replace(self.record, **changes)
        if self._store is not None:
            content = _ADAPTER.dump_json(self.record).decode()
            self._store.record_shrink(StoredShrink(self.record.name, self.record.searches, content))

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Record that a stage begins, and how long it took."""
        self._observer.on_stage(STAGES[stage])
        self.note(stage=stage)
        begun = time.monotonic()
        yield
        self.note(seconds={**self.record.seconds, stage: time.monotonic() - begun})

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Record how the block ends, unless it has recorded that itself."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):  # the latter by Ray's own handler of SIGTERM, while it starts
            self.note(status="interrupted")
            raise
        except Exception as error:
            self.note(status="failed", failure=str(error) or type(error).__name__)
            raise


def _is_stored(store: StoreReader, search: str) -> bool:
    return any(one.search.name == search for one in store.searches())


def _difference(known: ShrinkRecord, asked: Mapping[str, str]) -> str:
    """Say what another request of the same name differs in, by option."""
    changes = []
    for option in sorted({*known.request, *asked}):
        before, now = (each.get(option) for each in (known.request, asked))
        if before is None or now is None:
            changes.append(f"{option} {'is new' if before is None else 'is missing'}")
        elif before != now:
            changes.append(
                f"{option} has changed" if option.startswith("--data") else f"{option} was {before}, not {now}"
            )
    return ", ".join(changes)
