"""What notebooks show of a search that was launched or resumed: its final table, and its picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, overload

from moevolve._asking import Watched, ask
from moevolve.evaluators.scales import SCALES
from moevolve.search.interface.parameters import SILENT
from moevolve.search.interface.report import PlotFileRequest, PlotRequest
from moevolve.search.interface.request import one_line_errors
from moevolve.search.interface.searches import FinalTableRequest
from moevolve.search.interface.tables import data_frame
from moevolve.search.loop.final_table import FinalTable, Score

if TYPE_CHECKING:
    import pandas as pd

    from moevolve.search.config.run import RunConfig
    from moevolve.search.running.observer import Observer
    from moevolve.store.reader import StoreReader

P = ParamSpec("P")


class Picture:
    """A search's picture, which notebooks show and `save` writes."""

    def __init__(self, store: str, search: str, individual: str | None) -> None:
        self._store, self._search, self._individual = store, search, individual
        self._svg = ask(store, PlotRequest(search, individual=individual)).decode()

    def save(self, path: str | Path) -> Path:
        """Write the picture to a file (.png, .svg, .pdf), and return its path.

        Raises:
            UserError: the file can't be written, or has another ending.
        """
        with one_line_errors():
            request = PlotFileRequest(self._search, path=Path(path), individual=self._individual)
        ask(self._store, request)
        return request.path

    def _repr_svg_(self) -> str:
        return self._svg

    def __repr__(self) -> str:
        shown = self._search if self._individual is None else f"{self._search} and {self._individual}"
        return f"<picture of {shown}: a notebook shows it, save(path) writes it as .png, .svg or .pdf>"


class Run(FinalTable):
    """The winner and the final table of a search that was launched or resumed; notebooks show it as a table."""

    _store: str

    @classmethod
    def of(cls, table: FinalTable, store: str) -> Self:
        """Make the run of a final table and the URL of the search's store."""
        run = cls(**vars(table))
        object.__setattr__(run, "_store", store)  # no field: it may contain a password, and is no part of the table
        return run

    def plot(self, individual: str | None = None) -> Picture:
        """Draw the search: scores over evaluations, and the searched parameters of one individual.

        Args:
            individual: Draw this individual's genome (SEARCH:INDEX) instead of the winner's.

        Raises:
            UserError: nothing was evaluated, or the search was stored without the facts of its model.
        """
        return Picture(self._store, self.search, individual)

    def to_pandas(self) -> pd.DataFrame:
        """The final table as a data frame: a row for each model and task.

        Scores are in %, or perplexities where `scale` is `perplexity`.

        Raises:
            UserError: pandas isn't installed.
        """

        def value(found: Score) -> float | None:
            return None if found.score is None else SCALES[found.scale].value(found.score)

        rows = self.rows(value, lambda count, _: count)
        for row in rows:
            found = (each.scale for entry in self.entries for each in entry.scores if each.task == row["task"])
            row["scale"] = next(found, None)
        return data_frame(rows)


def load(store: str | StoreReader, search: str) -> Run:
    """Load a stored search as `launch` returns it, without continuing it: its final table as far as it is measured.

    Args:
        store: URL of the store, or an open store, which is left open.
        search: Name or id of the search.

    Raises:
        StoreError: there is no such store or search.
    """
    return Run.of(ask(store, FinalTableRequest(search)), store if isinstance(store, str) else store.url)


@overload
def run_of(function: Callable[P, FinalTable]) -> Watched[P, Run]: ...
@overload
def run_of(function: Callable[P, FinalTable | None]) -> Watched[P, Run | None]: ...
def run_of(function: Callable[..., FinalTable | None]) -> Any:
    """Have a function that runs a search return its final table as a `Run`."""

    @wraps(function)
    def call(*args: Any, observer: Observer = SILENT, **kwargs: Any) -> Run | None:
        begun: list[RunConfig] = []

        def begin(config: RunConfig) -> None:
            begun.append(config)
            observer.on_begin(config)

        table = function(*args, observer=replace(observer, on_begin=begin), **kwargs)
        return None if table is None else Run.of(table, begun[0].store)

    signature = inspect.signature(function)
    returned = str(signature.return_annotation).replace("FinalTable", "Run")
    call.__signature__ = signature.replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call
