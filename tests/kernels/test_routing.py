"""Routing over mapped experts against the per-token loop oracle."""

from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moevolve.kernels import routing
from moevolve.kernels.routing_rule import RoutingRule


def dense(weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.zeros((weights.shape[0], experts), dtype=torch.float64).scatter_add_(1, chosen, weights.double())


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 7),
    count=st.integers(1, 9),
    data=st.data(),
    renormalise=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_continuous_mapping_matches_the_oracle(
    tokens: int, count: int, data: st.DataObject, renormalise: bool, seed: int
) -> None:
    retained = data.draw(st.integers(1, count))
    active = data.draw(st.integers(1, retained))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((tokens, count), generator=generator) * 3
    # Positive sums: where they nearly vanish the quotient amplifies rounding; that case has its own test.
    mapping = torch.rand((retained, count), generator=generator) + 0.05
    weights, chosen = routing.route_mapped(logits, mapping, active, RoutingRule(renormalise))
    expected = torch.stack(
        [oracles.route_token(row, mapping, active, RoutingRule(renormalise), False) for row in logits]
    )
    torch.testing.assert_close(dense(weights, chosen, retained), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("logits_space", [True, False])
def test_one_hot_mapping_matches_the_oracle(renormalise: bool, logits_space: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((50, 8), generator=generator) * 3
    selected = torch.tensor([6, 1, 3])
    mapping = torch.eye(8)[selected]
    weights, chosen = routing.route_selected(logits, selected, 2, RoutingRule(renormalise), logits_space)
    expected = torch.stack(
        [oracles.route_token(row, mapping, 2, RoutingRule(renormalise), logits_space) for row in logits]
    )
    torch.testing.assert_close(dense(weights, chosen, 3), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("logits_space", [True, False])
def test_one_hot_with_rescaling_is_routing_among_the_kept_experts(logits_space: bool) -> None:
    logits = torch.randn((50, 8), generator=torch.Generator().manual_seed(0)) * 30
    selected = torch.tensor([6, 1, 3])
    weights, chosen = routing.route_selected(logits, selected, 2, RoutingRule(True), logits_space)
    alone_weights, alone_chosen = routing.route_logits(logits[:, selected], 2, RoutingRule(True))
    assert torch.equal(weights, alone_weights)
    assert torch.equal(chosen, alone_chosen)


@settings(max_examples=60, deadline=None)
@given(
    scale=st.sampled_from([0.0, 1e-30, 1e-7, 1.0, 1e4]),
    logit_scale=st.sampled_from([0.0, 1.0, 1e3]),
    renormalise=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_any_finite_mapping_gives_finite_weights(
    scale: float, logit_scale: float, renormalise: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((20, 6), generator=generator) * logit_scale
    mapping = torch.randn((4, 6), generator=generator) * scale
    weights, _ = routing.route_mapped(logits, mapping, 2, RoutingRule(renormalise))
    assert torch.isfinite(weights).all()


def test_negative_sums_share_evenly_and_negative_weights_stay() -> None:
    logits = torch.zeros((1, 4))
    mapping = -torch.eye(4)[:3]
    assert routing.route_mapped(logits, mapping, 2, RoutingRule(True))[0].tolist() == [[0.5, 0.5]]
    assert routing.route_mapped(logits, mapping, 2, RoutingRule(False))[0].tolist() == [[-0.25, -0.25]]
    assert routing.route_mapped(logits, torch.zeros((3, 4)), 3, RoutingRule(True))[0].tolist() == [
        [pytest.approx(1 / 3)] * 3
    ]
