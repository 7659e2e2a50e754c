"""How experts are aligned before they are merged; apart from the aligning, so that reading it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlignmentRecipe:
    """Settings of the alignment.

    Attributes:
        sample: at most this many tokens' activations are compared, evenly spaced among those that are run.
        rounds: at most this often every expert is matched anew to the sum of the others.
        tokens: at most about this many tokens are run.
    """

    sample: int
    rounds: int
    tokens: int
