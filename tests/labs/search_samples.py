"""Models, spaces and phases that the tests of searches share; nothing here loads a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from hypothesis import settings
from store_samples import individual

from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule
from moevolve.search.genomes.contract.phases import MergePhase, PrunePhase, TunePhase
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.eep.space import EepGenome, EepSpace
from moevolve.store.records import IndividualRecord, IndividualStatus
from moevolve.workers.contract.facts import DenseFacts, LinearFacts, ModelFacts
from moevolve.workers.methods.eep.edit import RouterSpace

few = settings(max_examples=8, deadline=None)
"""Fewer examples: for tests with many parameters, or slow ones."""
many = settings(max_examples=150, deadline=None)
PRUNE = PrunePhase(evaluations=40)
MERGE = MergePhase(evaluations=160)
TUNE = TunePhase(evaluations=100)


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
        expert_neurons=inner,
        neuron_parameters=3 * hidden,
        router_parameters_per_expert=hidden,
        dtype="bfloat16",
    )


def deepseek(layers: int = 6, experts: int = 16, groups: int = 4, chosen: int = 2) -> ModelFacts:
    """Facts of a model that routes like DeepSeek-V3, with Mixtral's sizes."""
    rule = RoutingRule(True, "sigmoid", RoutingGroups(groups, chosen, best=2), scale=2.5)
    return replace(mixtral(layers, experts), family="deepseek_v3", routing=rule)


def gpt_oss(layers: int = 6, experts: int = 8) -> ModelFacts:
    """Facts of a model that routes like GPT-OSS, with Mixtral's sizes."""
    return replace(mixtral(layers, experts), family="gpt_oss", routing=RoutingRule(True, "softmax_of_chosen"))


def dense_model(
    layers: int = 4, hidden: int = 16, width: int = 24, gated: bool = True, bias: bool = False, heads: int = 4
) -> ModelFacts:
    """Facts of a small dense model: a Llama with grouped key/value heads if gated, else an OPT; embeddings not tied."""
    kept, vocabulary = heads // 2 if gated else heads, 50
    head_dim = hidden // heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kept * head_dim, hidden),
        "self_attn.v_proj": (kept * head_dim, hidden),
        "self_attn.o_proj": (hidden, hidden),
    }
    if gated:
        shapes |= {"mlp.gate_proj": (width, hidden), "mlp.up_proj": (width, hidden), "mlp.down_proj": (hidden, width)}
    else:
        shapes |= {"fc1": (width, hidden), "fc2": (hidden, width)}
    linears = tuple(
        LinearFacts(f"layers.{layer}.{name}", outputs, inputs, bias)
        for layer in range(layers)
        for name, (outputs, inputs) in shapes.items()
    )
    norms = (2 * layers + 1) * hidden
    return ModelFacts(
        family="llama" if gated else "opt",
        fingerprint="weights",
        moe_layers=(),
        experts=0,
        active=0,
        renormalise=False,
        parameters=2 * vocabulary * hidden + norms + sum(linear.outputs * (linear.inputs + bias) for linear in linears),
        expert_parameters=0,
        router_parameters_per_expert=0,
        dtype="float32",
        dense=DenseFacts(layers, hidden, width, gated, bias, heads, kept, head_dim, head_dim if gated else 0),
        linears=linears,
    )


def eep_space(
    retained: int | None = 4,
    groups: int | Literal["per_layer"] = 4,
    *,
    layers: int = 32,
    experts: int = 8,
    active: int | None = None,
    router_space: RouterSpace = "probs",
    facts: ModelFacts | None = None,
    dynamic_skipping: bool = False,
    neuron_share: float | None = None,
) -> EepSpace:
    """A space for `facts`, or else for a Mixtral of that many layers and experts."""
    section = EepSection(
        experts=retained,
        active=active,
        groups=groups,
        router_space=router_space,
        dynamic_skipping=dynamic_skipping,
        neuron_share=neuron_share,
    )
    return EepSpace.of(section, facts or mixtral(layers, experts))


def continuous(space: EepSpace, seed: int = 0) -> EepGenome:
    """A genome with entries of all sizes and signs."""
    rng = np.random.default_rng(seed)
    shape = (space.groups, space.retained, space.experts)
    return EepGenome(
        space, rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)
    )


def history_row(index: int, phase: str, fitness: float | None, status: IndividualStatus = "ok") -> IndividualRecord:
    sizes = {
        "parameters": 50 + 10 * index,
        "active_parameters": 20 + index,
        "parameters_full": 200,
        "active_parameters_full": 80,
    }
    return individual(index, phase=phase, status=status, fitness=fitness, tie_break=fitness, **sizes)


HISTORY = [
    history_row(0, "prune", 0.4),
    history_row(1, "prune", None, "failed"),
    history_row(2, "prune", 0.6),
    history_row(3, "merge", 0.5),
    history_row(4, "merge", 0.7),
    history_row(5, "merge", None, "pending"),
]
