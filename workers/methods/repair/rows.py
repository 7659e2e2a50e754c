"""The tokens that edits are fitted on, as a calibration: stored once per search, so that a fit can be made again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.workers.methods.base import Calibration, Tokens
from moevolve.workers.methods.contract import Resident
from moevolve.workers.methods.fitting import RowsRecipe


def calibrate_rows(resident: Resident, sequences: Sequence[Tokens], recipe: RowsRecipe) -> Calibration:
    """Keep token sequences.

    Returns:
        Arrays `row_tokens` int32 [tokens] and `row_lengths` int32 [sequences]; see `FitRows`.

    Raises:
        UserError: there are fewer than two sequences: some are fitted, others checked.
    """
    if len(sequences) < 2:
        raise UserError(f"repair: it needs two calibration prompts at least within its tokens, got {len(sequences)}")
    tokens = np.concatenate([np.array(each, dtype=np.int32) for each in sequences])
    return Calibration({"row_tokens": tokens, "row_lengths": np.array([*map(len, sequences)], dtype=np.int32)})
