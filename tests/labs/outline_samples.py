"""Outlines of models that are facts alone, for what is counted before anything is loaded."""

from __future__ import annotations

from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.profiling.outline import LayerOutline, ModelOutline

VOCABULARY, HIDDEN = 50, 4096


def outline_of(facts: ModelFacts) -> ModelOutline:
    """A model's outline: of dense ones the linear layers by name, of the others experts and routers alone."""
    expert = facts.expert_parameters * facts.dtype_bytes
    hidden = facts.dense.hidden if facts.dense else HIDDEN
    layers = _dense_layers(facts) if facts.dense else _moe_layers(facts)
    return ModelOutline(
        facts=facts,
        layers=layers,
        output_flops=2 * VOCABULARY * hidden,
        weight_bytes=facts.parameters * facts.dtype_bytes,
        expert_bytes=tuple((facts.experts * expert,) for _ in facts.moe_layers),
        cache_bytes=2 * hidden * facts.dtype_bytes * len(layers),
        attention_bytes=6 * hidden * facts.dtype_bytes,
        network_bytes=8 * hidden * facts.dtype_bytes,
        repeated_bytes=0,
        caches=True,
        layout="packed",
        hidden=hidden,
        vocabulary=VOCABULARY,
        intermediate=facts.dense.width if facts.dense else facts.expert_parameters // (3 * hidden),
        positions=4096,
    )


def _moe_layers(facts: ModelFacts) -> tuple[LayerOutline, ...]:
    router = 2 * facts.router_parameters_per_expert * facts.experts
    return tuple(LayerOutline(0, router, 2 * facts.expert_parameters) for _ in facts.moe_layers)


def _dense_layers(facts: ModelFacts) -> tuple[LayerOutline, ...]:
    assert facts.dense is not None
    flops = [0] * facts.dense.layers
    for linear in facts.linears:
        flops[int(linear.name.split(".")[1])] += 2 * linear.outputs * linear.inputs
    return tuple(LayerOutline(each, 0, 0) for each in flops)
