"""Genome kinds by name, and what is looked up by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticKnownError

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import (
    Genome,
    GenomeFigures,
    GenomeKind,
    GenomeSection,
    GenomeSpace,
    Offspring,
)
from moevolve.search.genomes.contract.costs import GenomeCosts
from moevolve.search.genomes.eep.kind import EEP
from moevolve.search.genomes.factorllm.kind import FACTORLLM
from moevolve.search.genomes.nanomoe.kind import NANOMOE
from moevolve.search.genomes.repaired import RepairedSpace, bare_space, repaired_space
from moevolve.search.genomes.tomoe.kind import TOMOE
from moevolve.search.settings.phases import START, PhaseConfig, TunePhase
from moevolve.workers.contract.facts import ModelFacts

if TYPE_CHECKING:
    from moevolve.workers.profiling.outline import ModelOutline

KINDS: dict[str, GenomeKind] = {
    "eep": EEP,
    "factorllm": FACTORLLM,
    "tomoe": TOMOE,
    "nanomoe": NANOMOE,
}
DEFAULT = "eep"
"""The kind of a section that says none."""


def _of_its_kind(value: Any, as_base: ValidatorFunctionWrapHandler) -> GenomeSection:
    """Plain settings as the section of the kind that they name."""
    if not isinstance(value, dict):
        section: GenomeSection = as_base(value)
        return section
    settings = {"kind": DEFAULT} | value
    name = settings["kind"]
    if not isinstance(name, str) or name not in KINDS:
        known = ", ".join(f"'{each}'" for each in KINDS)
        context = {"discriminator": "'kind'", "tag": str(name), "expected_tags": known}
        raise PydanticKnownError("union_tag_invalid", context)
    return KINDS[name].section.model_validate(settings)


AnyGenomeSection = Annotated[SerializeAsAny[GenomeSection], WrapValidator(_of_its_kind)]
"""The field of a configuration that takes the section of any kind."""


def make_space(section: GenomeSection, facts: ModelFacts, phases: Sequence[PhaseConfig] = ()) -> GenomeSpace[Any]:
    """The space of a configuration's `genome` section for a model; one with a recipe is yet to be calibrated.

    Args:
        section: the section.
        facts: the model.
        phases: of the search, which may begin with baselines that something must be measured for.

    Raises:
        UserError: the section asks for what the model can't give.
    """
    kind = KINDS[section.kind]
    return repaired_space(kind.make_space(section, facts, phases), phases, kind.recombinable)


def costs_of(space: GenomeSpace[Any], outline: ModelOutline) -> GenomeCosts[Any]:
    """What the candidates of a space cost."""
    return KINDS[space.kind].costs(bare_space(space), outline)


def figures_for(genome: Genome) -> GenomeFigures[Any]:
    """How a genome is drawn."""
    return KINDS[genome.space.kind].figures


def weights_of(kind: str) -> str | None:
    """What the routing weights of a kind's experts are, for the heading of an analysis; None leaves them out."""
    return KINDS[kind].figures.weights if kind in KINDS else None


def parts_of(kinds: Iterable[str]) -> str:
    """What individuals of some kinds consist of, as a heading: "experts", "blocks", or "experts or blocks"."""
    asked = set(kinds)
    return " or ".join(dict.fromkeys(kind.section.parts for name, kind in KINDS.items() if name in asked))


def counted(kind: str, experts: int, active: int) -> str:
    """How many of these parts an individual has, in words; `experts` and `active` are as in `Description`."""
    return KINDS[kind].section.counted.format(experts=experts, active=active)


def check_baselines(phases: Sequence[PhaseConfig], space: GenomeSpace[Any]) -> None:
    """Refuse names in `init` that mean nothing for their phase.

    Raises:
        UserError: an unknown name, one that doesn't suit the phase or the genome kind; the message names the field.
    """
    for position, phase in enumerate(phases):
        own = ["random", START] if isinstance(phase, TunePhase) else ["random"]
        for name in (each for each in phase.named if each not in own):
            where = f"phases.{position}.init: {name}"
            known = KINDS[space.kind].baselines
            suited = [*own, *(each for each, baseline in known.items() if phase.kind in baseline.phases)]
            if name not in known:
                raise UserError(f"{where} is unknown; a {phase.kind} phase can begin with {', '.join(suited)}")
            if name not in suited:
                raise UserError(f"{where} can't begin a {phase.kind} phase; use {', '.join(suited)}")
            fault = known[name].fault(bare_space(space))
            if fault is not None:
                raise UserError(f"{where} {fault}")


def baseline_offspring(name: str, space: GenomeSpace[Any], phase: PhaseConfig) -> Offspring[Any]:
    """The individual of a baseline in a calibrated space, repaired if those of its phase are."""
    offspring = KINDS[space.kind].baselines[name].make(bare_space(space))
    return space.made(offspring, phase) if isinstance(space, RepairedSpace) else offspring
