"""The tokens that edits are fitted on, as a calibration: stored once per search, so that a fit can be made again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Calibration, Tokens
from moevolve.workers.contract.fitting import RowsRecipe
from moevolve.workers.contract.methods import Resident


def calibrate_rows(resident: Resident, sequences: Sequence[Tokens], recipe: RowsRecipe) -> Calibration:
    """Keep token sequences.

    Returns:
        Arrays `<use>_tokens` int32 [tokens] and `<use>_lengths` int32 [sequences]; see `FitRows`.

    Raises:
        UserError: there are no sequences, or fewer than two for a repair, which fits some and checks others.
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
