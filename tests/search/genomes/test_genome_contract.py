"""The contract of genome kinds (`moevolve.search.genomes.contract.base`): the same tests for all kinds.

A new kind adds an entry to `SAMPLES`; its other properties are tested in a file of its own.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from factorllm_samples import factorllm_space, with_baselines
from numpy.typing import NDArray
from outline_samples import outline_of
from repair_samples import rows_of
from search_samples import (
    MERGE,
    PRUNE,
    TUNE,
    continuous,
    deepseek,
    dense_model,
    eep_space,
    mixtral,
)
from tomoe_samples import tomoe_space
from toy_kind import RUNS, RunsSpace

from moevolve.search.drawing import to_svg
from moevolve.search.genomes.contract.base import Genome, GenomeSpace
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.search.genomes.eep.space import EepGenome, EepSpace
from moevolve.search.genomes.factorllm.space import FactorLlmGenome
from moevolve.search.genomes.nanomoe.space import NanoMoeGenome, NanoMoeSection, NanoMoeSpace
from moevolve.search.genomes.registry import KINDS, costs_of, figures_for
from moevolve.search.genomes.repaired import RepairedGenome, RepairedSpace, base_genome, base_space, repaired_space
from moevolve.search.genomes.tomoe.space import ToMoeGenome
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.methods.repair.edit import RepairSettings


@dataclass(frozen=True)
class Sample:
    """A kind of genome in one space.

    Attributes:
        space: Space under test.
        phases: Phases in the order of a search.
        permuted: Function that reorders the interchangeable parts of a genome, for the same candidate.
        check: Function that asserts the properties of a genome in a phase.
        added: Upper bound on the parameters that edits add to the model, such as routers.
    """

    space: GenomeSpace[Any]
    phases: tuple[PhaseConfig, ...]
    permuted: Callable[[Any, np.random.Generator], Genome] = lambda genome, rng: genome
    check: Callable[[Any, PhaseConfig], None] = lambda genome, phase: None
    added: int = 0


def _permute_rows(genome: EepGenome, rng: np.random.Generator) -> EepGenome:
    """Only within routing groups, since a row's position determines its routing group."""
    parts = np.split(np.arange(genome.retained), genome.space.subsets.routing_groups)
    orders = np.stack([np.concatenate([rng.permutation(part) for part in parts]) for _ in range(genome.space.groups)])[
        :, :, None
    ]
    return EepGenome(
        genome.space,
        np.take_along_axis(genome.router_mapping, orders, axis=1),
        np.take_along_axis(genome.expert_merging, orders, axis=1),
    )


def _check_eep(genome: EepGenome, phase: PhaseConfig) -> None:
    space, retained = genome.space, genome.retained
    assert retained in space.counts
    for matrices in (genome.router_mapping, genome.expert_merging):
        assert matrices.shape == (space.groups, retained, space.experts)
        assert matrices.dtype == np.float32 and np.isfinite(matrices).all()
    if phase.kind == "prune":
        assert genome.one_hot
        assert np.array_equal(genome.router_mapping, genome.expert_merging)
        assert (genome.expert_merging.sum(axis=1) <= 1).all(), "an expert is retained twice"
        per_part = genome.expert_merging.sum(axis=1).reshape(space.groups, space.subsets.routing_groups, -1).sum(axis=2)
        assert (per_part == retained // space.subsets.routing_groups).all(), "routing groups keep unequal numbers"


def _eep(retained: int | None, groups: Any, **model: Any) -> Sample:
    space = eep_space(retained, groups, **model)
    return Sample(
        space,
        (PRUNE, MERGE),
        _permute_rows,
        _check_eep,
        added=len(space.layer_groups) * space.retained * space.experts,
    )


def _permute_experts(genome: FactorLlmGenome, rng: np.random.Generator) -> FactorLlmGenome:
    """Only in layers without a measured router, which belongs to particular experts."""
    arrays = {name: getattr(genome, name).copy() for name in ("assignment", "base_router", "coordinates", "biases")}
    for layer in np.flatnonzero(genome.base_router == 0):
        order = rng.permutation(genome.space.experts)
        arrays["assignment"][layer] = np.argsort(order)[genome.assignment[layer]]
        for name in ("coordinates", "biases"):
            arrays[name][layer] = arrays[name][layer][:, order]
    return FactorLlmGenome(genome.space, **arrays)


def _check_factorllm(genome: FactorLlmGenome, phase: PhaseConfig) -> None:
    space = genome.space
    for experts in genome.assignment:
        assert np.bincount(experts).tolist() == [space.dense.width // space.experts] * space.experts
    assert np.isfinite(genome.coordinates).all() and np.isfinite(genome.biases).all()
    assert genome.express().finite


def _factorllm(facts: ModelFacts, **settings: Any) -> Sample:
    space = factorllm_space(facts, **settings)
    return Sample(
        space,
        (TUNE,),
        _permute_experts,
        _check_factorllm,
        added=space.dense.layers * space.routers * space.experts * (space.dense.hidden + 1),
    )


def _check_nanomoe(genome: NanoMoeGenome, phase: PhaseConfig) -> None:
    assert genome.mixing.shape == genome.space.shape
    assert genome.mixing.dtype == np.float32 and np.isfinite(genome.mixing).all()


def _nanomoe(**section: Any) -> Sample:
    space = NanoMoeSpace.of(NanoMoeSection(kind="nanomoe", **section), dense_model())
    return Sample(space, (TUNE,), check=_check_nanomoe)


def _permute_tomoe(genome: ToMoeGenome, rng: np.random.Generator) -> ToMoeGenome:
    arrays = {name: getattr(genome, name).copy() for name in ("shares", "latents", "routers", "heads", "seeds")}
    for layer in range(len(genome.latents)):
        order = rng.permutation(genome.latents.shape[1])
        for name in ("latents", "routers", "seeds"):
            arrays[name][layer, : len(order)] = arrays[name][layer, order]
    return ToMoeGenome(genome.space, **arrays)


def _check_tomoe(genome: ToMoeGenome, phase: PhaseConfig) -> None:
    budget, edit = genome.space.budget, genome.express()
    assert np.array_equal(edit.widths, genome.widths[:, 0]) and edit.finite
    spare = budget.unit_costs[0] * (budget.layers if genome.space.section.equal_widths else 1)
    assert 0 <= budget.total - budget.parameters(genome.widths) < spare


def _tomoe(facts: ModelFacts, **settings: Any) -> Sample:
    space = tomoe_space(facts, **settings)
    return Sample(
        space,
        (TUNE,),
        _permute_tomoe,
        _check_tomoe,
        added=space.dense.layers * (space.section.experts + 4) * (space.dense.hidden + space.dense.head_dim),
    )


def _repaired(kind: Sample, **settings: Any) -> Sample:
    """The same sample with a repair in every phase."""
    phases = tuple(phase.model_copy(update={"repair": RepairSettings(**settings)}) for phase in kind.phases)
    space = repaired_space(kind.space, phases)
    assert isinstance(space, RepairedSpace)
    space = replace(space, rows=rows_of([(1, 2, 3), (4, 5)]))

    def permuted(genome: Any, rng: np.random.Generator) -> Genome:
        return replace(genome, base=kind.permuted(genome.base, rng))

    def check(genome: Any, phase: PhaseConfig) -> None:
        assert isinstance(genome, RepairedGenome) and genome.settings == phase.repair
        kind.check(genome.base, phase)

    return replace(kind, space=space, phases=phases, permuted=permuted, check=check)


SAMPLES = {
    "eep": _eep(4, 4),
    "eep-one-expert": _eep(1, 2, layers=4, experts=8),
    "eep-tuning": _eep(8, "per_layer", layers=3, active=1),
    "eep-logits": _eep(3, 3, layers=7, experts=4, router_space="logits"),
    "eep-any-number": replace(
        _eep(None, "per_layer", layers=5, experts=16, active=3, neuron_share=0.125), phases=(PRUNE,)
    ),
    "eep-routing-groups": _eep(8, 3, facts=deepseek()),
    "eep-many": _eep(30, 2, layers=5, experts=60),
    "nanomoe-I": _nanomoe(variant="I", blocks=4, rank=3),
    "nanomoe-III": _nanomoe(variant="III", blocks=2, rank=3, layers="layers.[02].mlp.*", fit=3),
    "nanomoe-low-rank": _nanomoe(variant="low_rank", rank=4),
    "factorllm-plain": _factorllm(dense_model(gated=False, bias=True), experts=8, routers=2),
    "factorllm-whole": _factorllm(dense_model(layers=1), experts=2, active=2, router_bias=False),
    "factorllm-baselines": replace(
        _factorllm(dense_model(layers=2)), space=with_baselines(dense_model(layers=2), active=3)
    ),
    "tomoe": _tomoe(dense_model()),
    "tomoe-networks": _tomoe(dense_model(gated=False, bias=True), experts=7, budget=0.8),
    "tomoe-narrow": _tomoe(dense_model(), experts=1, equal_widths=True, attention=False, budget=0.4),
    "tomoe-whole": _tomoe(dense_model(layers=1), experts=1, budget=1.0),
    "eep-repaired": _repaired(_eep(4, 3, layers=9), tokens=512),
    "tomoe-repaired": _repaired(_tomoe(dense_model(layers=2), experts=3)),
    "toy": Sample(RunsSpace(3, facts=mixtral(4)), (PRUNE,)),
}
PHASED = [
    pytest.param(kind, phase, id=f"{name}-{phase.kind}") for name, kind in SAMPLES.items() for phase in kind.phases
]
kinds = pytest.mark.parametrize("kind", SAMPLES.values(), ids=SAMPLES.keys())
phased = pytest.mark.parametrize(("kind", "phase"), PHASED)
SEEDS = range(4)


@pytest.fixture(autouse=True)
def _toy_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "runs", RUNS)


def arrays_of(genome: Any) -> list[NDArray[Any]]:
    return list(base_genome(genome).arrays.values())  # type: ignore[attr-defined]


def grown(kind: Sample, phase: PhaseConfig, seed: int, steps: int = 2) -> Any:
    """A genome of `phase` as in a search: sampled, then bred through the earlier phases."""
    rng = np.random.default_rng(seed)
    genome = kind.space.sample(rng, kind.phases[0]).genome
    for stage in kind.phases[: kind.phases.index(phase) + 1]:
        for _ in range(steps):
            genome = kind.space.breed(rng, stage, (genome,)).genome
    return genome


@phased
def test_samples_and_children_are_valid_and_functions_of_generator_and_parents(
    kind: Sample, phase: PhaseConfig
) -> None:
    space = kind.space
    for seed in SEEDS:
        rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
        sample = space.sample(rng, phase)
        assert sample == space.sample(again, phase) and sample.parents == ()
        assert sample.operator.isprintable() and sample.operator
        kind.check(sample.genome, phase)
        parents = tuple(grown(kind, phase, seed + position) for position in range(1 + seed % 2))
        before = [parent.to_bytes() for parent in parents]
        child = space.breed(rng, phase, parents)
        kind.check(child.genome, phase)
        assert child.parents == (0, 1)[: len(parents)]
        assert [parent.to_bytes() for parent in parents] == before
        assert child == space.breed(again, phase, tuple(space.from_bytes(data) for data in before))


@phased
def test_a_genome_comes_back_from_bytes_from_its_point_and_reordered(kind: Sample, phase: PhaseConfig) -> None:
    for seed in SEEDS:
        genome = grown(kind, phase, seed)
        copy = kind.space.from_bytes(genome.to_bytes())
        assert copy == genome and hash(copy) == hash(genome)
        assert copy.to_bytes() == genome.to_bytes() and copy.content_hash == genome.content_hash
        assert all(np.array_equal(*pair) for pair in zip(arrays_of(copy), arrays_of(genome), strict=True))
        other = kind.permuted(genome, np.random.default_rng(seed))
        assert other.express().phenotype_hash == genome.express().phenotype_hash
        vector = kind.space.flatten(genome, phase)
        assert vector.dtype == np.float64 and vector.ndim == 1
        if vector.size:
            assert kind.space.unflatten(vector, phase).express().phenotype_hash == genome.express().phenotype_hash
        description = kind.space.describe(genome)
        assert 1 <= description.active <= description.experts
        assert 0 < description.active_parameters <= description.parameters
        assert description.parameters <= description.parameters_full + kind.added
        assert description.summary and description.summary.isprintable()


@kinds
def test_bytes_that_are_no_genome_of_the_space_are_refused(kind: Sample) -> None:
    whole = kind.space.sample(np.random.default_rng(0), kind.phases[0]).genome.to_bytes()
    foreign = [
        other.space.sample(np.random.default_rng(0), other.phases[0]).genome.to_bytes()
        for other in SAMPLES.values()
        if other is not kind
    ]
    for wrong in (
        b"",
        whole[: len(whole) // 2],
        whole[:-1],
        whole + b"\0",
        b"?" + whole[1:],
        whole[:8] + b"\xff" * 4 + whole[12:],
        *foreign,
    ):
        with pytest.raises(ValueError, match=r"genome|shape"):
            kind.space.from_bytes(wrong)


@phased
def test_equal_bytes_are_equal_edits(kind: Sample, phase: PhaseConfig) -> None:
    genomes = [grown(kind, phase, seed, steps) for seed in range(4) for steps in range(3)]
    edits = {genome.content_hash: genome.express().phenotype_hash for genome in genomes}
    assert all(edits[genome.content_hash] == genome.express().phenotype_hash for genome in genomes)
    different = len(set(edits.values()))
    assert phase.kind != "merge" or different > 6


@phased
def test_any_point_is_a_genome_and_a_choice_has_the_highest_scores(kind: Sample, phase: PhaseConfig) -> None:
    space, first = kind.space, kind.space.flatten(grown(kind, phase, 0), phase)
    for seed in SEEDS if first.size else ():
        scores = np.random.default_rng(seed).standard_normal(first.size)
        genome = space.unflatten(scores, phase)
        kind.check(genome, phase)
        assert space.from_bytes(genome.to_bytes()) == genome
        if space.selects_subset(phase):
            assert set(np.unique(first)) <= {0.0, 1.0}
            best = scores @ space.flatten(genome, phase)
            others = [scores @ space.flatten(grown(kind, phase, seed + more), phase) for more in range(3)]
            assert max(others) <= best + 1e-9


def start_of(kind: Sample) -> Any:
    """The method's own start; None if it has none."""
    offspring = kind.space.start(kind.phases[0])
    return None if offspring is None else offspring.genome


@phased
def test_costs_agree_with_descriptions(kind: Sample, phase: PhaseConfig) -> None:
    outline = outline_of(base_space(kind.space).facts)  # type: ignore[attr-defined]
    costs, genome = costs_of(kind.space, outline), start_of(kind) or grown(kind, phase, 1, steps=6)
    if isinstance(kind.space, EepSpace) and len(kind.space.counts) > 1:
        genome = kind.space.from_kept(np.tile(np.arange(kind.space.retained), (kind.space.groups, 1)))
    described = kind.space.describe(genome)
    experts, active, parameters, active_parameters = costs.counts(phase)
    assert (experts, active) == (described.experts, described.active)
    assert parameters in (None, described.parameters)
    assert active_parameters == described.active_parameters or (
        parameters is None and active_parameters > described.active_parameters
    )
    phases = [each.kind for each in kind.phases]
    for host, repaired in product((False, True), repeat=2):
        assert 0 <= costs.buffer_bytes(phases, host, repaired) <= (outline.experts_bytes or outline.weight_bytes)


DRAWN = ("eep-many-prune", "eep-many-merge", "eep-repaired-merge", "eep-any-number-prune", "tomoe-tune")
"""Samples that look different; figures take long."""


@pytest.mark.parametrize(("kind", "phase"), [each for each in PHASED if each.id in DRAWN])
def test_genomes_are_drawn(kind: Sample, phase: PhaseConfig) -> None:
    genome = base_genome(grown(kind, phase, 2))
    figures = figures_for(genome)
    assert figures is KINDS[kind.space.kind].figures
    figure, caption = figures.page(genome), figures.caption(genome)
    assert any(axes.has_data() for axes in figure.axes)
    assert ET.fromstring(to_svg(figure, "genome", caption)).tag.endswith("svg")
    assert caption.endswith(".") and "\n" not in caption


def test_every_registered_kind_is_tested_and_known_by_its_name() -> None:
    assert {kind.space.kind for kind in SAMPLES.values()} == set(KINDS)
    assert set(DRAWN) <= {each.id for each in PHASED}
    assert {SAMPLES[name.rpartition("-")[0]].space.kind for name in DRAWN} == {
        name for name, kind in KINDS.items() if kind.figures.subject
    }
    for name, kind in KINDS.items():
        assert get_args(kind.section.model_fields["kind"].annotation) == (name,)
        assert kind.section.count_format.format(experts=4, active=2).isprintable()


@kinds
def test_genomes_and_edits_are_immutable(kind: Sample) -> None:
    genome = grown(kind, kind.phases[-1], 3)
    for array in arrays_of(genome):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(FrozenInstanceError):
        genome.space = None
    edit = genome.express()
    with pytest.raises((FrozenInstanceError, TypeError)):  # the latter for a name that a frozen class has no slot for
        edit.active = 99


def test_genomes_do_not_share_memory_with_what_they_were_made_of() -> None:
    eep, nanomoe = eep_space(), SAMPLES["nanomoe-I"].space
    matrices, mixing = continuous(eep).router_mapping.copy(), np.ones(nanomoe.shape, np.float32)  # type: ignore[attr-defined]
    genomes = EepGenome(eep, matrices, matrices), NanoMoeGenome(nanomoe, mixing)  # type: ignore[arg-type]
    before = [genome.to_bytes() for genome in genomes]
    matrices[...] = mixing[...] = 7
    assert [genome.to_bytes() for genome in genomes] == before
