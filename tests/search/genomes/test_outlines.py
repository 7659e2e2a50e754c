"""Genomes in columns, as pages and commands show them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from search_samples import PRUNE, continuous, eep_space

from moevolve.search.genomes.contract.outline import (
    GenomeOutline,
    LayerOutline,
    outline_rows,
    outline_settings,
    ranges,
    runs,
)
from moevolve.search.genomes.registry import outline_of


def test_neighbouring_layers_that_are_alike_are_one_row() -> None:
    one = GenomeOutline(
        (("a", "1"), ("b", "2")), 4, (("width", 8),), tuple(LayerOutline(n, (0, 1), (8,)) for n in (1, 2, 4))
    )
    other = replace(one, settings=(("b", "3"),), layers=(*one.layers[:1], LayerOutline(2, (0, 2), (8,))))
    assert [row.layers for row in outline_rows(one)] == ["layers 1-2", "layer 4"]
    rows = outline_rows(one, other)
    assert [(row.layers, row.differs) for row in rows] == [("layer 1", False), ("layer 2", True), ("layer 4", False)]
    assert rows[-1].other is None
    assert list(runs([7, 0, 1, 2, 4])) == [(0, 2), (4, 4), (7, 7)]
    assert ranges([7, 0, 1, 2, 4]) == "0-2, 4, 7" and ranges([]) == "none"
    assert outline_settings(one, other) == [("a", "1", "-"), ("b", "2", "3")]


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
    assert [row.layers for row in outline_rows(outline)][::3] == ["layers 0-7", "layers 24-31"]
    assert ("experts are", "merged") in outline_of(continuous(space)).settings
