"""Genome kinds by name, and functions that look up a kind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticKnownError

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.contract.base import Child, Genome, GenomeSection, GenomeSpace
from moevolve.search.genomes.contract.costs import SpaceCosts
from moevolve.search.genomes.contract.kind import GenomeFigures, GenomeKind
from moevolve.search.genomes.contract.outline import GenomeOutline
from moevolve.search.genomes.contract.phases import START, PhaseConfig, TunePhase
from moevolve.search.genomes.eep.kind import EEP
from moevolve.search.genomes.factorllm.kind import FACTORLLM
from moevolve.search.genomes.nanomoe.kind import NANOMOE
from moevolve.search.genomes.repaired import (
    RepairedGenome,
    RepairedSpace,
    base_genome,
    base_space,
    repair_rows,
    repaired_space,
)
from moevolve.search.genomes.tomoe.kind import TOMOE
from moevolve.store.errors import parsing
from moevolve.workers.contract.facts import ModelFacts

if TYPE_CHECKING:
    from moevolve.workers.profiling.outline import ModelOutline

KINDS: dict[str, GenomeKind] = {
    "eep": EEP,
    "factorllm": FACTORLLM,
    "tomoe": TOMOE,
    "nanomoe": NANOMOE,
}
# Kind of a section that doesn't name one.
DEFAULT = "eep"


def stored_section(kind: str) -> type[GenomeSection]:
    """Return the section of the kind that a store names; raise a DamagedError if there is none."""
    with parsing(f"the genome kind {kind!r}"):
        return KINDS[kind].section


def _validate_by_kind(value: object, validate_base: ValidatorFunctionWrapHandler) -> GenomeSection:
    if not isinstance(value, dict):
        return validate_base(value)
    settings = {"kind": DEFAULT} | value
    name = settings["kind"]
    if not isinstance(name, str) or name not in KINDS:
        known = ", ".join(f"'{each}'" for each in KINDS)
        context = {"discriminator": "'kind'", "tag": str(name), "expected_tags": known}
        raise PydanticKnownError("union_tag_invalid", context)
    return KINDS[name].section.model_validate(settings)


# Type of a configuration's field that accepts the section of any kind.
AnyGenomeSection = Annotated[SerializeAsAny[GenomeSection], WrapValidator(_validate_by_kind)]


def make_space(section: GenomeSection, facts: ModelFacts, phases: Sequence[PhaseConfig] = ()) -> GenomeSpace[Genome]:
    """Return the space of a `genome` section for a model; it has to be calibrated if it has a measurement.

    Raises:
        UserError: The model doesn't support the settings, or a phase doesn't suit the kind.
    """
    kind = KINDS[section.kind]
    space = repaired_space(kind.make_space(section, facts, phases), phases)
    for position, phase in enumerate(phases):
        if phase.kind not in (*section.phase_kinds, "repair"):
            raise UserError(
                f"phases.{position}.kind: a {phase.kind} phase doesn't suit genome kind {section.kind}; "
                f"use {' or '.join(section.phase_kinds)}"
            )
    return space


def costs_of(space: GenomeSpace[Genome], outline: ModelOutline) -> SpaceCosts:
    """Return the costs of a space's candidates."""
    return KINDS[space.kind].costs(base_space(space), outline)


def figures_for(genome: Genome) -> GenomeFigures[Genome]:
    """Return the drawings of a genome's kind."""
    return KINDS[genome.space.kind].figures


def outline_of(genome: Genome) -> GenomeOutline:
    """Return a genome in columns, with its repair if it has one."""
    base = base_genome(genome)
    outline = figures_for(base).outline(base)
    if not isinstance(genome, RepairedGenome):
        return outline
    return replace(outline, settings=(*outline.settings, *repair_rows(genome.settings)))


# Meanings of the abbreviations in descriptions of genomes, by patterns that find them.
_ABBREVIATIONS = (
    (r"\bkeep (?!\d+ of )", "keep: the experts that every group of layers keeps, 0 to 9 and then a to z"),
    (r"\blambda ", "lambda: strength of the ridge penalty in the repair's fits"),
    (r"\|dW\|", "|dW|: distance of merging coefficients from whole numbers"),
    (r"\|dM\|", "|dM|: distance of mixing coefficients from the start"),
)


def legend(summaries: Iterable[str]) -> str:
    """Return what abbreviations in some descriptions of genomes mean, in one line; empty if they have none."""
    text = "\n".join(summaries)
    return "; ".join(meaning for found, meaning in _ABBREVIATIONS if re.search(found, text))


def check_baselines(phases: Sequence[PhaseConfig], space: GenomeSpace[Genome]) -> None:
    """Check the names in every phase's `init`.

    Raises:
        UserError: A name is unknown, or doesn't suit the genome kind; the message names the field.
    """
    for position, phase in enumerate(phases):
        own = ["random", START] if isinstance(phase, TunePhase) else ["random"]
        for name in (each for each in phase.named if each not in own):
            where = f"phases.{position}.init: {name}"
            known = KINDS[space.kind].baselines
            if name not in known:
                suited = ", ".join((*own, *known))
                raise UserError(f"{where} is unknown; a {phase.kind} phase can begin with {suited}")
            problem = known[name].problem(base_space(space))
            if problem is not None:
                raise UserError(f"{where} {problem}")


def baseline_offspring(name: str, space: GenomeSpace[Genome], phase: PhaseConfig) -> Child:
    """Return the individual of a baseline in a calibrated space, repaired if its phase repairs."""
    offspring = KINDS[space.kind].baselines[name].make(base_space(space))
    return space.repair_offspring(offspring, phase) if isinstance(space, RepairedSpace) else offspring
