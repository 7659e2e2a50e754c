"""Mixing matrices read off edited models, against the same numbers from plain definitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from usage_checks import SEQUENCES

from moevolve.workers.engine.measuring import analyse_usage
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.model.resident import ResidentModel


def test_mixing_matrices_are_read_as_the_model_runs_on_them(resident: Callable[[str], ResidentModel]) -> None:
    rng, model = np.random.default_rng(3), resident("llama")
    names = ("layers.0.mlp.up_proj", "layers.2.mlp.down_proj")
    for variant in ("I", "II", "III"):
        form = BlockForm(variant, 4, 3)
        mixing = rng.standard_normal((2, *form.mixing_shape)).astype(np.float32)
        found = analyse_usage(model, NanoMoeEdit(form, names, mixing), SEQUENCES)
        assert [layer.name for layer in found.mixed] == list(names) and not found.routed
        for layer, parameters in zip(found.mixed, mixing.astype(np.float64), strict=True):
            expected = {
                "I": lambda p, i, j: p[i, j],
                "II": lambda p, i, j: np.linalg.norm(np.diag(p[i, j])) / np.sqrt(3),
                "III": lambda p, i, j: (
                    np.linalg.norm(np.diag(p[0, i, j]) + np.outer(p[1, i, j], p[2, i, j])) / np.sqrt(3)
                ),
            }[variant]
            wanted = [[expected(parameters, i, j) for j in range(4)] for i in range(4)]
            assert layer.blocks == pytest.approx(np.array(wanted), rel=1e-5)
            assert layer.variant == variant
