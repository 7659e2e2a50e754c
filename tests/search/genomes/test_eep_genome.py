"""EEP genomes beyond the contract: groups of layers, order of rows, routing groups, sizes and summaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import MERGE, PRUNE, continuous, deepseek, eep_space, gpt_oss, many, mixtral

from moevolve.evaluators.errors import UserError
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.eep.space import EepGenome, EepSpace
from moevolve.search.genomes.eep.subsets import Subsets
from moevolve.workers.methods.eep.edit import EepEdit


def test_groups_are_contiguous_and_as_equal_as_they_can_be() -> None:
    assert eep_space().layer_groups == (0,) * 8 + (1,) * 8 + (2,) * 8 + (3,) * 8, "the paper's four of Mixtral"
    assert eep_space(groups="per_layer", layers=5).layer_groups == (0, 1, 2, 3, 4)
    for layers, groups in ((40, 3), (7, 5), (9, 9), (6, 1)):
        space = eep_space(groups=groups, layers=layers)
        owners = np.array(space.layer_groups)
        assert owners.size == layers and owners[0] == 0 and owners[-1] == groups - 1
        assert set(np.diff(owners)) <= {0, 1}
        sizes = np.bincount(owners)
        assert space.groups == groups == sizes.size
        assert sizes.max() - sizes.min() <= 1


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


def test_what_the_model_cannot_give_is_refused() -> None:
    with pytest.raises(UserError, match=r"genome\.experts: 9 is more than the model's 8 experts"):
        EepSpace.of(EepSection(experts=9), mixtral())
    with pytest.raises(UserError, match=r"genome\.groups: 33 is more than the model's 32 MoE layers"):
        EepSpace.of(EepSection(experts=4, groups=33), mixtral())
    with pytest.raises(ValueError, match="router_mapping has shape"):
        EepGenome(eep_space(), np.zeros((4, 3, 8), np.float32), np.zeros((4, 4, 8), np.float32))


def test_retaining_all_starts_from_the_identity_and_activates_what_the_model_does() -> None:
    space = eep_space(8)
    offspring = space.sample(np.random.default_rng(4), PRUNE)
    assert offspring.operator == "identity"
    assert np.array_equal(offspring.genome.router_mapping, np.stack([np.eye(8, dtype=np.float32)] * 4))
    assert eep_space(7).sample(np.random.default_rng(4), PRUNE).operator == "random"
    assert [each.active for each in (eep_space(4), eep_space(1), eep_space(4, active=1))] == [2, 1, 1]


def test_a_genome_keeps_its_own_row_order_for_breeding(monkeypatch: pytest.MonkeyPatch) -> None:
    space = eep_space(3, 1)
    genome = continuous(space)
    order = [2, 0, 1]
    other = EepGenome(space, genome.router_mapping[:, order], genome.expert_merging[:, order])
    assert other != genome
    assert other.express().phenotype_hash == genome.express().phenotype_hash
    alone = EepGenome(space, genome.router_mapping[:, order], genome.expert_merging)
    assert alone.express().phenotype_hash != genome.express().phenotype_hash, "other rows of one matrix"
    assert np.array_equal(space.from_bytes(other.to_bytes()).router_mapping, genome.router_mapping[:, order])
    monkeypatch.setattr("moevolve.search.genomes.eep.space._NORMALISED", 0.0)
    quiet = MERGE.model_copy(update={"entry_rate": 0.0})
    child = space.breed(np.random.default_rng(0), quiet, (other,)).genome
    assert np.array_equal(child.expert_merging, genome.expert_merging[:, order])


def test_rows_are_ordered_by_merging_then_mapping_and_move_together() -> None:
    space = eep_space(3, 1, experts=3, layers=1)
    merging = np.array([[[0, 1, 0], [1, 0, 0], [0, 1, 0]]], np.float32)
    mapping = np.array([[[0.1, 0, 0], [0.2, 0, 0], [0.3, 0, 0]]], np.float32)
    ordered_mapping, ordered_merging = EepGenome(space, mapping, merging).canonical
    assert ordered_merging[0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]
    np.testing.assert_array_equal(ordered_mapping[0, :, 0], np.array([0.2, 0.3, 0.1], np.float32))


def test_minus_zero_is_zero() -> None:
    space = eep_space()
    genome = space.sample(np.random.default_rng(0), PRUNE).genome
    negated = np.where(genome.router_mapping == 0, np.float32(-0.0), genome.router_mapping)
    other = EepGenome(space, negated, negated)
    assert other == genome
    assert other.express().phenotype_hash == genome.express().phenotype_hash


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
    # Distances from whole numbers: 0.25, 0.25 and 0.5, of eight coefficients.
    merging = np.tile(np.float32([[1.25, 0.0, 0.0, 0.25], [0.5, 0.0, 1.0, 0.0]]), (2, 1, 1))
    merged = EepGenome(eep_space(2, 2, layers=4, experts=4), merging, merging)
    assert merged.space.describe(merged).summary == "merge 4->2, 2 groups, mean |dW| 0.125"
    many = eep_space(30, 2, experts=60)
    assert many.describe(many.sample(np.random.default_rng(0), PRUNE).genome).summary == "keep 30 of 60, 2 groups"


seeds = st.integers(0, 2**32 - 1)


@st.composite
def grouped(draw: st.DrawFn) -> Subsets:
    parts, size = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    return Subsets(parts * size, parts * draw(st.integers(1, size)), parts)


def are_valid(subsets: Subsets, kept: Any) -> bool:
    """Whether rows [groups, n'] are distinct, with equally many experts of every routing group, in its rows."""
    group = kept // (subsets.experts // subsets.routing_groups)
    expected = np.arange(subsets.retained) // (subsets.retained // subsets.routing_groups)
    return bool((np.diff(np.sort(kept)) > 0).all() and (group == expected).all())


@many
@given(grouped(), seeds, st.floats(0, 1))
def test_samples_crosses_and_mutants_keep_the_rule(subsets: Subsets, seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    kept = subsets.sample(rng, 3)
    assert kept.shape == (3, subsets.retained) and are_valid(subsets, kept)
    child = subsets.crossover(rng, kept[0], kept[1])
    assert are_valid(subsets, child[None])
    assert set(kept[0]) & set(kept[1]) <= set(child) <= set(kept[0]) | set(kept[1])
    stays = np.isin(kept[0], child)
    assert np.array_equal(kept[0][stays], child[stays]), "experts of the first parent keep their rows"
    assert are_valid(subsets, subsets.mutate(rng, child, rate)[None])
    scores = rng.standard_normal((2, subsets.experts))
    assert are_valid(subsets, subsets.best(scores))


def test_the_best_are_taken_from_every_routing_group() -> None:
    scores = np.array([[9.0, 8.0, 7.0, 0.0, 0.0, 1.0]])
    assert Subsets(6, 2, 2).best(scores).tolist() == [[0, 5]]
    assert Subsets(6, 2).best(scores).tolist() == [[0, 1]]
    assert Subsets(6, 4, 2).best(np.zeros((1, 6))).tolist() == [[0, 1, 3, 4]]


def test_a_rows_place_says_its_routing_group() -> None:
    """Rows are interchangeable within a routing group; across groups they make another model."""
    space = eep_space(8, 2, facts=deepseek())
    genome = continuous(space)

    def reordered(order: list[int]) -> EepGenome:
        return EepGenome(space, genome.router_mapping[:, order], genome.expert_merging[:, order])

    assert reordered([1, 0, 2, 3, 5, 4, 7, 6]).express().phenotype_hash == genome.express().phenotype_hash
    assert reordered([2, 1, 0, 3, 4, 5, 6, 7]).express().phenotype_hash != genome.express().phenotype_hash
    edit = genome.express()
    for part in range(4):
        places = slice(2 * part, 2 * part + 2)
        assert np.array_equal(
            np.sort(edit.expert_merging[0, places], axis=0), np.sort(genome.expert_merging[0, places], axis=0)
        )


def test_folding_decides_the_parameters_described_and_what_is_stock() -> None:
    sigmoid, logits = eep_space(8, 1, facts=deepseek()), eep_space(4, 1, facts=gpt_oss(), router_space="logits")
    pruned = sigmoid.sample(np.random.default_rng(0), PRUNE).genome
    per_layer = 3 * 4096 * 14336 + 4096
    assert sigmoid.describe(pruned).parameters == deepseek().parameters - 6 * 8 * per_layer
    mapped = sigmoid.describe(continuous(sigmoid)).parameters
    assert mapped == sigmoid.describe(pruned).parameters + 6 * 8 * 4096
    assert logits.describe(continuous(logits)).parameters == gpt_oss().parameters - 6 * 4 * per_layer
    stock = [sigmoid.describe(pruned), logits.describe(continuous(logits)), sigmoid.describe(continuous(sigmoid))]
    assert [each.stock for each in stock] == [True, True, False]


@pytest.mark.parametrize(
    ("facts", "settings", "message"),
    [
        (deepseek(), {"retained": 6}, "6 experts of a deepseek_v3 model can't be divided among the model's 4"),
        (deepseek(), {"retained": 4}, "4 experts of a deepseek_v3 model are too few: .* use 8 or more"),
        (deepseek(), {"retained": 8, "active": 5}, "5 active .* more than the 4 in the 2 of 4 routing"),
        (gpt_oss(), {}, r"genome.router_space \(gpt_oss model\): probs maps .* use router_space: logits"),
    ],
)
def test_what_the_family_cannot_express_is_refused(facts: Any, settings: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        eep_space(groups=2, facts=facts, **settings)


def test_active_defaults_to_what_a_token_can_reach() -> None:
    assert eep_space(8, 1, facts=deepseek(chosen=1)).active == 2


def test_genomes_that_only_prune_are_stored_as_their_experts() -> None:
    space = eep_space(64, "per_layer", layers=48, experts=128, active=8)
    genome = space.sample(np.random.default_rng(0), PRUNE).genome
    assert len(genome.to_bytes()) <= 4 * 48 * 64 + 32
    assert space.from_bytes(genome.to_bytes()) == genome
    unknown = genome.to_bytes()[:-4] + np.array([128], dtype="<u4").tobytes()
    with pytest.raises(ValueError, match="expert 128 of 128"):
        space.from_bytes(unknown)
