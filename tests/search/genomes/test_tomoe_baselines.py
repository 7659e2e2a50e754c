"""Static masks as ToMoE genomes, compared with the papers' criteria computed neuron by neuron."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search_samples import TUNE, dense_model, few
from tomoe_samples import tomoe_space

from moevolve.search.genomes.tomoe.baselines import BASELINES, flap, saliency
from moevolve.workers.contract.edits import Calibration

MODELS = {
    "llama": dense_model(layers=5, hidden=32, width=96, heads=4),
    "opt": dense_model(layers=3, gated=False, bias=True),
}


def plainly_kept(metric: Any, total: int) -> list[set[int]]:
    """FLAP: the largest of all neurons' metrics, standardised per layer, and always the best neuron of every layer."""
    ranked = []
    for layer, values in enumerate(np.asarray(metric, dtype=np.float64)):
        mean = sum(values) / len(values)
        deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
        best = int(np.argmax(values))
        # Closer ones count as equal; of a layer's own the larger one stays in any case.
        scores = [round((value - mean) / deviation, 12) for value in values]
        ranked += [(neuron != best, -scores[neuron], layer, -v, neuron) for neuron, v in enumerate(values)]
    kept: list[set[int]] = [set() for _ in metric]
    for _, _, layer, _, neuron in sorted(ranked)[:total]:
        kept[layer].add(neuron)
    return kept


@pytest.mark.parametrize("name", MODELS)
@few
@given(budget=st.floats(0.15, 1.0), spread=st.sampled_from([0.01, 1.0, 3.0]), seed=st.integers(0, 2**32 - 1))
def test_flap_lets_layers_compete(name: str, budget: float, spread: float, seed: int) -> None:
    space = tomoe_space(MODELS[name], budget=round(budget, 3))
    metric = np.exp(np.random.default_rng(seed).normal(0, spread, space.statistics["neuron_fluctuation"].shape))
    space = space.calibrated(Calibration({**space.statistics, "neuron_fluctuation": metric.astype(np.float32)}))
    genome, even = flap(space).genome, space.even_widths
    edit, expected = genome.express(), plainly_kept(metric.astype(np.float32), int(even[:, 0].sum()))
    assert [set(np.flatnonzero(masks[0])) for masks in edit.kept] == expected
    assert (edit.kept == edit.kept[:, :1]).all(), "all tokens have the same mask"
    assert np.array_equal(genome.widths[:, 1:], even[:, 1:]), "heads are as at the start"
    assert 0 <= space.budget.total - space.budget.parameters(genome.widths) < space.budget.unit_costs[0]
    assert space.from_bytes(genome.to_bytes()) == genome == space.unflatten(space.flatten(genome, TUNE), TUNE)


def test_saliency_keeps_the_same_share_of_every_layer() -> None:
    space = tomoe_space(MODELS["llama"])
    edit = saliency(space).genome.express()
    assert np.array_equal(edit.widths, space.even_widths[:, 0])
    for masks, values in zip(edit.kept, space.statistics["neuron_saliency"], strict=True):
        best = set(np.argsort(-values)[: masks[0].sum()])
        assert all(set(np.flatnonzero(mask)) == best for mask in masks)


@pytest.mark.parametrize("name", BASELINES)
def test_children_keep_to_what_their_parents_masks_are_by(name: str) -> None:
    space = tomoe_space()
    offspring = BASELINES[name].make(space)
    assert (offspring.operator, offspring.parents) == (name, ())
    wild = TUNE.model_copy(update={"group_rate": 1.0, "entry_rate": 1.0, "swap_rate": 1.0})
    child = space.breed(np.random.default_rng(0), wild, (offspring.genome,)).genome
    assert np.array_equal(child.seeds, offspring.genome.seeds)
    assert child.express().phenotype_hash != offspring.genome.express().phenotype_hash
