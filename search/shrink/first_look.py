"""What the full model makes of the data, before anything is searched: its answers, its scores and its routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.metrics import scale_of, score
from moevolve.evaluators.scales import SCALES
from moevolve.evaluators.types import Example, PreparedSplit
from moevolve.search.config.run import RunConfig
from moevolve.search.pools.ray_actor import ModelProbe
from moevolve.search.shrink.findings import FirstLook, KeptMass, TaskLook
from moevolve.search.shrink.guard import PIECE, free
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest

if TYPE_CHECKING:
    from moevolve.workers.worker import EvaluationWorker

# Tokens of a task that are routed: shares of an expert are then known within a percent or two.
_TOKENS = 4096
# Most rows that the full model answers of a task whose answers are right or wrong.
_ROWS = 128
_SHOWN = 3
_SHOWN_TOKENS = 64
# Most characters of a prompt or an answer in a line.
_SHOWN_CHARACTERS = 160
# Smallest share of right answers of a model that knows the task, where there are no choices to guess from.
_LEAST = 0.2

Measured = tuple[NDArray[np.float64] | None, tuple[TaskLook, ...]]


def first_look(config: RunConfig, experts: int | None, probe: ModelProbe) -> FirstLook:
    """Look at the full model.

    Args:
        config: The search.
        experts: Experts per layer that are kept, for the routing; None measures none.
        probe: Calls what loads the model.
    """
    found = [section.prepared_splits(("calibration", "search"), calibrating=True) for section in config.tasks]
    asked = tuple(splits["search"].without_window(PIECE).head(_ROWS) for splits in found)
    routed = () if experts is None else tuple(splits["calibration"] for splits in found)
    shares, looks = probe.call(measured, config, asked, routed)
    if experts is None or shares is None:
        return FirstLook(looks, ())
    weights = np.array([section.weight for section in config.tasks])
    return FirstLook(looks, kept_mass([split.task for split in asked], shares, weights, experts))


def measured(config: RunConfig, asked: Sequence[PreparedSplit], routed: Sequence[PreparedSplit]) -> Measured:
    """Load the model, let it answer rows of every task, and measure each expert's share of the routing weights.

    Returns:
        Shares, float64 [tasks, MoE layers, experts], of which those of a layer sum to 1, or None if nothing is to be
        routed; and the answers.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    worker = EvaluationWorker(placed(config.model), config.engine)
    try:
        looks = tuple(_look(worker, split) for split in asked)
    except CandidateError as error:
        raise UserError(f"model.path {config.model.path}: the unedited model can't be run: {error}") from None
    if not routed:
        return None, looks
    usages = [worker.analyse(IdentityEdit(), split, _TOKENS) for split in routed]
    sums = np.array([[layer.weights for layer in usage.routed] for usage in usages])
    return sums / np.maximum(sums.sum(axis=2, keepdims=True), np.finfo(float).tiny), looks


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
    elif split.positions == "text":
        return TaskLook(split.task)  # texts have no answers
    else:
        answers = worker.answer(IdentityEdit(), replace(free(shown, _SHOWN_TOKENS), thinks=False))[0]
        look = TaskLook(split.task)
    pairs = zip(shown.examples, answers, strict=False)
    return replace(look, examples=tuple(_line(row, each.text) for row, each in pairs if each.text is not None))


def _line(row: Example, answer: str) -> str:
    """The full model's answer to a row, beside the row's own if it has one."""
    expected = f", expected {row.references[0][:_SHOWN_CHARACTERS]!r}" if row.references else ""
    return f"asked {row.prompt[-_SHOWN_CHARACTERS:]!r}{expected}, answered {answer[:_SHOWN_CHARACTERS]!r}"


def wrong_task(look: FirstLook) -> str | None:
    """Name a task that the full model answers wrongly, one of its answers, and what to do; None if there is none."""
    for task in look.tasks:
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


def kept_mass(
    names: Sequence[str], shares: NDArray[np.float64], weights: NDArray[np.float64], experts: int
) -> tuple[KeptMass, ...]:
    """The shares of routing weights that the most used experts have.

    Args:
        names: Names of the tasks.
        shares: See `measured`.
        weights: Weights of the tasks, [tasks].
        experts: Experts per layer to keep.
    """
    together = np.average(shares, axis=0, weights=weights)
    kept = np.argsort(-together, axis=1, kind="stable")[:, :experts]
    best = -np.sort(-shares, axis=2)[:, :, :experts]
    return tuple(
        KeptMass(name, float(np.take_along_axis(own, kept, axis=1).sum(axis=1).mean()), float(top.sum(axis=1).mean()))
        for name, own, top in zip(names, shares, best, strict=True)
    )
