"""Which calibrator makes which recipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.config import EngineConfig
from moevolve.workers.engine.tokenizing import Tokens, missing_bos, tokenize_split
from moevolve.workers.methods.base import Calibration, CalibrationRecipe, CombinedRecipe
from moevolve.workers.methods.eep.calibrate_alignment import calibrate_alignment
from moevolve.workers.methods.eep.calibrate_experts import calibrate_experts
from moevolve.workers.methods.eep.edit import AlignmentRecipe, ExpertsRecipe
from moevolve.workers.methods.factorllm.calibrate import calibrate_factorllm
from moevolve.workers.methods.factorllm.edit import FactorLlmRecipe
from moevolve.workers.methods.tomoe.calibrate import calibrate_tomoe
from moevolve.workers.methods.tomoe.edit import ToMoeRecipe
from moevolve.workers.model.resident import ResidentModel

Calibrator = Callable[[ResidentModel, Sequence[Tokens], Any], Calibration]
"""Measures an unedited resident model on token sequences, as a recipe says."""

CALIBRATORS: dict[type, Calibrator] = {
    AlignmentRecipe: calibrate_alignment,
    ExpertsRecipe: calibrate_experts,
    FactorLlmRecipe: calibrate_factorllm,
    ToMoeRecipe: calibrate_tomoe,
}
"""Calibrators by the type of recipe."""


@torch.inference_mode()
def calibrate(
    resident: ResidentModel, engine: EngineConfig, recipe: CalibrationRecipe, splits: Sequence[PreparedSplit]
) -> Calibration:
    """Make a calibration and note what it cost.

    Args:
        resident: unedited.
        engine: how prompts are tokenised and truncated.
        recipe: what to measure.
        splits: whose prompts and gold answers are run.

    Raises:
        UserError: unknown recipe, or the model isn't one it is for.
    """
    if isinstance(recipe, CombinedRecipe):
        parts = [calibrate(resident, engine, part, splits) for part in recipe.parts]
        arrays = {name: array for part in parts for name, array in part.arrays.items()}
        tokens, seconds = (sum(getattr(part, name) or 0 for part in parts) for name in ("tokens_run", "seconds"))
        return Calibration(arrays).with_cost(int(tokens), float(seconds))
    calibrator = CALIBRATORS.get(type(recipe))
    if calibrator is None:
        raise UserError(f"calibrations of kind {type(recipe).__name__} are unknown")
    sequences = token_sequences(resident, engine, splits, recipe.tokens)
    started = time.perf_counter()
    made = calibrator(resident, sequences, recipe)
    return made.with_cost(sum(len(each) for each in sequences), time.perf_counter() - started)


def token_sequences(
    resident: ResidentModel, engine: EngineConfig, splits: Sequence[PreparedSplit], limit: int
) -> list[Tokens]:
    """Prompts with their gold answers, split by split in turn, whole ones until `limit` tokens are reached."""
    bos = missing_bos(resident.model, resident.tokenizer)
    tokenized = [tokenize_split(resident.tokenizer, split, engine, bos) for split in splits]
    sequences: list[Tokens] = []
    total = 0
    for row in range(max((len(each.prompts) for each in tokenized), default=0)):
        for each in tokenized:
            if row < len(each.prompts) and total < limit:
                sequences.append((*each.prompts[row], *each.golds[row]))
                total += len(sequences[-1])
    return sequences
