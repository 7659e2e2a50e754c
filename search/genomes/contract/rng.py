"""Counter-based randomness: every individual has a generator of its own, so nothing depends on the order of events."""

from __future__ import annotations

import numpy as np


def generator(seed: int, index: int, stream: str = "individual") -> np.random.Generator:
    """The generator of individual `index` in the search seeded `seed`.

    Philox keyed by (seed, stream, index) through `SeedSequence`: a pure function of its arguments, the same on every
    platform.

    Args:
        seed: the search's seed, >= 0.
        index: index of the individual (or of whatever `stream` counts), >= 0.
        stream: keeps independent uses of one seed apart.
    """
    key = (*stream.encode(), index)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=key)))
