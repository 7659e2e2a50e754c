"""The data in the figures of genome kinds, without looking at pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from search_samples import continuous, dense_model, eep_space

from moevolve.search.genomes.eep.figures import eep_figure
from moevolve.search.genomes.factorllm.figures import neurons_moved, partition_figure
from moevolve.search.genomes.nanomoe.figures import mixing_change, mixing_figure
from moevolve.search.genomes.nanomoe.genome import NanoMoeGenome
from moevolve.search.genomes.nanomoe.space import NanoMoeSection, NanoMoeSpace
from moevolve.workers.methods.factorllm.edit import FactorLlmEdit


def test_eep_matrices_are_drawn_about_zero() -> None:
    genome = continuous(eep_space(4, 3))
    figure = eep_figure(genome)
    panels = [axes for axes in figure.axes if axes.images]
    mapping, merging = genome.canonical
    assert len(panels) == 6
    for panel, expected in zip(panels, (m[g] for g in range(3) for m in (mapping, merging)), strict=True):
        (image,) = panel.images
        assert np.array_equal(image.get_array(), expected)
        low, high = image.get_clim()
        assert low == -high == -max(1.0, np.abs(mapping).max(), np.abs(merging).max())
    names = [panel.get_ylabel().split("\n")[0] for panel in panels]
    assert names == ["layers 0-10", "", "layers 11-21", "", "layers 22-31", ""]


def test_changes_of_mixing_are_measured_from_the_start() -> None:
    space = NanoMoeSpace.of(NanoMoeSection(kind="nanomoe", variant="III", blocks=2, rank=3), dense_model())
    start = np.broadcast_to(space.form.unmixed, space.shape)
    assert not mixing_change(NanoMoeGenome(space, start)).any()
    moved = start.copy()
    moved[1, :, 0, 1, 0] += [3, 0, 4]
    change = mixing_change(NanoMoeGenome(space, moved))
    assert change.shape == (len(space.layers), 2, 2)
    assert change[1, 0, 1] == pytest.approx(5 / 3) and np.count_nonzero(change) == 1
    images = [axes.images[0] for axes in mixing_figure(NanoMoeGenome(space, moved)).axes if axes.images]
    assert images[1].get_clim() == pytest.approx((0, 5 / 3))


def test_neurons_in_common_are_counted() -> None:
    zeros: Any = np.zeros((1, 1, 2, 3)), np.zeros((1, 1, 2))
    start = FactorLlmEdit(np.array([[0, 1, 2, 3]]), *zeros, 1)
    now = FactorLlmEdit(np.array([[0, 2, 1, 3]]), *zeros, 1)
    assert neurons_moved(start, start).tolist() == [[[2, 0], [0, 2]]]
    assert neurons_moved(now, start).tolist() == [[[1, 1], [1, 1]]]
    (image,) = partition_figure(now, start).axes[0].images
    assert image.get_array().tolist() == [[1, 1], [1, 1]] and image.get_clim() == (0, 2)
