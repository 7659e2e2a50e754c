"""Outlines of models that are facts alone, for what is counted before anything is loaded."""

from __future__ import annotations

from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.profiling.outline import ModelOutline

VOCABULARY, HIDDEN = 50, 4096


def outline_of(facts: ModelFacts) -> ModelOutline:
    """A model's outline, with bytes of activations that are made up."""
    expert = facts.expert_parameters * facts.dtype_bytes
    hidden = facts.dense.hidden if facts.dense else HIDDEN
    layers = facts.dense.layers if facts.dense else len(facts.moe_layers)
    return ModelOutline(
        facts=facts,
        layers=layers,
        weight_bytes=facts.parameters * facts.dtype_bytes,
        expert_bytes=tuple((facts.experts * expert,) for _ in facts.moe_layers),
        linear_bytes=tuple((hidden * hidden * facts.dtype_bytes,) * 4 for _ in range(layers)),
        cache_bytes=2 * hidden * facts.dtype_bytes * layers,
        row_bytes=8 * hidden * facts.dtype_bytes,
        layer_bytes=8 * hidden * facts.dtype_bytes,
        scores_bytes=0,
        hidden=hidden,
        vocabulary=VOCABULARY,
        intermediate=facts.dense.width if facts.dense else facts.expert_parameters // (3 * hidden),
        positions=4096,
    )
