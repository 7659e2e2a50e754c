"""Genomes in columns."""

from __future__ import annotations

import numpy as np
from search_samples import PRUNE, continuous, eep_space

from moevolve.search.genomes.contract.outline import (
    GenomeOutline,
    LayerOutline,
    outline_rows,
    ranges,
)
from moevolve.search.genomes.registry import outline_of


def test_neighbouring_layers_that_are_alike_are_one_row() -> None:
    one = GenomeOutline(
        (("a", "1"), ("b", "2")), 4, (("width", 8),), tuple(LayerOutline(n, (0, 1), (8,)) for n in (1, 2, 4))
    )
    assert [name for name, _ in outline_rows(one)] == ["layers 1-2", "layer 4"]
    assert [layer for _, layer in outline_rows(one)] == [one.layers[0], one.layers[2]]
    assert ranges([7, 0, 1, 2, 4]) == "0-2, 4, 7" and ranges([]) == "none"


def test_an_eep_candidate_keeps_experts_of_each_layer() -> None:
    space = eep_space(4, 4)
    genome = space.sample(np.random.default_rng(1), PRUNE).genome
    outline = outline_of(genome)
    assert (
        outline.experts == space.experts and outline.sizes == () and outline.settings == (("kept experts", "4 of 8"),)
    )
    edit = genome.express()
    for layer in outline.layers:
        assert layer.experts == tuple(np.flatnonzero(edit.expert_merging[layer.layer].any(axis=0)))
    assert [name for name, _ in outline_rows(outline)][::3] == ["layers 0-7", "layers 24-31"]
    assert ("experts are", "merged") in outline_of(continuous(space)).settings


def test_a_candidate_of_narrower_experts_has_their_width_in_each_layer() -> None:
    space = eep_space(3, "per_layer", layers=4, neuron_share=0.125)
    outline = outline_of(space.from_kept(np.tile([1, 4, 6], (4, 1))))
    assert outline.sizes == (("neurons per expert", space.facts.expert_neurons),)
    assert {(layer.experts, layer.sizes) for layer in outline.layers} == {((1, 4, 6), (space.width,))}
    assert space.width < space.facts.expert_neurons
