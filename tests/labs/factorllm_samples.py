"""Spaces of FactorLLM genomes with a made-up calibration."""

from __future__ import annotations

from typing import Any

import numpy as np
from search_samples import dense_model

from moevolve.search.genomes.factorllm.kind import BASELINES
from moevolve.search.genomes.factorllm.space import FactorLlmSection, FactorLlmSpace
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import ModelFacts


def factorllm_space(facts: ModelFacts | None = None, **settings: Any) -> FactorLlmSpace:
    """A calibrated space; 4 experts, 2 active unless `settings` say otherwise."""
    chosen = {"experts": 4, "active": 2} | settings
    space = FactorLlmSpace.of(FactorLlmSection(kind="factorllm", **chosen), facts or dense_model())
    dense, rng = space.dense, np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.standard_normal((dense.layers, *shape)).astype(np.float32)

    bias = space.section.router_bias
    return space.calibrated(
        Calibration(
            {
                "start_experts": np.stack([rng.permutation(space.contiguous) for _ in range(dense.layers)]),
                "directions": draw(space.components, dense.hidden),
                "offsets": draw(space.components) * bias,
                "start_weight": draw(space.routers, space.experts, dense.hidden),
                "start_bias": draw(space.routers, space.experts) * bias,
            }
        )
    )


def with_baselines(facts: ModelFacts | None = None, **settings: Any) -> FactorLlmSpace:
    """A space whose calibration has the baselines' arrays, too."""
    space = factorllm_space(facts, **settings)
    dense, rng = space.dense, np.random.default_rng(1)
    arrays = dict(space.statistics)
    for name in BASELINES:
        routers = (space.routers, space.experts) if name == "kmeans" else (space.experts,)
        arrays |= {
            f"{name}_experts": np.stack([rng.permutation(space.contiguous) for _ in range(dense.layers)]),
            f"{name}_weight": rng.standard_normal((dense.layers, *routers, dense.hidden)).astype(np.float32),
            f"{name}_bias": rng.standard_normal((dense.layers, *routers)).astype(np.float32),
        }
    return space.calibrated(Calibration(arrays))
