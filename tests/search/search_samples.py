"""Models, spaces and phases that the tests of searches share; nothing here loads a checkpoint."""

from __future__ import annotations

from typing import Literal

import numpy as np
from hypothesis import settings

from moevolve.search.config_genomes import EepSection
from moevolve.search.config_phases import MergePhase, PrunePhase
from moevolve.search.genomes.eep import EepGenome, EepSpace
from moevolve.workers.edits.eep import RouterSpace
from moevolve.workers.messages import ModelFacts

few = settings(max_examples=20, deadline=None)
"""Fewer examples: for tests with many parameters, or slow ones."""
many = settings(max_examples=150, deadline=None)
PRUNE = PrunePhase(evaluations=40)
MERGE = MergePhase(evaluations=160)


def mixtral(layers: int = 32, experts: int = 8, active: int = 2) -> ModelFacts:
    """Facts with Mixtral-8x7B's sizes (bfloat16)."""
    hidden, inner = 4096, 14336
    expert = 3 * hidden * inner
    return ModelFacts(
        family="mixtral",
        fingerprint="weights",
        moe_layers=tuple(range(layers)),
        experts=experts,
        active=active,
        renormalise=True,
        parameters=1_604_587_520 + layers * experts * (expert + hidden),
        expert_parameters=expert,
        router_parameters_per_expert=hidden,
        dtype_bytes=2,
    )


def eep_space(
    retained: int = 4,
    groups: int | Literal["per_layer"] = 4,
    *,
    layers: int = 32,
    experts: int = 8,
    active: int | None = None,
    router_space: RouterSpace = "probs",
) -> EepSpace:
    section = EepSection(experts=retained, active=active, groups=groups, router_space=router_space)
    return EepSpace.of(section, mixtral(layers, experts))


def continuous(space: EepSpace, seed: int = 0) -> EepGenome:
    """A genome with entries of all sizes and signs."""
    rng = np.random.default_rng(seed)
    shape = (space.groups, space.retained, space.experts)
    return EepGenome(
        space, rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    )
