"""What notebooks show of a search that was launched or resumed: its final table, and its picture."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Self, overload

from moevolve._asking import Watched, ask
from moevolve.evaluators.scales import SCALES
from moevolve.evaluators.types import SCORED
from moevolve.search.interface.parameters import SILENT
from moevolve.search.interface.plot import PlotRequest
from moevolve.search.interface.tables import data_frame, html_table
from moevolve.search.loop.final_table import FinalTable, Score

if TYPE_CHECKING:
    import pandas as pd

    from moevolve.search.config.run import RunConfig
    from moevolve.search.running.observer import Observer

P = ParamSpec("P")


@dataclass(frozen=True)
class Picture:
    """A picture, as the text of an SVG document, that notebooks show."""

    svg: str = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.svg


class Run(FinalTable):
    """The winner and the final table of a search that was launched or resumed; notebooks show it as a table."""

    _store: str

    @classmethod
    def of(cls, table: FinalTable, store: str) -> Self:
        """Make the run of a final table and the URL of the search's store or server."""
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
        return Picture(ask(self._store, PlotRequest(self.search, individual=individual)).decode())

    def to_pandas(self) -> pd.DataFrame:
        """The final table as a data frame: a row for each model and task, scores in [0, 1].

        Raises:
            UserError: pandas isn't installed.
        """
        return data_frame(self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows(lambda score: SCALES[score.scale].phrase(score.score)))

    def _rows(self, shown: Callable[[Score], Any] = lambda score: score.score) -> list[dict[str, Any]]:
        return [
            {
                "model": entry.label,
                "individual": entry.ref,
                "task": task,
                **{split: None if (found := entry.score(task, split)) is None else shown(found) for split in SCORED},
                "parameters": entry.parameters,
                "active_parameters": entry.active_parameters,
            }
            for task in (*self.tasks, *self.others)
            for entry in self.entries
        ]


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
