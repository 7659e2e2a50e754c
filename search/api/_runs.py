"""What notebooks show of a search that was launched or resumed: its final table, and its picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from moevolve._asking import ask
from moevolve.evaluators.types import SCORED
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.requests.searches import PlotRequest
from moevolve.search.requests.tables import data_frame, html_table

if TYPE_CHECKING:
    import pandas as pd


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
        return html_table(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "model": entry.label,
                "individual": entry.ref,
                "task": task,
                **{split: None if (found := entry.score(task, split)) is None else found.score for split in SCORED},
                "parameters": entry.parameters,
                "active_parameters": entry.active_parameters,
            }
            for task in (*self.tasks, *self.others)
            for entry in self.entries
        ]
