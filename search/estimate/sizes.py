"""How large the full model and candidates are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moevolve.search.estimate.work import ModelWork
from moevolve.search.genomes.base import GenomeSpace
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.genomes.factorllm.space import FactorLlmSpace
from moevolve.search.genomes.nanomoe.space import NanoMoeSpace
from moevolve.search.genomes.tomoe.space import ToMoeSpace
from moevolve.workers.facts import active_parameters, parameters_after
from moevolve.workers.profiling.outline import ModelOutline


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The full model, or the model that a phase's candidates describe.

    Attributes:
        title: `full model`, or the phase's kind.
        experts: per MoE layer; 0 without any.
        active: per token.
        parameters: in all; None where candidates differ (ToMoE keeps what some mask keeps).
        active_parameters: that a token passes through; of ToMoE's candidates, the start.
        token_flops: operations per token as the worker runs it, attention between positions left out.
    """

    title: str
    experts: int
    active: int
    parameters: int | None
    active_parameters: int
    token_flops: int


def model_sizes(
    outline: ModelOutline, space: GenomeSpace[Any], full: ModelWork, works: Mapping[str, ModelWork]
) -> tuple[ModelSize, ...]:
    """The full model, then a candidate of every kind of phase."""
    facts = outline.facts
    active = active_parameters(facts, facts.experts, facts.active)
    sizes = [ModelSize("full model", facts.experts, facts.active, facts.parameters, active, full.token_flops)]
    for kind, work in works.items():
        sizes.append(ModelSize(kind, *_counts(space, kind), work.token_flops))
    return tuple(sizes)


def _counts(space: GenomeSpace[Any], kind: str) -> tuple[int, int, int | None, int]:
    if isinstance(space, EepSpace):
        folds = space.router_space == "logits" or (space.facts.rule.one_hot_folds and kind == "prune")
        sizes = (space.facts, space.retained)
        used = active_parameters(*sizes, space.active, not folds)
        return space.retained, space.active, parameters_after(*sizes, not folds), used
    facts = space.facts  # type: ignore[attr-defined]
    if isinstance(space, NanoMoeSpace):
        form = space.form
        saved = sum(each.outputs * each.inputs - form.parameters(each.outputs, each.inputs) for each in space.layers)
        full = active_parameters(facts, facts.experts, facts.active)
        return form.blocks, form.blocks, facts.parameters - saved, full - saved
    if isinstance(space, FactorLlmSpace):
        section, dense = space.section, space.dense
        matrices = 3 if dense.gated else 2
        neurons = matrices * dense.hidden * dense.width + (matrices - 1) * dense.width * dense.bias
        routers = dense.layers * space.routers * space.n * (dense.hidden + section.router_bias)
        idle = dense.layers * neurons * (space.n - space.active) // space.n
        return space.n, space.active, facts.parameters + routers, facts.parameters + routers - idle
    assert isinstance(space, ToMoeSpace)
    widths = space.budget.widths(np.zeros(space.shapes["shares"], dtype=np.float32))
    return space.section.experts, 1, None, space.active_parameters(widths)
