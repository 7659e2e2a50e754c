"""Counter-based randomness: every individual has its own generator, so the order of events changes nothing."""

from __future__ import annotations

import numpy as np


def generator(seed: int, index: int, stream: str = "individual") -> np.random.Generator:
    """Return the generator of individual `index` in the search seeded `seed`.

    It is Philox keyed by (seed, stream, index) through `SeedSequence`: the same on every platform.

    Args:
        seed: Seed of the search, >= 0.
        index: Index of the individual, or of another thing that `stream` counts, >= 0.
        stream: Name that keeps independent uses of one seed apart.
    """
    key = (*stream.encode(), index)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=key)))
