"""How the start of ToMoE genomes is measured; apart from the measuring, so that reading it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToMoeRecipe:
    """Settings of the start.

    Attributes:
        attention: whether heads are measured too.
        components: principal directions of every layer's inputs to find.
        sample: at most this many tokens are kept, as coordinates, to estimate how routers share tokens out.
        tokens: at most about this many tokens are run.
    """

    attention: bool
    components: int
    sample: int
    tokens: int
