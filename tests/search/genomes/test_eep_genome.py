"""EEP genomes beyond the contract: one-hot pruning, decoupled merging, groups of layers, canonical order of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import MERGE, PRUNE, continuous, eep_space, few, mixtral

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.eep.space import EepSection, EepSpace
from moevolve.search.genomes.registry import make_space
from moevolve.workers.methods.eep.edit import EepEdit

seeds = st.integers(0, 2**32 - 1)


def test_the_registry_makes_the_space_of_a_section() -> None:
    assert make_space(EepSection(experts=4), mixtral()) == eep_space()


@few
@given(seeds, st.integers(1, 8))
def test_pruning_children_are_one_hot_and_coupled(seed: int, retained: int) -> None:
    space = eep_space(retained)
    rng = np.random.default_rng(seed)
    parents = (space.sample(rng, PRUNE).genome, space.sample(rng, PRUNE).genome)
    child = space.breed(rng, PRUNE, parents).genome
    assert np.array_equal(child.router_mapping, child.expert_merging)
    assert set(np.unique(child.router_mapping)) <= {0.0, 1.0}
    assert (child.router_mapping.sum(axis=2) == 1).all()
    assert (child.router_mapping.sum(axis=1) <= 1).all()
    kept = space.kept(child)
    assert space.from_kept(kept) == child


def test_merging_decouples_the_matrices() -> None:
    space = eep_space()
    rng = np.random.default_rng(0)
    phase = MERGE.model_copy(update={"entry_rate": 1.0, "group_rate": 1.0, "normalise_rate": 0.0})
    child = space.breed(rng, phase, (space.sample(rng, PRUNE).genome,)).genome
    assert (child.router_mapping != child.expert_merging).all()
    assert not child.one_hot


def test_merging_touches_only_the_groups_selected() -> None:
    space = eep_space(groups="per_layer")
    rng = np.random.default_rng(0)
    parent = space.sample(rng, PRUNE).genome
    phase = MERGE.model_copy(update={"group_rate": 0.01, "entry_rate": 1.0, "normalise_rate": 0.0})
    child = space.breed(rng, phase, (parent,)).genome
    mapped = (child.router_mapping != parent.router_mapping).any(axis=(1, 2))
    merged = (child.expert_merging != parent.expert_merging).any(axis=(1, 2))
    assert 1 <= mapped.sum() + merged.sum() <= 3


def test_normalising_scales_the_merging_matrix_only() -> None:
    space = eep_space()
    parent = continuous(space)
    phase = MERGE.model_copy(update={"group_rate": 1.0, "entry_rate": 0.0, "normalise_rate": 1.0})
    child = space.breed(np.random.default_rng(0), phase, (parent,)).genome
    np.testing.assert_allclose(child.expert_merging.sum(axis=2), 1, atol=1e-4)
    assert np.array_equal(child.router_mapping, parent.router_mapping)


def test_a_merge_child_without_mutation_or_crossover_is_its_parent() -> None:
    space = eep_space()
    parent = continuous(space)
    phase = MERGE.model_copy(update={"entry_rate": 0.0, "normalise_rate": 0.0})
    assert space.breed(np.random.default_rng(0), phase, (parent,)).genome == parent


@few
@given(st.integers(1, 40), st.integers(1, 40))
def test_groups_are_contiguous_and_as_equal_as_they_can_be(layers: int, groups: int) -> None:
    if groups > layers:
        with pytest.raises(UserError, match=f"genome.groups: {groups} is more than the model's {layers} MoE layers"):
            eep_space(groups=groups, layers=layers)
        return
    space = eep_space(groups=groups, layers=layers)
    owners = np.array(space.layer_groups)
    assert owners.size == layers and owners[0] == 0 and owners[-1] == groups - 1
    assert set(np.diff(owners)) <= {0, 1}
    sizes = np.bincount(owners)
    assert space.groups == groups == sizes.size
    assert sizes.max() - sizes.min() <= 1


def test_the_papers_four_groups_of_mixtral() -> None:
    assert eep_space().layer_groups == (0,) * 8 + (1,) * 8 + (2,) * 8 + (3,) * 8


def test_per_layer_gives_every_layer_its_own_matrices() -> None:
    space = eep_space(groups="per_layer", layers=5)
    assert space.layer_groups == (0, 1, 2, 3, 4)
    genome = continuous(space)
    assert np.array_equal(
        np.sort(genome.express().router_mapping, axis=None), np.sort(genome.router_mapping, axis=None)
    )


def test_every_layer_of_a_group_gets_the_groups_matrices() -> None:
    space = eep_space(retained=3, groups=3, layers=7, active=1, router_space="logits")
    genome = continuous(space)
    edit = genome.express()
    assert isinstance(edit, EepEdit)
    assert (edit.layers, edit.retained, edit.experts, edit.active) == (7, 3, 8, 1)
    assert edit.router_space == "logits"
    mapping, merging = genome.canonical
    for layer, group in enumerate(space.layer_groups):
        assert np.array_equal(edit.router_mapping[layer], mapping[group])
        assert np.array_equal(edit.expert_merging[layer], merging[group])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"experts": 9}, "genome.experts: 9 is more than the model's 8 experts"),
        ({"experts": 4, "groups": 33}, "genome.groups: 33 is more than the model's 32 MoE layers"),
    ],
)
def test_what_the_model_cannot_give_is_refused(section: dict[str, int], message: str) -> None:
    with pytest.raises(UserError) as caught:
        EepSpace.of(EepSection(**section), mixtral())
    assert str(caught.value) == message


def test_active_defaults_to_the_models_but_at_most_the_retained() -> None:
    assert eep_space(4).active == 2
    assert eep_space(1).active == 1
    assert eep_space(4, active=1).active == 1


def test_retaining_all_starts_from_the_identity() -> None:
    space = eep_space(8)
    offspring = space.sample(np.random.default_rng(4), PRUNE)
    assert offspring.operator == "identity"
    assert np.array_equal(offspring.genome.router_mapping, np.stack([np.eye(8, dtype=np.float32)] * 4))
    assert eep_space(7).sample(np.random.default_rng(4), PRUNE).operator == "random"


def test_a_genome_keeps_its_own_row_order_for_breeding() -> None:
    space = eep_space(3, 1)
    genome = continuous(space)
    order = [2, 0, 1]
    other = EepGenome(space, genome.router_mapping[:, order], genome.expert_merging[:, order])
    assert other != genome
    assert other.content_hash == genome.content_hash
    assert all(np.array_equal(*pair) for pair in zip(other.canonical, genome.canonical, strict=True))
    assert np.array_equal(space.from_bytes(other.to_bytes()).router_mapping, genome.router_mapping[:, order])
    quiet = MERGE.model_copy(update={"entry_rate": 0.0, "normalise_rate": 0.0})
    child = space.breed(np.random.default_rng(0), quiet, (other,)).genome
    assert np.array_equal(child.expert_merging, genome.expert_merging[:, order])


def test_rows_are_ordered_by_merging_then_mapping_and_move_together() -> None:
    space = eep_space(3, 1, experts=3, layers=1)
    merging = np.array([[[0, 1, 0], [1, 0, 0], [0, 1, 0]]], np.float32)
    mapping = np.array([[[0.1, 0, 0], [0.2, 0, 0], [0.3, 0, 0]]], np.float32)
    ordered_mapping, ordered_merging = EepGenome(space, mapping, merging).canonical
    assert ordered_merging[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    np.testing.assert_array_equal(ordered_mapping[0, :, 0], np.array([0.2, 0.3, 0.1], np.float32))


def test_swapping_rows_of_one_matrix_alone_is_another_candidate() -> None:
    space = eep_space(3, 1)
    genome = continuous(space)
    swapped = EepGenome(space, genome.router_mapping[:, [1, 0, 2]], genome.expert_merging)
    assert swapped.content_hash != genome.content_hash


def test_minus_zero_is_zero() -> None:
    space = eep_space()
    genome = space.sample(np.random.default_rng(0), PRUNE).genome
    negated = np.where(genome.router_mapping == 0, np.float32(-0.0), genome.router_mapping)
    other = EepGenome(space, negated, negated)
    assert other.to_bytes() != genome.to_bytes()
    assert other.content_hash == genome.content_hash
    assert other.express().phenotype_hash == genome.express().phenotype_hash


def test_wrong_shapes_are_refused() -> None:
    space = eep_space()
    with pytest.raises(ValueError, match="router_mapping has shape"):
        EepGenome(space, np.zeros((4, 3, 8), np.float32), np.zeros((4, 4, 8), np.float32))


def test_unflattening_keeps_the_highest_scores() -> None:
    space = eep_space(2, 1, layers=1, experts=4)
    genome = space.unflatten(np.array([0.1, 0.9, 0.9, 0.2]), PRUNE)
    assert space.kept(genome).tolist() == [[1, 2]]
    tied = space.unflatten(np.zeros(4), PRUNE)
    assert space.kept(tied).tolist() == [[0, 1]]


def test_mixtrals_parameters_after_pruning() -> None:
    facts = mixtral()
    assert facts.parameters == 46_702_792_704
    half = eep_space(4).describe(eep_space(4).sample(np.random.default_rng(0), PRUNE).genome)
    dropped = 32 * 4 * (3 * 4096 * 14336 + 4096)
    assert half.parameters == facts.parameters - dropped
    assert half.parameters_full == facts.parameters
    assert half.parameters - half.active_parameters == 32 * 2 * 3 * 4096 * 14336


def test_summaries_say_what_is_kept_or_merged() -> None:
    space = eep_space(2, 2)
    pruned = space.from_kept(np.array([[0, 7], [3, 4]]))
    assert space.describe(pruned).summary == "keep 07 34"
    assert space.describe(continuous(space)).summary.startswith("merge 8->2, 2 groups, mean |dW| 0.")
    layered = eep_space(4, "per_layer")
    sample = layered.sample(np.random.default_rng(0), PRUNE).genome
    assert layered.describe(sample).summary == "keep 4 of 8, 32 groups"
    many = eep_space(30, 2, experts=60)
    assert many.describe(many.sample(np.random.default_rng(0), PRUNE).genome).summary == "keep 30 of 60, 2 groups"


def test_a_childs_operator_says_whether_it_has_two_parents() -> None:
    space = eep_space(layers=4)
    both = tuple(space.sample(np.random.default_rng(seed), PRUNE).genome for seed in range(2))
    for phase in (PRUNE, MERGE):
        for parents, operator in ((both[:1], "mutation"), (both, "crossover+mutation")):
            child = space.breed(np.random.default_rng(3), phase, parents)
            assert (child.operator, len(child.parents)) == (operator, len(parents))


def test_a_summary_says_how_far_merging_went() -> None:
    """Distances from whole numbers: 0.25, 0.25 and 0.5, of eight coefficients."""
    space = eep_space(retained=2, groups=2, layers=4, experts=4)
    merging = np.tile(np.float32([[1.25, 0.0, 0.0, 0.25], [0.5, 0.0, 1.0, 0.0]]), (2, 1, 1))
    genome = EepGenome(space, merging, merging)
    assert space.describe(genome).summary == "merge 4->2, 2 groups, mean |dW| 0.125"
