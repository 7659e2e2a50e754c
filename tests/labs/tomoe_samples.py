"""Spaces of ToMoE genomes with a made-up calibration."""

from __future__ import annotations

from typing import Any

import numpy as np
from search_samples import dense_model

from moevolve.search.genomes.tomoe.space import ToMoeSection, ToMoeSpace
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import ModelFacts

SAMPLE = 40


def tomoe_space(facts: ModelFacts | None = None, **settings: Any) -> ToMoeSpace:
    """A calibrated space; 4 experts and half of the parameters unless told otherwise."""
    facts = facts or dense_model()
    chosen = {"experts": 4, "attention": facts.family == "llama"}
    space = ToMoeSpace.of(ToMoeSection(kind="tomoe", **(chosen | settings)), facts)
    dense, components, rng = space.dense, space.components, np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.standard_normal((dense.layers, *shape)).astype(np.float32)

    arrays = {
        "network_directions": draw(1 + components, dense.hidden),
        "network_sample": draw(SAMPLE, 1 + components),
        "neuron_saliency": np.exp(draw(dense.width)),
        "neuron_fluctuation": np.exp(draw(dense.width)),
        "network_share": np.exp(draw()),
        "expert_rows": draw(space.section.experts, 1 + components),
        "expert_saliency": np.exp(draw(space.section.experts, dense.width)),
    }
    if space.section.attention:
        arrays |= {
            "head_directions": draw(components, dense.hidden),
            "head_sample": draw(SAMPLE, components),
            "pair_saliency": np.exp(draw(dense.head_dim // 2)),
            "value_saliency": np.exp(draw(dense.head_dim)),
        }
    return space.calibrated(Calibration(arrays))
