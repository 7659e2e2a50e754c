"""Operations and memory traffic of one evaluation, by what a genome does to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.genomes.factorllm.space import FactorLlmSpace
from moevolve.search.genomes.nanomoe.space import NanoMoeSpace
from moevolve.search.genomes.tomoe.space import ToMoeSpace
from moevolve.workers.facts import DenseFacts
from moevolve.workers.profiling.outline import LayerOutline, ModelOutline
from moevolve.workers.profiling.passes import Pass


@dataclass(frozen=True, slots=True)
class LayerWork:
    """Operations of one decoder layer of a candidate per position, attention between positions left out.

    Attributes:
        outside: on every position of a batch, padding too.
        block: on positions that hold a token, and in the last layer on those that are read.
    """

    outside: int
    block: int


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a position takes in a model that is or isn't edited.

    Attributes:
        layers: in order of depth.
        output: operations for a position's logits.
        pair: operations per attended pair of positions, in all layers.
        weight_bytes: read by every pass, experts left out.
        expert_bytes: of one expert in every MoE layer.
        retained, active: experts per MoE layer and per token; 0 without any.
        cache_bytes: keys and values of a position.
    """

    layers: tuple[LayerWork, ...]
    output: int
    pair: int
    weight_bytes: int
    expert_bytes: int
    retained: int
    active: int
    cache_bytes: int

    @property
    def token_flops(self) -> int:
        """Operations per token in matrix products, its logits included."""
        return sum(layer.outside + layer.block for layer in self.layers) + self.output

    def flops(self, one: Pass) -> int:
        """Operations of a pass, in all its steps."""
        last = self.layers[-1]
        outside = sum(layer.outside for layer in self.layers) * one.tokens
        block = sum(layer.block for layer in self.layers[:-1]) * one.real + last.block * one.read
        return one.steps * (outside + block + self.output * one.logits) + self.pair * one.pairs

    def traffic(self, one: Pass) -> float:
        """Bytes of weights and of cached keys and values that a pass reads, in all its steps.

        Of n' experts, tokens that choose k each at random touch n' (1 - (1 - k/n')^tokens).
        """
        touched = 0.0
        if self.retained:
            touched = self.retained * (1 - (1 - self.active / self.retained) ** one.real)
        weights = self.weight_bytes + touched * self.expert_bytes
        cached = self.cache_bytes * (one.cached + one.tokens * (one.steps - 1) / 2)
        return one.steps * (weights + cached)


def full_work(outline: ModelOutline) -> ModelWork:
    """The unedited model's work."""
    facts = outline.facts
    layers = tuple(_layer(layer, facts.active) for layer in outline.layers)
    return ModelWork(
        layers,
        outline.output_flops,
        outline.attention_flops,
        outline.weight_bytes - outline.experts_bytes,
        outline.experts_bytes // facts.experts if facts.experts else 0,
        facts.experts,
        facts.active,
        outline.cache_bytes,
    )


def candidate_work(outline: ModelOutline, space: GenomeSpace[Any], phase: str) -> ModelWork:
    """The work of a candidate of a phase (`prune`, `merge` or `tune`).

    EEP: routers run over all n experts, and a continuous mapping is applied to their scores, or in logits space folded
    in. FactorLLM: K of N experts and its routers. ToMoE: widths are those of its start, since they sum up alike in all
    candidates; masks on a finished product save nothing. NanoMoE: factors in the place of the chosen linear layers.
    """
    full = full_work(outline)
    if isinstance(space, EepSpace):
        layers = tuple(_eep_layer(layer, space, phase) for layer in outline.layers)
        return replace(full, layers=layers, retained=space.retained, active=space.active)
    if isinstance(space, NanoMoeSpace):
        return replace(full, layers=_mixed(full.layers, space))
    changes = _divided(space) if isinstance(space, FactorLlmSpace) else _masked(space)
    return replace(full, layers=tuple(_changed(*pair) for pair in zip(full.layers, changes, strict=True)))


def _layer(layer: LayerOutline, active: int) -> LayerWork:
    return LayerWork(layer.outside, layer.block + layer.router + active * layer.expert)


def _eep_layer(layer: LayerOutline, space: EepSpace, phase: str) -> LayerWork:
    work = _layer(layer, space.active)
    if phase != "merge" or not layer.expert:
        return work
    folded = layer.router * space.retained // space.experts - layer.router
    mapped = 2 * space.retained * space.experts
    return replace(work, block=work.block + (folded if space.router_space == "logits" else mapped))


def _network(dense: DenseFacts) -> int:
    return 2 * (3 if dense.gated else 2) * dense.hidden * dense.width


def _divided(space: FactorLlmSpace) -> Sequence[int]:
    dense, network = space.dense, _network(space.dense)
    routers = 2 * space.routers * space.n * dense.hidden
    return [network * space.active // space.n - network + routers] * dense.layers


def _masked(space: GenomeSpace[Any]) -> Sequence[int]:
    assert isinstance(space, ToMoeSpace)
    dense, network = space.dense, _network(space.dense)
    widths = space.budget.widths(np.zeros(space.shapes["shares"], dtype=np.float32))
    changes = []
    for width, *heads in widths.tolist():
        routed = 2 * space.section.experts * dense.hidden if width < dense.width else 0
        scores = 2 * space.section.components * (dense.hidden + dense.head_dim)
        masked = scores if heads and heads[1] < dense.head_dim else 0
        changes.append(network * width // dense.width - network + routed + masked)
    return changes


def _changed(layer: LayerWork, change: int) -> LayerWork:
    """Where a layer has no block of its own (OPT), its network is outside."""
    return replace(layer, block=layer.block + change) if layer.block else replace(layer, outside=layer.outside + change)


def _mixed(layers: Sequence[LayerWork], space: NanoMoeSpace) -> tuple[LayerWork, ...]:
    found = list(layers)
    for linear in space.layers:
        _, index, rest = linear.name.split(".", 2)
        change = space.form.flops(linear.outputs, linear.inputs) - 2 * linear.outputs * linear.inputs
        layer = found[int(index)]
        if rest.startswith("mlp."):
            found[int(index)] = replace(layer, block=layer.block + change)
        else:
            found[int(index)] = replace(layer, outside=layer.outside + change)
    return tuple(found)
