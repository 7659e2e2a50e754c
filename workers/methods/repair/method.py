"""Repair as a method, and the calibration that stores the tokens to fit on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.fitting import RowsRecipe
from moevolve.workers.contract.methods import Method, Resident
from moevolve.workers.methods.repair.apply import RepairApplicator
from moevolve.workers.methods.repair.edit import RepairedEdit


def calibrate_rows(resident: Resident, sequences: Sequence[Tokens], recipe: RowsRecipe) -> Calibration:
    """Store token sequences as a calibration, so that a fit on them can be repeated.

    Returns:
        Arrays `<use>_tokens` int32 [tokens] and `<use>_lengths` int32 [sequences]; see `FitRows`.

    Raises:
        UserError: There are no sequences, or fewer than two for a repair, which holds some out.
    """
    least = 2 if recipe.use == "repair" else 1
    if len(sequences) < least:
        raise UserError(
            f"{recipe.use}: it needs {least} calibration prompts at least within its tokens, got {len(sequences)}; "
            "give the task more `calibration` rows, or this more tokens"
        )
    tokens = np.concatenate([np.array(each, dtype=np.int32) for each in sequences])
    lengths = np.array([*map(len, sequences)], dtype=np.int32)
    return Calibration({f"{recipe.use}_tokens": tokens, f"{recipe.use}_lengths": lengths})


REPAIR = Method(edit=RepairedEdit, applicator=RepairApplicator, calibrators={RowsRecipe: calibrate_rows})
