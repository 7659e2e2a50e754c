"""Fitted experts: planted ones are found, and routers are written along few directions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moevolve.workers.methods.shared.input_statistics import InputMoments
from moevolve.workers.methods.tomoe.experts import along_directions, fit_experts


def planted(tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs around a centre per kind of token, contributions of 6 neurons of the kind's own, and kinds."""
    rng = np.random.default_rng(3)
    kinds = rng.integers(experts, size=tokens)
    inputs = 2 + 3 * rng.standard_normal((experts, 16))[kinds] + 0.3 * rng.standard_normal((tokens, 16))
    own = np.arange(6 * experts) // 6 == kinds[:, None]
    contributions = rng.exponential(size=own.shape) * np.where(own, 1, 0.05)
    shares = contributions / contributions.sum(axis=1, keepdims=True)
    return torch.tensor(inputs).float(), torch.tensor(shares).float(), torch.tensor(kinds)


@pytest.mark.parametrize("experts", [2, 5])
def test_planted_experts_are_found(experts: int) -> None:
    inputs, shares, kinds = planted(2000, experts)
    directions, rows, saliency = fit_experts(inputs, shares, experts, kept=6, components=experts)
    chosen = (inputs.double() @ (rows @ directions).t()).argmax(dim=1)
    for kind in range(experts):
        (expert,) = chosen[kinds == kind].unique().tolist()
        best = set(saliency[expert].topk(6).indices.tolist())
        assert best == set(range(6 * kind, 6 * kind + 6))
        torch.testing.assert_close(saliency[expert].float(), shares[chosen == expert].mean(dim=0))


@pytest.mark.parametrize(("experts", "components"), [(1, 3), (40, 2), (3, 0)])
def test_any_number_of_experts_can_be_fitted(experts: int, components: int) -> None:
    inputs, shares, _ = planted(60, 3)
    directions, rows, saliency = fit_experts(inputs, shares, experts, kept=4, components=components)
    assert rows.shape == (experts, 1 + components) and directions.shape == (1 + components, 16)
    assert saliency.shape == (experts, 18) and bool((saliency.sum(dim=1) - 1).abs().max() < 1e-5)
    assert bool(rows.isfinite().all() and directions.isfinite().all())


def test_a_router_is_written_along_directions_of_size_one() -> None:
    rng = np.random.default_rng(0)
    inputs = 1 + rng.standard_normal((500, 7)) @ rng.standard_normal((7, 7))
    router = rng.standard_normal((4, 7))
    moments = InputMoments(7, torch.device("cpu"))
    moments.add(torch.tensor(inputs))
    directions, rows = (each.numpy() for each in along_directions(torch.tensor(router), moments, 5))
    coordinates = inputs @ directions.T
    np.testing.assert_allclose((coordinates[:, 0] ** 2).mean(), 1)
    np.testing.assert_allclose(coordinates[:, 1:5].mean(axis=0), 0, atol=1e-9)
    np.testing.assert_allclose(coordinates[:, 1:5].T @ coordinates[:, 1:5] / 500, np.eye(4), atol=1e-9)
    assert not directions[5:].any(), "four experts' logits vary in no more directions"
    found = rows @ directions
    np.testing.assert_allclose(found / np.linalg.norm(found), router / np.linalg.norm(router), atol=1e-9)
    np.testing.assert_allclose((rows**2).sum(axis=1).mean(), 1)
    # Fewer directions keep the largest variance of the logits.
    few, along = (each.numpy() for each in along_directions(torch.tensor(router), moments, 2))
    np.testing.assert_allclose(few, directions[:3])
    np.testing.assert_allclose(along / along[0, 1], rows[:, :3] / rows[0, 1])
