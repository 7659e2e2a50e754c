"""Studies: searches and baselines side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import InstanceOf

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import override_lines
from moevolve.search.config.study import Study, StudyCell, load_study
from moevolve.search.interface.opening import opened_store
from moevolve.search.interface.parameters import SETTINGS, NewStore, Overrides, RayAddress, given_lines
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.running.observer import Observer

if TYPE_CHECKING:  # it loads Ray
    from moevolve.search.results.study import StudyRow

Watchers = Annotated[
    Callable[[int, StudyCell], Observer],
    about("Makes the observer of a search from its index in `study.cells` and its cell."),
]


@record
class StudyRequest(Request):
    """Run searches and baselines side by side, in the store that the study names. Repeating it continues them.

    The answer is the rows of its table: every contestant's scores over seeds, costs and tests.

    Raises:
        UserError: the file is wrong, or a search asks for something that can't be had; nothing has run then.
        StoreError: the store can't be opened.
        PoolError: no worker can be started; repeating it continues the searches.
    """

    config: Annotated[str | Path | InstanceOf[Study], about("Study (YAML)."), Flag(metavar="CONFIG", kind=Path)]
    _: KW_ONLY
    overrides: Annotated[Overrides, about("Override settings, for example base.workers.count=4."), SETTINGS] = ()
    store: NewStore = None
    address: RayAddress = None

    def answer(self, *, observer: Watchers = lambda place, cell: Observer()) -> list[StudyRow]:
        study = self.study()

        from moevolve.search.results.study import study_rows
        from moevolve.search.running.study import run_study

        with opened_store(study.store, create=True) as store:
            return study_rows(run_study(study, store, observer), store)

    def study(self) -> Study:
        """Read the study, unless it was read before."""
        changes = given_lines({"base.store": self.store, "base.workers.address": self.address})
        lines = (*override_lines(self.overrides), *changes)
        if not isinstance(self.config, Study):
            return load_study(Path(self.config), lines)
        if lines:
            raise UserError(f"{lines[0]}: settings change a study while it is read; give them to load_study")
        return self.config
