"""What a request to shrink asks for, read once: how much to keep, in how much time, and where the result goes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from moevolve.evaluators.errors import UserError, path_fault
from moevolve.search.config.files import override_lines, settings_of
from moevolve.search.config.run import RunConfig
from moevolve.search.shrink.data.files import DATA_FILES
from moevolve.search.shrink.parameters import ShrinkParameters
from moevolve.search.text import quantity
from moevolve.store.repository import Store

AmountKind = Literal["experts", "neurons", "size", "keep_score", "active"]
_AMOUNTS: tuple[AmountKind, ...] = ("experts", "neurons", "size", "keep_score", "active")
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DURATIONS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
# Parameters that a search's settings depend on, besides its data and the overrides.
_DECIDING = ("model", *_AMOUNTS, "tasks", "columns", "metric")
_DECIDING += ("evaluations", "time", "repair", "custom_code", "seed")
# The guard takes a share of --time, or without it of the search's time within limits. A loop shows in answers of a
# hundred tokens.
_GUARD_SHARE, _GUARD_OF_SEARCH, _GUARD_LEAST, _GUARD_MOST = 0.1, 0.25, 60, 1800
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Amount:
    """How much of a model is kept.

    Attributes:
        kind: The parameter that says so.
        text: Its value as the user gave it.
        share: A share in (0, 1); None for a number of experts, or a size.
        number: A number of experts, or bytes; 0 for a share.
    """

    kind: AmountKind
    text: str
    share: float | None = None
    number: int = 0

    def __str__(self) -> str:
        return f"--{self.kind.replace('_', '-')} {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a request asks for, in values that are sensible whatever the model and the data are.

    Attributes:
        request: The request, whose other parameters are taken as they are.
        name: Name of the shrink, and of its search.
        folder: Folder of the new checkpoint.
        files: Folder of the run file and the task files, beside it.
        store: URL of the store.
        open_store: The store, if the request brings an open one.
        overrides: Lines `KEY=VALUE`.
        seconds: Time for everything; None if it isn't limited.
        guard: Seconds of --guard-time; None if it isn't given.
        asked: The request's parameters by name, but for the store: what gives the same request again.
    """

    request: ShrinkParameters
    amount: Amount
    name: str
    folder: Path
    files: Path
    store: str
    open_store: Store | None
    data: tuple[Path, ...]
    overrides: tuple[str, ...]
    seconds: float | None
    guard: float | None
    asked: Mapping[str, JsonValue]

    @property
    def fits(self) -> Path:
        """Folder of fitted weights, which exists while the shrink runs: its checks and export reuse the winner's."""
        return self.files / "fits"

    def guard_seconds(self, searched: float = 0.0) -> float:
        """Return the longest time for the answers of the guard, after a search of so many seconds."""
        if self.guard is not None:
            return self.guard
        if self.seconds is not None:
            return _GUARD_SHARE * self.seconds
        return min(max(_GUARD_OF_SEARCH * searched, _GUARD_LEAST), _GUARD_MOST)

    def guard_plan(self) -> str:
        """Say before the search what the guard will ask, and how long the answers may take."""
        limit = f"{self.guard_seconds():.0f} s"
        if self.guard is None and self.seconds is None:
            limit = f"{_GUARD_OF_SEARCH:.0%} of the time that the search takes, but from {limit} to {_GUARD_MOST:,} s"
        return (
            "then the models answer held-out prompts of your files and of general ones (questions, code, JSON, German, "
            f"Spanish): at most {limit} (--guard-time), besides loading and repairs; the search keeps what your "
            "files ask for, so add a file for everything else that you need"
        )

    def signature(self) -> dict[str, str]:
        """Return what the settings of the search depend on, by option, each as text; a file by its content.

        Raises:
            UserError: A file of requests can't be read.
        """
        found = {f"--{name.replace('_', '-')}": self.asked[name] for name in _DECIDING}
        options = {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}
        files = {f"--data {path}": _digest(path) for path in self.data}
        return options | files | {f"--set {line}": "" for line in self.overrides}


def read_goal(request: ShrinkParameters) -> Goal:
    """Read the values of a request's parameters, and refuse what would fail after hours of searching.

    Raises:
        UserError: The request is wrong, whatever the model and the data are.
    """
    _refuse_contradictions(request)
    amount = _amount_of(request)
    model, overrides = Path(request.model), override_lines(request.overrides)
    stem = model.stem if model.suffix == ".gguf" else model.resolve().name if model.exists() else model.name
    folder = Path(request.output or f"{stem}-{amount.text.strip().replace('%', 'pct')}")
    name, store = _named(folder, overrides)
    given = request.store
    asked = request.arguments() | {"output": folder.resolve()}
    del asked["store"]
    return Goal(
        request=request,
        amount=amount,
        name=name,
        folder=folder,
        files=folder.resolve().with_name(f"{folder.resolve().name}.shrink"),
        store=given.url if isinstance(given, Store) else given or store,
        open_store=given if isinstance(given, Store) else None,
        data=tuple(map(Path, request.data)),
        overrides=overrides,
        seconds=None if request.time is None else seconds_of(request.time),
        guard=None if request.guard_time is None else seconds_of(request.guard_time, "--guard-time"),
        asked=json.loads(json.dumps(asked, default=str)),
    )


def _refuse_contradictions(request: ShrinkParameters) -> None:
    """Raise UserError if parameters of a request don't go together."""
    if not request.data and not request.tasks:
        raise UserError("say what the model is for: --data PATH, or --task NAME")
    if request.metric is not None and not request.data:
        raise UserError(
            f"--metric {request.metric} requires --data; a task names its own function: "
            "matching: {function: FILE.py:NAME}"
        )
    if request.keep_score is not None and request.dry_run:
        raise UserError("--keep-score finds the size by searching, which --dry-run leaves out; give one of them")
    if request.time is not None and request.evaluations is not None:
        raise UserError("--time and --evaluations both set the number of candidates; give one of them")


def _amount_of(request: ShrinkParameters) -> Amount:
    """Return how much is kept, from the parameters that say so.

    Raises:
        UserError: There are several or none of them, or they ask for nothing or for all.
    """
    values = [(kind, text) for kind in _AMOUNTS if (text := getattr(request, kind)) is not None]
    if len(values) != 1:
        raise UserError(
            "give one of --experts (for example 50%), --neurons (for example 12.5%), --size (for example 16GiB) and "
            "--keep-score (for example 99%), or for a dense model --active (for example 50%)"
        )
    kind, text = values[0]
    amount, share = Amount(kind, text), _share(text)
    if kind == "size":
        size = quantity(text.lower(), _UNITS)
        if size is None:
            raise UserError(f"{amount}: give a number with a unit, such as 16GiB, 700MB or 1.5TB")
        return Amount(kind, text, number=int(size))
    if kind == "experts" and share is None:
        if not re.fullmatch(r"\s*0*[1-9]\d{0,5}\s*", text):
            raise UserError(f"{amount}: give a number such as 8, or a share such as 50%")
        return Amount(kind, text, number=int(text))
    if kind == "keep_score" and (share is None or share == 1):
        raise UserError(f"{amount}: give a share below 100%, such as 99%; no number of rows shows that nothing is lost")
    if share == 1:
        raise UserError(f"{amount} keeps everything; give a smaller share")
    if share is None:
        raise UserError(f"{amount}: give a share such as 12.5%")
    return Amount(kind, text, share)


def _share(text: str) -> float | None:
    """Read a share such as `12.5%` as a number in (0, 1]; None if it isn't one."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    return float(found[1]) / 100 if found is not None and 0 < float(found[1]) <= 100 else None


def seconds_of(text: str, option: str = "--time") -> float:
    """Read a duration such as `2h` or `90min`, the value of an option, in seconds.

    Raises:
        UserError: It isn't one.
    """
    found = quantity(text, _DURATIONS)
    if found is None:
        raise UserError(f"{option} {text}: give a number with a unit, such as 2h, 90min or 1.5d")
    return found


def _named(folder: Path, overrides: tuple[str, ...]) -> tuple[str, str]:
    """Return the name and the store of a shrink into a folder: its settings', else what the folder is called."""
    settings = settings_of(overrides)
    # The folder's name, without what names of searches can't have.
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("-._") or "shrink"
    store = settings.get("store", RunConfig.model_fields["store"].default)
    return str(settings.get("name", slug)), str(store)


def _digest(path: Path) -> str:
    """Return SHA-256 (hex) of a file's content, or of all files in a folder; empty for a data set of the hub."""
    if not path.exists() and path.suffix.lower() in DATA_FILES:
        raise UserError(f"--data {path}: no such file")
    found = hashlib.sha256()
    try:
        for file in _files(path):
            found.update(f"{file.relative_to(path)}\n".encode())
            with file.open("rb") as content:
                while block := content.read(_BLOCK):
                    found.update(block)
    except OSError as error:
        raise UserError(f"--data {path_fault(error, path) or error}") from None
    return found.hexdigest() if path.exists() else ""


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (each for each in sorted(path.rglob("*")) if each.is_file())
    elif path.exists():
        yield path
