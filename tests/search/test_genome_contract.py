"""The contract of genome kinds (`moevolve.search.genomes.base`), the same tests over all of them.

A new kind adds an entry to `KINDS`; what only it promises is tested in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from search_samples import MERGE, PRUNE, continuous, eep_space, few

from moevolve.search.config import PhaseConfig
from moevolve.search.genomes.base import Genome, GenomeSpace, Offspring
from moevolve.search.genomes.eep import EepGenome
from moevolve.workers.edits.base import Edit


@dataclass(frozen=True)
class Kind:
    """One kind of genome in one space.

    Attributes:
        space: the space.
        phases: in the order in which a search would run them.
        arrays: all arrays of a genome.
        permuted: the same candidate with its interchangeable parts in another order.
        check: asserts what a genome of a phase must satisfy.
    """

    space: GenomeSpace[Any]
    phases: tuple[PhaseConfig, ...]
    arrays: Callable[[Any], tuple[NDArray[Any], ...]]
    permuted: Callable[[Any, np.random.Generator], Genome]
    check: Callable[[Any, PhaseConfig], None]


def _permute_rows(genome: EepGenome, rng: np.random.Generator) -> EepGenome:
    orders = np.stack([rng.permutation(genome.space.retained) for _ in range(genome.space.groups)])[:, :, None]
    return EepGenome(
        genome.space,
        np.take_along_axis(genome.router_mapping, orders, axis=1),
        np.take_along_axis(genome.expert_merging, orders, axis=1),
    )


def _check_eep(genome: EepGenome, phase: PhaseConfig) -> None:
    space = genome.space
    for matrices in (genome.router_mapping, genome.expert_merging):
        assert matrices.shape == (space.groups, space.retained, space.experts)
        assert matrices.dtype == np.float32 and np.isfinite(matrices).all()
    if phase.kind == "prune":
        assert genome.one_hot
        assert np.array_equal(genome.router_mapping, genome.expert_merging)
        assert (genome.expert_merging.sum(axis=1) <= 1).all(), "an expert is retained twice"


def _eep(retained: int, groups: Any, **model: Any) -> Kind:
    return Kind(
        eep_space(retained, groups, **model),
        (PRUNE, MERGE),
        lambda genome: (genome.router_mapping, genome.expert_merging),
        _permute_rows,
        _check_eep,
    )


KINDS = {
    "eep": _eep(4, 4),
    "eep-one-expert": _eep(1, 2, layers=4, experts=8),
    "eep-tuning": _eep(8, "per_layer", layers=3, active=1),
    "eep-logits": _eep(3, 3, layers=7, experts=4, router_space="logits"),
    "eep-many": _eep(30, 2, layers=5, experts=60),
}
PHASED = [pytest.param(kind, phase, id=f"{name}-{phase.kind}") for name, kind in KINDS.items() for phase in kind.phases]
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
phased = pytest.mark.parametrize(("kind", "phase"), PHASED)
seeds = st.integers(0, 2**32 - 1)


def grown(kind: Kind, phase: PhaseConfig, seed: int, steps: int = 2) -> Any:
    """A genome of `phase` as a search would come to it: sampled, then bred through the phases before it."""
    rng = np.random.default_rng(seed)
    genome = kind.space.sample(rng, kind.phases[0]).genome
    for stage in kind.phases[: kind.phases.index(phase) + 1]:
        for _ in range(steps):
            genome = kind.space.breed(rng, stage, (genome,)).genome
    return genome


@phased
@few
@given(seed=seeds)
def test_samples_are_valid_and_have_no_parents(kind: Kind, phase: PhaseConfig, seed: int) -> None:
    offspring = kind.space.sample(np.random.default_rng(seed), phase)
    kind.check(offspring.genome, phase)
    assert offspring.parents_used == ()
    assert offspring.operator.isprintable() and offspring.operator


@phased
@few
@given(seed=seeds, parents=st.integers(1, 2))
def test_children_are_valid_and_name_the_parents_used(kind: Kind, phase: PhaseConfig, seed: int, parents: int) -> None:
    given_parents = tuple(grown(kind, phase, seed + position) for position in range(parents))
    before = [parent.to_bytes() for parent in given_parents]
    offspring = kind.space.breed(np.random.default_rng(seed), phase, given_parents)
    kind.check(offspring.genome, phase)
    assert offspring.parents_used in {(0,), (0, 1)[:parents]}
    assert [parent.to_bytes() for parent in given_parents] == before


@phased
def test_the_crossover_rate_decides_on_the_second_parent(kind: Kind, phase: PhaseConfig) -> None:
    pair = grown(kind, phase, 1), grown(kind, phase, 2)
    for rate, expected in ((0.0, (0,)), (1.0, (0, 1))):
        changed = phase.model_copy(update={"crossover_rate": rate})
        used = {kind.space.breed(np.random.default_rng(seed), changed, pair).parents_used for seed in range(20)}
        assert used == {expected}


@phased
@few
@given(seed=seeds)
def test_breeding_is_a_function_of_generator_and_parents(kind: Kind, phase: PhaseConfig, seed: int) -> None:
    def breed(copies: bool) -> tuple[Offspring[Any], Offspring[Any]]:
        rng = np.random.default_rng(seed)
        sample = kind.space.sample(rng, phase)
        pair = grown(kind, phase, 1), grown(kind, phase, 2)
        if copies:
            pair = tuple(kind.space.from_bytes(parent.to_bytes()) for parent in pair)  # type: ignore[assignment]
        return sample, kind.space.breed(rng, phase, pair)

    assert breed(copies=False) == breed(copies=True)


@phased
@few
@given(seed=seeds)
def test_bytes_give_back_an_equal_genome(kind: Kind, phase: PhaseConfig, seed: int) -> None:
    genome = grown(kind, phase, seed)
    copy = kind.space.from_bytes(genome.to_bytes())
    assert copy == genome and hash(copy) == hash(genome)
    assert copy.to_bytes() == genome.to_bytes()
    assert copy.content_hash == genome.content_hash
    assert all(np.array_equal(*pair) for pair in zip(kind.arrays(copy), kind.arrays(genome), strict=True))


@kinds
@few
@given(data=st.data())
def test_other_bytes_are_refused(kind: Kind, data: st.DataObject) -> None:
    whole = kind.space.sample(np.random.default_rng(0), kind.phases[0]).genome.to_bytes()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1), label="cut")]
    longer = whole + data.draw(st.binary(min_size=1, max_size=16), label="appended")
    noise = data.draw(st.binary(max_size=64), label="garbage")
    for wrong in (cut, longer, noise, b"?" + whole[1:]):
        with pytest.raises(ValueError, match=r"genome|shape"):
            kind.space.from_bytes(wrong)


@kinds
def test_bytes_of_another_space_are_refused(kind: Kind) -> None:
    others = [other for other in KINDS.values() if other is not kind]
    for other in others:
        foreign = other.space.sample(np.random.default_rng(0), other.phases[0]).genome
        with pytest.raises(ValueError, match=r"genome|shape"):
            kind.space.from_bytes(foreign.to_bytes())


@phased
@few
@given(seed=seeds)
def test_order_of_interchangeable_parts_changes_neither_hash_nor_edit(
    kind: Kind, phase: PhaseConfig, seed: int
) -> None:
    genome = grown(kind, phase, seed)
    other = kind.permuted(genome, np.random.default_rng(seed))
    assert other.content_hash == genome.content_hash
    assert other.express().phenotype_hash == genome.express().phenotype_hash


@phased
def test_hashes_differ_exactly_where_edits_do(kind: Kind, phase: PhaseConfig) -> None:
    genomes = [grown(kind, phase, seed, steps) for seed in range(6) for steps in range(4)]
    by_content = {genome.content_hash: genome.express().phenotype_hash for genome in genomes}
    assert all(by_content[genome.content_hash] == genome.express().phenotype_hash for genome in genomes)
    assert len(set(by_content.values())) == len(by_content)
    if phase.kind == "merge":
        assert len(by_content) > 6


@phased
@few
@given(seed=seeds)
def test_flattening_is_undone_on_genomes_of_the_phase(kind: Kind, phase: PhaseConfig, seed: int) -> None:
    genome = grown(kind, phase, seed)
    vector = kind.space.flatten(genome, phase)
    assert vector.dtype == np.float64 and vector.ndim == 1
    assert kind.space.unflatten(vector, phase).content_hash == genome.content_hash


@phased
@few
@given(seed=seeds)
def test_any_point_is_a_genome(kind: Kind, phase: PhaseConfig, seed: int) -> None:
    dimension = kind.space.flatten(grown(kind, phase, 0), phase).size
    genome = kind.space.unflatten(np.random.default_rng(seed).standard_normal(dimension), phase)
    kind.check(genome, phase)
    assert kind.space.from_bytes(genome.to_bytes()) == genome


@phased
@few
@given(seed=seeds)
def test_descriptions_add_up(kind: Kind, phase: PhaseConfig, seed: int) -> None:
    description = kind.space.describe(grown(kind, phase, seed))
    assert 1 <= description.active <= description.experts
    assert 0 < description.active_parameters <= description.parameters
    # What is searched may itself add parameters: a mapping of the softmax does.
    assert description.parameters <= 1.001 * description.parameters_full
    assert description.summary and description.summary.isprintable() and len(description.summary) <= 120


@phased
def test_genomes_and_edits_are_immutable(kind: Kind, phase: PhaseConfig) -> None:
    genome = grown(kind, phase, 3)
    for array in kind.arrays(genome):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(FrozenInstanceError):
        genome.space = None
    before = genome.content_hash
    edit = genome.express()
    assert isinstance(edit, Edit)
    with pytest.raises(FrozenInstanceError):
        edit.active = 99  # type: ignore[attr-defined]
    assert kind.space.from_bytes(genome.to_bytes()).content_hash == before


def test_a_genome_does_not_share_memory_with_what_it_was_made_of() -> None:
    space = eep_space()
    source = continuous(space).router_mapping.copy()
    genome = EepGenome(space, source, source)
    before = genome.to_bytes()
    source[...] = 7
    assert genome.to_bytes() == before
