"""Sizes of models and numbers of evaluations, known before a run's tasks are read. Nothing here loads torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moevolve.evaluators.types import Split
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.costs import SpaceCosts
from moevolve.search.genomes.contract.phases import PhaseConfig

if TYPE_CHECKING:
    from moevolve.workers.profiling.outline import ModelOutline


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The full model, or the model that a phase's candidates describe.

    Attributes:
        title: `full model`, or the phase's kind.
        experts, active: Number of experts per MoE layer, and of active ones per token; 0 for dense models.
        parameters: Number of all parameters; None where candidates differ in it.
        active_parameters: Number of parameters per token; that of the phase's start where candidates differ in it.
    """

    title: str
    experts: int
    active: int
    parameters: int | None
    active_parameters: int


@dataclass(frozen=True, slots=True)
class PhaseCount:
    """Number of a phase's individuals; those that repeat an earlier one are looked up, not evaluated."""

    kind: str
    individuals: int


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Numbers of tokens on which a worker's memory depends.

    Attributes:
        longest: Tokens of the longest text that is run; None for as many as a batch.
        scored: Tokens of all texts that are scored.
        fitted: Tokens of all calibration rows; None for as many as every repair asks for.
    """

    longest: int | None = None
    scored: int = 0
    fitted: int | None = None


def model_sizes(outline: ModelOutline, costs: SpaceCosts, like: Mapping[str, PhaseConfig]) -> tuple[ModelSize, ...]:
    """Size the full model and a candidate of every kind of phase; see `described_as` for `like`."""
    facts = outline.facts
    full = ModelSize("full model", facts.experts, facts.active, facts.parameters, facts.active_parameters)
    return full, *(ModelSize(kind, *costs.counts(each)) for kind, each in like.items())


def described_as(phases: Sequence[PhaseConfig]) -> Mapping[str, PhaseConfig]:
    """Map each kind of phase to the one that its candidates' sizes are those of: for `repair`, the phase before it."""
    pairs = zip(phases, (phases[0], *phases), strict=False)
    return {phase.kind: before if phase.kind == "repair" else phase for phase, before in pairs}


def final_models(config: RunConfig) -> dict[Split, tuple[PhaseConfig | None, ...]]:
    """The phases that make the models which are evaluated on `dev` and `test` at the end, with None for the full model.

    The best comes second on `test`.
    """
    section = config.final
    # Of `test`: the full model, the best, the other rows of `search.loop.final_table`, and random draws.
    last_first = [phase for phase in reversed(config.phases) for _ in range(phase.evaluations)]
    leaders = last_first[: section.rerank]
    named = [phase for phase in config.phases for _ in phase.named]
    first_unrepaired = [phase for phase in config.phases if phase.repair is None][:1]
    if any(phase.kind == "repair" for phase in config.phases):
        named += first_unrepaired
    draws = [config.phases[0]] * section.random_baselines
    return {
        "dev": (None, *leaders) if section.rerank else (),
        "test": (None, last_first[0], *named, *draws) if section.test else (),
    }
