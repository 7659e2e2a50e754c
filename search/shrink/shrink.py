"""From a request to a smaller checkpoint, data, settings, a first look, the size or the time, search, checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from shutil import rmtree

import yaml

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import read_function
from moevolve.evaluators.text_files import writing_into
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.interface.opening import opened_store
from moevolve.search.loop.final_table import FinalTable
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.running.execute import execute, ray_pool
from moevolve.search.running.launch import recorded, set_up_new
from moevolve.search.running.observer import Observer
from moevolve.search.running.study import SharedWorkers
from moevolve.search.shrink.checkpoint import finish
from moevolve.search.shrink.data.columns import read_columns
from moevolve.search.shrink.data.domains import DEV_ROWS, has_template, read_domains, render_chats, write_tasks
from moevolve.search.shrink.data.messages import Chat
from moevolve.search.shrink.first_look import first_look, wrong_task
from moevolve.search.shrink.goal import Goal
from moevolve.search.shrink.keeping import refuse_losing, smallest
from moevolve.search.shrink.record import Journal, known_record, known_store
from moevolve.search.shrink.result import ShrinkPlan, ShrinkResult, result_of
from moevolve.search.shrink.settings import (
    planned_bytes,
    provisional,
    settings_for,
    source_bytes,
)
from moevolve.search.shrink.timing import plan_time, shortened
from moevolve.store.repository import Store
from moevolve.workers.export.folder import check_room

# Most rows of `dev` for --keep-score. Of 192 rows all can be right, and it isn't known yet that 99 % are.
_KEPT_ROWS = 576


def shrink(goal: Goal, observer: Observer, begun: float) -> ShrinkResult | ShrinkPlan:
    """Search for the smaller checkpoint that a request describes, check it and write it.

    Args:
        goal: What is asked for.
        observer: It is told every step, and the plan.
        begun: When the request was made, in seconds of `time.monotonic`.

    Raises:
        UserError: The request doesn't suit the model, or the full model doesn't know a task; nothing has been searched
            then.
        ExportError: The checkpoint is larger than requested.
    """
    with ExitStack() as opened:
        store = opened.enter_context(known_store(goal))
        known = known_record(goal, store)
        if store is not None and known is not None and known.status == "finished" and goal.folder.is_dir():
            found = result_of(store, known)
            if found is not None:
                return found
        journal = Journal.begin(goal, store, observer, known)
        opened.enter_context(journal.ending())
        probe = opened.enter_context(ModelProbe())
        workers = SharedWorkers(partial(ray_pool, probe=probe, fits=goal.fits))
        opened.callback(workers.close)
        steps = _Steps(goal, journal, probe, workers, observer, begun)
        with _removed_if_refused(goal.files):
            config = steps.settings()
            steps.look(config)
            if store is None and not goal.request.dry_run:
                store = opened.enter_context(opened_store(goal.store, create=True))
                journal.keep_in(store)
            config = steps.sized(config, store)
            # People read the settings of the search there, and so does `moevolve launch`.
            path = journal.record.run_file
            head = "".join(f"# {sentence}\n" for sentence in journal.record.choices)
            text = yaml.safe_dump(
                config.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True
            )
            with writing_into(path.parent):
                path.write_text(head + text, encoding="utf-8")
            if store is None:
                return ShrinkPlan(path, path.read_text(encoding="utf-8"))
        table = steps.search(config, store)
        finish(goal, store, journal, table, observer)
        rmtree(goal.fits, ignore_errors=True)
        found = result_of(store, journal.record)
        assert found is not None  # its search has ended
        return found


class _Steps:
    """The steps up to the end of the search; each that the record has already isn't done again."""

    def __init__(
        self,
        goal: Goal,
        journal: Journal,
        probe: ModelProbe,
        workers: SharedWorkers,
        observer: Observer,
        begun: float,
    ) -> None:
        self._goal, self._journal, self._probe = goal, journal, probe
        self._workers, self._observer, self._begun = workers, observer, begun

    def settings(self) -> RunConfig:
        """Write the tasks, and choose settings of the search, with --keep-score at the largest size."""
        goal, journal = self._goal, self._journal
        known = journal.record.config
        if known is None or not goal.files.is_dir():
            with journal.stage("data"):
                tasks = self._tasks()
        if known is not None:
            # Memory that is free now must not change a search that has begun.
            return parse_stored_config(known, goal.name).model_copy(update={"store": goal.store})
        with journal.stage("settings"):
            names = [*goal.request.tasks, *(str(task.resolve()) for task in tasks)]
            config, sentence = settings_for(goal, names, self._probe, self._observer.on_stage)
            config = config.model_copy(update={"store": goal.store})
            if sentence:
                self._observer.on_note(sentence)
            self._note_lost_roles(config)
            size = self._probe.call(source_bytes, config)
            journal.note(config=config.canonical_json(), choices=(sentence,) if sentence else (), weight_bytes=size)
        return config

    def _note_lost_roles(self, config: RunConfig) -> None:
        """Say so if a conversation's roles are lost, since the model has no template to write them."""
        chats = [section.name for section in config.tasks if section.task().turns is not None]
        if chats and config.engine.chat_template == "auto" and not self._probe.call(has_template, config):
            names = ", ".join(Path(name).stem for name in chats)
            self._observer.on_note(
                f"{names}: the model has no chat template, so that turns and system prompts are joined as plain text "
                "without their roles; --set engine.chat_template=NAME uses one that ships, `none` is silent"
            )

    def _tasks(self) -> list[Path]:
        """Write a task file for each file of requests."""
        goal = self._goal

        def render(chats: tuple[Chat, ...]) -> tuple[tuple[str, str | None], ...] | None:
            return self._probe.call(render_chats, provisional(goal), chats)

        rows = _KEPT_ROWS if goal.amount.kind == "keep_score" else DEV_ROWS
        columns = None if goal.request.columns is None else read_columns(goal.request.columns)
        metric = None if goal.request.metric is None else read_function(goal.request.metric, Path(), "--metric")
        domains = read_domains(goal.data, render, columns, metric, rows)
        with writing_into(goal.files):
            return write_tasks(domains, goal.files / "tasks")

    def look(self, config: RunConfig) -> None:
        """Look at the full model, and refuse to search for what it can't do itself, unless the request forces that."""
        goal, found = self._goal, self._journal.record.look
        if not goal.folder.exists():  # the same request may have written it
            check_room(goal.folder, self._probe.call(planned_bytes, config))
        if found is None:
            with self._journal.stage("look"):
                found = first_look(config, self._probe)
                self._journal.note(look=found)
                for line in (line for task in found for line in task.lines()):
                    self._observer.on_note(line)
        wrong = wrong_task(found)
        if wrong is not None and not goal.request.force:
            raise UserError(wrong)

    def sized(self, config: RunConfig, store: Store | None) -> RunConfig:
        """Find the size that keeps the score, or the number of candidates that there is time for, if that is asked."""
        goal, journal = self._goal, self._journal
        if store is not None:
            with writing_into(goal.files):
                goal.fits.mkdir(exist_ok=True)
        if journal.record.search is not None:
            return config
        choices = journal.record.choices
        if goal.amount.kind == "keep_score":
            assert store is not None
            with journal.stage("sizes"):
                config, sentence = smallest(
                    goal.amount, config, store, journal, self._probe, self._workers, self._observer
                )
            choices = (sentence,)
        if goal.seconds is not None:
            with journal.stage("plan"):
                number, ends_at, sentence = plan_time(
                    goal, config, self._begun, self._probe, self._workers.lend, self._observer, store
                )
            config = config.model_copy(update={"phases": shortened(config.phases, number)})
            choices = (*choices, sentence)
            journal.note(ends_at=ends_at)
        journal.note(config=config.canonical_json(), choices=choices, search=config.name)
        return config

    def search(self, config: RunConfig, store: Store) -> FinalTable:
        """Run the search, or what is left of it."""
        self._observer.on_note(self._goal.guard_plan())
        with self._journal.stage("search"):
            setup = set_up_new(config, self._probe.call)
            setup = recorded(setup, store, str(self._journal.record.run_file), call=self._probe.call)
            self._observer.on_begin(setup.config)
            table = execute(setup, store, self._observer, self._workers.lend)
            self._workers.close()  # the checks need the memory
        if self._goal.amount.kind == "keep_score":
            refuse_losing(self._journal, store, self._goal.amount, config)
        return table


@contextmanager
def _removed_if_refused(folder: Path) -> Iterator[None]:
    """Delete the folder that a refused request created."""
    was_there = folder.exists()
    try:
        yield
    except UserError:
        if not was_there:
            rmtree(folder, ignore_errors=True)
        raise
