"""The full model and the candidates of a run's phases: how large they are, and how many there can be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.costs import GenomeCosts, full_work
from moevolve.workers.facts import active_parameters
from moevolve.workers.profiling.outline import ModelOutline


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The full model, or the model that a phase's candidates describe.

    Attributes:
        title: `full model`, or the phase's kind.
        experts: per MoE layer; 0 without any.
        active: per token.
        parameters: in all; None where candidates differ.
        active_parameters: that a token passes through; where candidates differ, in the start.
        token_flops: operations per token as the worker runs it, attention between positions left out.
    """

    title: str
    experts: int
    active: int
    parameters: int | None
    active_parameters: int
    token_flops: int


def model_sizes(outline: ModelOutline, costs: GenomeCosts, phases: Iterable[str]) -> tuple[ModelSize, ...]:
    """The full model, then a candidate of every kind of phase."""
    facts = outline.facts
    active = active_parameters(facts, facts.experts, facts.active)
    flops = full_work(outline).token_flops
    full = ModelSize("full model", facts.experts, facts.active, facts.parameters, active, flops)
    return full, *(ModelSize(kind, *costs.counts(kind), costs.work(kind).token_flops) for kind in phases)


@dataclass(frozen=True, slots=True)
class PhaseCount:
    """How many evaluations a phase has at most: repeated candidates are looked up."""

    kind: str
    individuals: int
    different: int


def phase_counts(config: RunConfig, costs: GenomeCosts) -> tuple[PhaseCount, ...]:
    """Individuals of every phase, and how many different ones there can be."""
    counts = []
    for phase in config.phases:
        different = costs.different(phase.kind)
        most = phase.evaluations if different is None else min(phase.evaluations, different)
        counts.append(PhaseCount(phase.kind, phase.evaluations, most))
    return tuple(counts)
