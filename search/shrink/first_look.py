"""What the full model makes of the data, before anything is searched: its answers and its scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.metrics import scale_of, score
from moevolve.evaluators.scales import SCALES
from moevolve.evaluators.types import PreparedSplit
from moevolve.search.config.run import RunConfig
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.shrink.findings import TaskLook
from moevolve.search.shrink.guard import PIECE, free
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest

if TYPE_CHECKING:
    from moevolve.workers.worker import EvaluationWorker

# Most rows that the full model answers of a task whose answers are right or wrong.
_ROWS = 128
_SHOWN = 3
_SHOWN_TOKENS = 64
# Most characters of a prompt or an answer in a line.
_SHOWN_CHARACTERS = 160
# Smallest share of right answers of a model that knows the task, where there are no choices to guess from.
_LEAST = 0.2


def first_look(config: RunConfig, probe: ModelProbe) -> tuple[TaskLook, ...]:
    """Look at the full model's answers to every task; `probe` calls what loads the model."""
    found = (section.prepared_splits(("search",), calibrating=True)["search"] for section in config.tasks)
    looks: tuple[TaskLook, ...] = probe.call(
        measured, config, tuple(each.without_window(PIECE).head(_ROWS) for each in found)
    )
    return looks


def measured(config: RunConfig, asked: Sequence[PreparedSplit]) -> tuple[TaskLook, ...]:
    """Load the model, and let it answer rows of every task."""
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.contract.capacity import release_unused_models
    from moevolve.workers.worker import EvaluationWorker

    worker = EvaluationWorker(placed(config.model), config.engine)
    try:
        return tuple(_look(worker, split) for split in asked)
    except CandidateError as error:
        raise UserError(f"model.path {config.model.path}: the unedited model can't be run: {error}") from None
    finally:
        del worker
        release_unused_models()  # this process becomes the search's first worker, which loads the model itself


def _look(worker: EvaluationWorker, split: PreparedSplit) -> TaskLook:
    fitness, shown = FITNESSES[split.fitness], split.head(_SHOWN)
    if fitness.reads != "texts":
        answers = worker.answer(IdentityEdit(), split)[0]
        least = score("mean", [1 / len(each.choices) if each.choices else _LEAST for each in split.examples])
        look = TaskLook(split.task, len(answers), score(split.metric, [each.outcome for each in answers]), least)
    elif not fitness.compares:
        reply = worker.evaluate(EvaluationRequest(IdentityEdit(), (split.ref,)), (split,))
        if reply.failure is not None:
            raise CandidateError(reply.failure)
        result, guessing = reply.results[split.fingerprint], 1 / len(worker.resident.tokenizer)
        likelihoods = np.maximum(result.outcomes, np.finfo(np.float32).tiny).tolist()
        scale = scale_of(split.metric)
        read = (
            f"{row.prompt[:_SHOWN_CHARACTERS]!r} has {SCALES['perplexity'].phrase(each)}"
            for row, each in zip(shown.examples, likelihoods, strict=False)
        )
        return TaskLook(split.task, len(split.examples), result.score, guessing, tuple(read), scale)
    elif split.positions == "text" or worker.resident.one_layer_at_a_time:
        # Texts have no answers, and these long ones would read all experts for every token.
        return TaskLook(split.task)
    else:
        answers = worker.answer(IdentityEdit(), replace(free(shown, _SHOWN_TOKENS), thinks=False))[0]
        look = TaskLook(split.task)
    lines = []
    for row, each in zip(shown.examples, answers, strict=False):
        if each.text is not None:
            expected = f", expected {row.references[0][:_SHOWN_CHARACTERS]!r}" if row.references else ""
            answered = f"answered {each.text[:_SHOWN_CHARACTERS]!r}"
            lines.append(f"asked {row.prompt[-_SHOWN_CHARACTERS:]!r}{expected}, {answered}")
    return replace(look, examples=tuple(lines))


def wrong_task(looks: Sequence[TaskLook]) -> str | None:
    """Name a task that the full model answers wrongly, one of its answers, and what to do; None without such a task."""
    for task in looks:
        if task.score is not None and task.score < task.least:
            if SCALES[task.scale].is_reciprocal:
                return f"{task}: it can't predict {task.examples[0]}; give other texts, or go on with --force"
            seen = f": {task.examples[0]}" if task.examples else ""  # lm-eval judges without showing any
            return (
                f"{task}{seen}; write the answers as the model does, or compare candidates with the full "
                f"model instead (leave the answers out of the file, or give --task {task.task}@agreement), or go on "
                "with --force"
            )
    return None
