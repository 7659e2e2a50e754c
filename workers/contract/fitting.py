"""Settings and calibration tokens of closed-form fits. Needs no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.workers.contract.edits import Tokens

# What the tokens are for: fitting output projections (`repair`) or thresholds of dynamic skipping (`skipping`).
RowsUse = Literal["repair", "skipping"]


@dataclass(frozen=True, slots=True)
class RowsMeasurement:
    """Measurement of about `tokens` tokens that edits are fitted on: whole calibration prompts with their answers.

    One calibration may hold sequences for several uses.

    Attributes:
        continuations: How often the unedited model continues every row where the rows have fewer tokens.
    """

    tokens: int
    use: RowsUse = "repair"
    continuations: int = 0

    def note(self, arrays: Mapping[str, NDArray[np.number]]) -> str | None:
        """Return a line for users that says how many tokens the model has written; None if it hasn't."""
        written = int(arrays[f"{self.use}_written"].sum())
        own = int(arrays[f"{self.use}_lengths"].sum()) - written
        if not written:
            return None
        return f"{self.use}: the calibration rows have {own:,} tokens; the full model continued them with {written:,}"


@dataclass(frozen=True)
class FitRows:
    """Token sequences that an edit is fitted on.

    Attributes:
        tokens: Concatenated token ids of all sequences, int32 [tokens].
        lengths: Their lengths, int32 [sequences].
        prompts: Lengths of the prompts that sequences begin with, int32 [sequences]; answers follow.
    """

    tokens: NDArray[np.int32] = field(repr=False)
    lengths: NDArray[np.int32] = field(repr=False)
    prompts: NDArray[np.int32] = field(repr=False)

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[np.int32]], use: RowsUse = "repair") -> FitRows:
        """Take the sequences out of the arrays of a calibration made from a `RowsMeasurement`."""
        return cls(*(arrays[f"{use}_{name}"] for name in ("tokens", "lengths", "prompts")))

    @property
    def sequences(self) -> list[Tokens]:
        return self.first(len(self.tokens))

    def first(self, limit: int) -> list[Tokens]:
        """Return the first sequences that together have at most `limit` tokens, but at least one."""
        ends = np.cumsum(self.lengths)
        taken = max(1, int(np.searchsorted(ends, limit, side="right")))
        parts = np.split(self.tokens, ends[:taken])[:taken]
        return [tuple(part.tolist()) for part in parts]

    def answering(self, sequence: int) -> NDArray[np.bool_]:
        """Mask of the tokens of a sequence that predict its answer: the last of the prompt, and the answer's."""
        length, prompt = int(self.lengths[sequence]), int(self.prompts[sequence])
        return np.arange(length) >= (prompt - 1 if prompt < length else length)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokens, and of the lengths of sequences and prompts."""
        digest = hashlib.sha256(self.lengths.astype("<i4").tobytes())
        for each in (self.prompts, self.tokens):
            digest.update(each.astype("<i4").tobytes())
        return digest.hexdigest()
