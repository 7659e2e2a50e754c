"""Tasks of lm-evaluation-harness (lm-eval) as our tasks: splits, and documents rendered as prompts.

In the driver, lm-eval loads a task's documents and makes their prompts with few-shot examples. Workers receive both and
need no data (`moevolve.evaluators.harness.judge`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moevolve.evaluators.errors import UserError, opening
from moevolve.evaluators.fitness.kinds import LmEval
from moevolve.evaluators.harness.files import (
    PREFIX,
    find_yaml,
    harness_version,
    portable_path,
    read_config,
    split_name,
    task_identity,
)
from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.evaluators.tasks.datasets import Table
from moevolve.evaluators.tasks.selection import check_disjoint, select_rows, unshared_rows
from moevolve.evaluators.text_files import Row
from moevolve.evaluators.types import Example, HarnessTask, PreparedSplit, Split

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

# Default limit on the number of documents in `search`, `dev` and `calibration`; `counts` changes it.
_MAX_DOCUMENTS = 256
# lm-eval's own seed for drawing few-shot examples; a document's row number is added to it.
_FEWSHOT_SEED = 1234
# lm-eval's task files name the limit of an answer in any of these ways, and its models take all of them.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# As lm-eval's own model for transformers has it.
_DEFAULT_LENGTH = 256


@dataclass(frozen=True)
class LoadedTask:
    """A task that lm-eval has loaded.

    Attributes:
        tables: Source split -> its documents, after the task's `process_docs`.
        filter: Name of the filter whose answers the metric receives.
    """

    task: ConfigurableTask = field(repr=False)
    path: Path
    tables: dict[str, Table] = field(repr=False)
    metric: str
    filter: str

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.task.config.task}"


def harness_task(name: str) -> TaskConfig:
    """Return the settings of an lm-eval task with default splits.

    `test` has the documents that lm-eval itself evaluates on, `search` and `dev` have others, or a third each if there
    are no others. `calibration` takes at most half of the remaining training documents, so that some are left for
    few-shot examples. `configs/tasks/README.md` has the numbers.

    Args:
        name: `lm_eval:TASK` or `lm_eval:PATH.yaml`, optionally followed by `#METRIC` or `#METRIC,FILTER`.

    Raises:
        UserError: lm-eval isn't installed, or the task can't be loaded or isn't supported.
    """
    loaded = load_harness(name)
    config = loaded.task.config
    _, _, metric = split_name(name)
    until, length = _generation(config)
    text = config.output_type == "loglikelihood"
    return TaskConfig.from_mapping(
        {
            "name": loaded.name + metric,
            "description": f"lm-evaluation-harness, {loaded.metric} of {config.output_type}",
            "source": {"lm_eval": "".join(split_name(name)[1:])},
            "splits": _default_splits(loaded),
            "prompt": "{{ context }}",
            "answer": "{{ target }}",
            "choices": "choices" if config.output_type == "multiple_choice" else (),
            "matching": {"stop": until},
            "fitness": LmEval.name,
            "max_new_tokens": length,
            "answer_prefix": "" if text else config.target_delimiter,
            "chat": False,  # lm-eval's prompts are plain text that includes few-shot examples and instructions
        },
        name,
    )


@cache
def load_harness(name: str) -> LoadedTask:
    """Let lm-eval load a task and its documents; cached per process.

    Raises:
        UserError: See `harness_task`.
    """
    harness_version()
    from lm_eval.api.task import ConfigurableTask

    _, spec, metric = split_name(name)
    path = find_yaml(spec)
    with opening(f"{name}: lm-eval can't load it"):
        task = ConfigurableTask(config=read_config(path))
    chosen, filtered = _metric(task, metric.removeprefix("#"), name)
    return LoadedTask(task, path, _tables(task, name), chosen, filtered)


def prepare_harness(task: TaskConfig, wanted: Collection[Split]) -> dict[Split, PreparedSplit]:
    """Select a task's documents and make their prompts.

    Documents of the splits are never few-shot examples. Documents of `calibration` whose question (the prompt without
    few-shot examples) is also in another split, or earlier in `calibration`, are left out.

    Raises:
        UserError: Documents can't be selected or rendered, or too few are left for few-shot examples or `calibration`.
    """
    loaded = load_harness(PREFIX + str(task.source.lm_eval))
    rows = {split: select_rows(loaded.tables[chosen.source], chosen) for split, chosen in task.splits.items()}
    for source, table in loaded.tables.items():
        check_disjoint({s: found for s, found in rows.items() if task.splits[s].source == source}, table.name)
    documents = {
        split: [loaded.tables[task.splits[split].source].row(row) for row in found] for split, found in rows.items()
    }
    _keep_shots_apart(loaded, [document for group in documents.values() for document in group])
    if "calibration" in wanted:
        questions: dict[Split, list[tuple[str, ...]]] = {split: [] for split in rows}
        for split, found in rows.items():
            for row, document in zip(found, documents[split], strict=True):
                with _rendering(task, loaded, split, row):
                    questions[split].append(_contexts(loaded.task, document, row, shots=0))
        elsewhere = {question for split, group in questions.items() if split != "calibration" for question in group}
        kept = unshared_rows(questions["calibration"], elsewhere, task.origin)
        rows["calibration"] = [rows["calibration"][place] for place in kept]
        documents["calibration"] = [documents["calibration"][place] for place in kept]
    return {split: _prepare(task, loaded, split, rows[split], documents[split]) for split in wanted}


def _prepare(
    task: TaskConfig, loaded: LoadedTask, split: Split, rows: Sequence[int], documents: Sequence[Row]
) -> PreparedSplit:
    contexts, examples, texts = [], [], []
    for row, document in zip(rows, documents, strict=True):
        with _rendering(task, loaded, split, row):
            contexts.append(_contexts(loaded.task, document, row, loaded.task.config.num_fewshot or 0))
            examples.append(_example(loaded.task, document, contexts[-1]))
            texts.append(json.dumps(document, ensure_ascii=False))
    if split == "calibration":
        return task.prepared(split, tuple(examples))
    judged = HarnessTask(
        yaml=portable_path(loaded.path),
        config=task_identity(loaded.path),
        version=harness_version(),
        metric=loaded.metric,
        filter=loaded.filter,
        documents=tuple(texts),
        contexts=tuple(contexts),
    )
    return task.prepared(split, tuple(examples), judged if task.fitness == LmEval.name else None)


def _rendering(task: TaskConfig, loaded: LoadedTask, split: Split, row: int) -> AbstractContextManager[None]:
    """Return a context in which errors name the document that lm-eval renders."""
    place = loaded.tables[task.splits[split].source].place(row)
    return opening(f"{task.origin}: {place}: lm-eval can't make a prompt of it")


def _contexts(task: ConfigurableTask, document: Row, row: int, shots: int) -> tuple[str, ...]:
    """Return a document's prompt with `shots` few-shot examples, or one prompt for each of its choices."""
    if shots:
        task.set_fewshot_seed(_FEWSHOT_SEED + row)
    made = task.fewshot_context(document, num_fewshot=shots, gen_prefix=task.doc_to_prefix(document))
    return (made,) if isinstance(made, str) else tuple(made)


def _example(task: ConfigurableTask, document: Row, contexts: tuple[str, ...]) -> Example:
    """Return the document as an example for our own fitnesses."""
    target = task.doc_to_target(document)
    if task.multiple_input:
        return Example(contexts[int(task.doc_to_text(document))], (str(target),))
    choices = tuple(task.doc_to_choice(document)) if task.config.doc_to_choice is not None else ()
    targets = target if isinstance(target, list) else [target]
    answers = tuple(choices[item] if isinstance(item, int) and choices else str(item) for item in targets)
    return Example(contexts[0], tuple(dict.fromkeys(answers)), choices)


def _keep_shots_apart(loaded: LoadedTask, documents: Sequence[Row]) -> None:
    """Remove the documents of all splits from the pool of few-shot examples."""
    task = loaded.task
    shots = task.config.num_fewshot or 0
    if not shots:
        return
    used = {json.dumps(document, sort_keys=True, default=str) for document in documents}
    pool = [dict(shot) for shot in task.sampler.fewshot_docs()]
    kept = [shot for shot in pool if json.dumps(shot, sort_keys=True, default=str) not in used]
    if len(kept) < shots + 1:
        raise UserError(
            f"{loaded.name}: {shots} few-shot examples are asked for, but only {len(kept)} documents are in none of "
            "the splits; take fewer documents with `counts`, or give the task `num_fewshot: 0` or a `fewshot_split`"
        )
    task.sampler.fewshot_indices = None
    task.sampler.replace_df(kept)


def _tables(task: ConfigurableTask, name: str) -> dict[str, Table]:
    config = task.config
    documents = {
        config.training_split: task.training_docs,
        config.validation_split: task.validation_docs,
        config.test_split: task.test_docs,
    }
    return {split: Table(f"{name}, {split}", read()) for split, read in documents.items() if split is not None}


def _default_splits(loaded: LoadedTask) -> dict[str, dict[str, object]]:
    config = loaded.task.config
    evaluated = config.test_split or config.validation_split
    others = [s for s in (config.validation_split, config.training_split) if s not in (None, evaluated)]
    source = others[0] if others else evaluated
    count = len(loaded.tables[source])
    if others:
        search = min(_MAX_DOCUMENTS, (count + 1) // 2)
        dev = min(_MAX_DOCUMENTS, count - search)
        test: dict[str, object] = {"from": evaluated}
    else:
        search = dev = min(_MAX_DOCUMENTS, count // 3)
        test = {"from": evaluated, "seed": 0, "offset": search + dev}
    if not search or not dev:
        raise UserError(f"{loaded.name}: {count} documents in {source} are too few to be divided into splits")
    first = {"from": source, "seed": 0}
    splits = {"search": first | {"count": search}, "dev": first | {"offset": search, "count": dev}, "test": test}
    training = config.training_split
    taken = search + dev if training == source else 0
    left = len(loaded.tables[training]) - taken if training not in (None, evaluated) else 0
    if left > 1:
        splits["calibration"] = {"from": training, "seed": 0, "offset": taken, "count": min(_MAX_DOCUMENTS, left // 2)}
    return splits


def _metric(task: ConfigurableTask, wanted: str, name: str) -> tuple[str, str]:
    """Metric and filter that give the score: the requested ones, or the first usable ones."""
    from lm_eval.api.registry import get_aggregation

    custom = task.config.process_results is not None
    functions = task._metric_fn_list  # noqa: SLF001 - not public in lm-eval
    usable = [
        metric
        for metric, aggregation in task.aggregation().items()
        # A metric that lm-eval doesn't know would be code from the hub; such code is never loaded.
        if aggregation is get_aggregation("mean")
        and task.higher_is_better().get(metric)
        and (custom or functions.get(metric) is not None)
    ]
    filters = [item["name"] for item in task.config.filter_list or [{"name": "none"}]]
    metric, _, filtered = wanted.partition(",")
    if not usable:
        raise UserError(f"{name}: none of its metrics ({', '.join(functions)}) is a mean over documents")
    if metric and metric not in usable:
        raise UserError(f"{name}: `{metric}` is no metric of it that is a mean over documents; {', '.join(usable)} are")
    if filtered and filtered not in filters:
        raise UserError(f"{name}: the task has no filter `{filtered}`; it has: {', '.join(filters)}")
    return metric or usable[0], filtered or filters[0]


def _generation(config: Any) -> tuple[list[str], int]:
    """Stop strings, and the largest number of tokens in an answer."""
    if config.output_type != "generate_until":
        return ["\n"], 16
    settings = config.generation_kwargs
    until = settings.get("until") or []
    length = next((settings[key] for key in _LENGTHS if settings.get(key) is not None), _DEFAULT_LENGTH)
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop], int(length)
