"""Running searches: launching, continuing and retrying them, and studies of several."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import InstanceOf

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import as_run_config, override_lines
from moevolve.search.config.run import RunConfig
from moevolve.search.config.study import Study, StudyCell, load_study
from moevolve.search.interface.opening import opened_reader, opened_store
from moevolve.search.interface.parameters import (
    SETTINGS,
    NewSearchName,
    NewStore,
    Overrides,
    RunFile,
    RunSettings,
    SearchRef,
    given_lines,
)
from moevolve.search.interface.progress import line_observer
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.running.observer import SILENT, Observer
from moevolve.store.errors import StoreError
from moevolve.store.repository import Store

if TYPE_CHECKING:  # it loads SciPy
    from moevolve.search.results.study import StudyRow


@record
class LaunchRequest(Request):
    """Launch a search and follow it to its end. Interrupting it leaves it resumable.

    The answer is the winner and the final table.

    Raises:
        UserError: the configuration asks for something that can't be had, its cluster can't be joined, or the name is
            taken.
        StoreError: the store can't be opened, or the search to continue was cancelled.
        PoolError: no worker can be started; `resume` continues the search.
    """

    config: RunFile
    _: KW_ONLY
    overrides: RunSettings = ()
    store: NewStore = None
    name: NewSearchName = None
    or_resume: Annotated[bool, about("Continue the search of this name if it exists.")] = False

    def answer(self, *, observer: Observer = SILENT) -> FinalTable:
        changes = given_lines({"store": self.store, "name": self.name})
        settings = as_run_config(self.config, (*override_lines(self.overrides), *changes))

        given = settings.store if self.store is None else self.store
        source = "this configuration" if isinstance(self.config, RunConfig) else str(self.config)

        from moevolve.search.running.launch import recorded, refuse_taken, register, set_up_new
        from moevolve.search.running.set_up import refuse_wrong

        refuse_wrong(settings)
        with suppress(StoreError), opened_reader(given) as known:  # making the store says what is wrong with it
            refuse_taken(settings, known, source if self.or_resume else None)

        # Not sooner: what is wrong in a configuration is reported at once, without waiting for Ray.
        from moevolve.search.pools.ray_actor import ModelProbe
        from moevolve.search.running.execute import execute

        with ModelProbe() as probe:
            probe.join(settings)  # a wrong address must not take the search's name
            setup = set_up_new(settings, probe.call)
            with opened_store(given, create=True) as store:
                if self.or_resume:
                    setup = recorded(setup, store, source, probe.call)
                else:
                    register(setup, store)
                observer.on_begin(setup.config)
                return execute(setup, store, observer, probe=probe)


@record
class ResumeRequest(Request):
    """Continue a search from the store; its candidates are those of an uninterrupted search.

    The answer is its final table. A paused search goes on where it runs, without an answer.

    Raises:
        UserError: model, tasks or settings are not what the search was launched with.
        StoreError: the store or search doesn't exist, another process runs it, or it was cancelled.
        PoolError: no worker can be had; try again.
    """

    writes = True
    search: SearchRef
    _: KW_ONLY
    overrides: Annotated[Overrides, about("Change settings of `workers.*` or `final.*`, or `loggers`."), SETTINGS] = ()

    def answer(self, store: Store, *, observer: Observer = SILENT) -> FinalTable | None:
        from moevolve.search.running.resume import resume

        return resume(store, self.search, observer, override_lines(self.overrides))


@record
class RetryRequest(ResumeRequest):
    """Evaluate individuals again that failed because of workers or time limits, and later ones that depended on them.

    The answer is the search's final table; none if nothing failed.

    Raises:
        UserError, StoreError, PoolError: as `resume`.
    """

    def answer(self, store: Store, *, observer: Observer = SILENT) -> FinalTable | None:
        from moevolve.search.running.resume import retry

        return retry(store, self.search, observer, override_lines(self.overrides))


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
    overrides: Annotated[
        Overrides, about("Override the study's settings, for example base.workers.count=4; repeatable."), SETTINGS
    ] = ()
    store: NewStore = None

    def answer(self, *, observer: Observer = SILENT) -> list[StudyRow]:
        study = self.study()

        def observed(place: int, cell: StudyCell) -> Observer:
            # A study takes hours and its log is read afterwards, so each search notes two lines.
            return line_observer(observer.on_note, f"[{place + 1}/{len(study.cells)}] {cell.config.name}", 2)

        from moevolve.search.results.study import study_rows
        from moevolve.search.running.study import run_study

        with opened_store(study.store, create=True) as store:
            return study_rows(run_study(study, store, observed), store)

    def study(self) -> Study:
        """Read the study, unless it was read before."""
        changes = given_lines({"base.store": self.store})
        lines = (*override_lines(self.overrides), *changes)
        if not isinstance(self.config, Study):
            return load_study(Path(self.config), lines)
        if lines:
            raise UserError(f"{lines[0]}: settings change a study while it is read; give them to load_study")
        return self.config
