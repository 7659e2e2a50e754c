"""The scores of checkpoints, stored individuals and full models on any tasks, beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import computed_field

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import split_fitness
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import scales_title
from moevolve.evaluators.text_files import writing_into
from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.config.files import changed_loading, override_lines
from moevolve.search.config.run import TaskSection
from moevolve.search.interface.opening import opened_store
from moevolve.search.interface.parameters import ModelPath, ModelSettings, SearchOfFull, TaskSplit, Threads
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.evaluation_cache import EvaluationCache
from moevolve.search.loop.scores import Score, outcomes_of, score_of, with_outcomes
from moevolve.search.loop.significance import TaskOutcomes, holm, paired_test
from moevolve.search.running.candidates import Candidate, find_candidate, is_stored, prepared_split
from moevolve.search.running.observer import SILENT, Observer
from moevolve.search.running.weights import resolved_model_path
from moevolve.search.text import parameter_count, score_phrase
from moevolve.store.records import EvaluationRecord
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig, engine_fingerprint

if TYPE_CHECKING:
    from moevolve.workers.worker import EvaluationWorker


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model's scores on one split of some tasks.

    Attributes:
        name: As it was asked for: a checkpoint, `SEARCH:INDEX`, or `full`.
        parameters: Number of parameters.
        records: What is stored, one for each task, with per-example outcomes.
        p_values: Two-sided p-values of paired tests against the first model, one for each task, corrected for the
            number of tests in the table (Holm); None where nothing was tested.
    """

    __repr__ = short_repr

    name: str
    parameters: int
    records: tuple[EvaluationRecord, ...] = field(repr=False)
    p_values: tuple[float | None, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def scores(self) -> tuple[Score, ...]:
        """Scores with 95 % intervals, one for each task."""
        return tuple(map(score_of, self.records))


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Models beside each other on one split of some tasks; the first is the one that others are tested against."""

    __repr__ = short_repr

    tasks: tuple[str, ...]
    split: Split
    models: tuple[EvaluatedModel, ...]

    @property
    def title(self) -> str:
        """What the numbers are."""
        scales = scales_title(each.scale for model in self.models for each in model.records)
        return f"{scales}, with 95 % intervals, on {self.split}"

    @property
    def note(self) -> str:
        """How to read the table; empty where it says all."""
        found = []
        if any(p is not None for model in self.models for p in model.p_values):
            found.append(
                f"p: paired tests on the same examples against {self.models[0].name}, two-sided, corrected for their "
                "number (Holm)."
            )
        if len(self.models) > 1 and any(each.scale == "perplexity" for each in self.models[0].records):
            found.append("Perplexities are per token: only models with the same tokenizer can be compared by them.")
        return " ".join(found)

    def cells(self, model: EvaluatedModel) -> dict[str, str]:
        """Return what stands of a model in a row of a table, by column."""
        cells = {"model": model.name, "parameters": parameter_count(model.parameters)}
        for task, score, p in zip(self.tasks, model.scores, model.p_values, strict=True):
            cells[task] = score_phrase(score) + ("" if p is None else f", p = {p:.2g}")
        return cells


@dataclass(frozen=True)
class _Subject:
    """A model to evaluate: an edit of a checkpoint, with the sizes that are stored with its scores."""

    name: str
    model: ModelConfig
    engine: EngineConfig
    fingerprint: str
    edit: Edit
    parameters: int
    sizes: Mapping[str, Any]
    candidate: Candidate | None = None


@record
class EvaluateRequest(Request):
    """Score checkpoints, stored individuals or full models on tasks, in this process, and test them against the first.

    Scores are stored, so that none is computed twice. Checkpoints may come from anywhere: full, pruned, fine-tuned or
    quantised ones. Beside a stored individual, tasks have the rows that its search has set.

    Raises:
        UserError: a task or split doesn't exist, a setting can't be changed like that, a model can't be loaded, or
            a row can't be read.
        StoreError: the store, a search or an individual doesn't exist.
    """

    opens = True
    models: Annotated[
        Sequence[str],
        about("Checkpoints (folders, GGUF files or hub ids), individuals as SEARCH:INDEX, or `full`.", min_length=1),
        Flag(metavar="MODEL..."),
    ]
    _: KW_ONLY
    tasks: Annotated[
        Sequence[str], about("Any task, or NAME@FITNESS; repeatable.", min_length=1), Flag("--task", "TASK", list[str])
    ]
    split: TaskSplit = "test"
    page: Annotated[Path | None, about("Write the table as an HTML page, too."), Flag(metavar="FILE")] = None
    search: SearchOfFull = None
    model: ModelPath = None
    threads: Threads = None
    overrides: ModelSettings = ()

    def answer(self, store: str | Store, *, observer: Observer = SILENT) -> Evaluations:
        observer.on_stage("reading the models and the tasks")
        # Before a store is made or opened, so that a wrong path leaves nothing behind.
        names = list(dict.fromkeys(self.models))
        alone = [name for name in names if not is_stored(name)]
        for task in self.tasks if alone else ():
            _refuse_comparing(task, alone[0])
        checkpoints = {name: self._checkpoint(name) for name in alone}
        with opened_store(store, create=len(checkpoints) == len(names)) as opened:
            subjects = [checkpoints.get(name) or self._stored(opened, name) for name in names]
            splits = self._splits(subjects)
            found = self._scored(opened, subjects, splits, observer)
        tested = [
            None if one is first else _p_value(one, first)
            for records in found
            for one, first in zip(records, found[0], strict=True)
        ]
        corrected, models = iter(holm(tested)), []
        for subject, records in zip(subjects, found, strict=True):
            p_values = tuple(next(corrected) for _ in records)
            models.append(EvaluatedModel(subject.name, subject.parameters, records, p_values))
        made = Evaluations(tuple(split.task for split in splits), self.split, tuple(models))
        if self.page is not None:
            from moevolve.search.report.rendering import table_page

            page = table_page("Evaluation", made.title, [made.cells(model) for model in models], made.note)
            with writing_into(self.page.parent):
                self.page.write_text(page, encoding="utf-8")
        return made

    @property
    def _changes(self) -> list[str]:
        threads = [] if self.threads is None else [f"engine.threads={self.threads}"]
        return [*override_lines(self.overrides), *threads]

    def _checkpoint(self, name: str) -> _Subject:
        from moevolve.workers.model.describe import describe_model

        loading = changed_loading(ModelConfig(resolved_model_path(name)), EngineConfig(), self._changes)
        facts = describe_model(loading.model)
        size = facts.parameters
        return _Subject(
            name, loading.model, loading.engine, facts.fingerprint, IdentityEdit(), size, {"parameters": size}
        )

    def _stored(self, store: Store, name: str) -> _Subject:
        found = find_candidate(store, name, self.search, self.model, overrides=self._changes, tasks=self.tasks)
        sizes = {"parameters": found.facts.parameters}
        if found.detail is not None:
            names = ("experts", "active", "parameters", "active_parameters")
            sizes = {name: getattr(found.detail.individual, name) for name in names}
        config, fingerprint = found.config, found.facts.fingerprint
        return _Subject(name, config.model, config.engine, fingerprint, found.edit, sizes["parameters"], sizes, found)

    def _splits(self, subjects: Sequence[_Subject]) -> list[PreparedSplit]:
        """Prepare the tasks as the search of the first stored individual does."""
        candidate = next((each.candidate for each in subjects if each.candidate is not None), None)
        if candidate is None:
            return [TaskSection(name=task).prepared(self.split) for task in self.tasks]
        return [prepared_split(candidate, task, self.split) for task in self.tasks]

    def _scored(
        self, store: Store, subjects: Sequence[_Subject], splits: Sequence[PreparedSplit], observer: Observer
    ) -> list[tuple[EvaluationRecord, ...]]:
        """Score models one after the other; those of one checkpoint that follow each other load it once."""
        from moevolve.search.pools.local import LocalPool

        found, refs = [], tuple(split.ref for split in splits)
        pool: LocalPool | None = None
        loaded: tuple[ModelConfig, EngineConfig] | None = None
        for subject in subjects:
            if pool is None or loaded != (subject.model, subject.engine):
                # The model before is given up first.
                pool, loaded = None, (subject.model, subject.engine)
                pool = LocalPool(_loading(subject, observer), {split.fingerprint: split for split in splits})
            cache = EvaluationCache(
                store, pool, None, subject.fingerprint, engine_fingerprint(subject.model, subject.engine)
            )
            observer.on_stage(f"scoring {subject.name} on {', '.join(split.task for split in splits)} ({self.split})")
            (settled,) = cache.settle([EvaluationRequest(subject.edit, refs, **subject.sizes)])
            if len(settled.evaluations) < len(splits):
                task = splits[len(settled.evaluations)].task
                raise UserError(f"{subject.name} can't be scored on {task} ({self.split}): {settled.failure}")
            found.append(
                tuple(each if each.failure is not None else with_outcomes(store, each) for each in settled.evaluations)
            )
        return found


def _refuse_comparing(name: str, checkpoint: str) -> None:
    """Refuse a task whose fitness a checkpoint alone doesn't have."""
    task = TaskSection(name=name).task()
    if task.fitness_kind.compares:
        raise UserError(
            f"--task {task.name}: {task.fitness} compares a candidate with the full model of its search, and "
            f"{checkpoint} is a checkpoint; take another fitness, for example {split_fitness(task.name)[0]}@perplexity"
        )


def _loading(subject: _Subject, observer: Observer) -> Callable[[], EvaluationWorker]:
    """Return what loads a model when it is first needed: stored scores need none."""

    def load() -> EvaluationWorker:
        from moevolve.workers.worker import EvaluationWorker

        observer.on_stage(f"loading {subject.model.path}")
        return EvaluationWorker(subject.model, subject.engine)

    return load


def _p_value(one: EvaluationRecord, first: EvaluationRecord) -> float | None:
    """Test whether two models score the same on a task; None if one has failed."""
    sides = [
        [TaskOutcomes(outcomes_of(each)[None], each.metric, 1.0, fingerprint=each.task_fingerprint)]
        for each in (one, first)
        if each.outcomes
    ]
    found = paired_test(*sides) if len(sides) == 2 else None
    return None if found is None else found.p
