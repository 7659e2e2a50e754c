"""Dynamic skipping of the second expert against the per-token oracle, in every way of routing."""

from __future__ import annotations

import oracles
import pytest
import torch

from moevolve.kernels import routing
from moevolve.kernels.routing_rule import RoutingRule

LOGITS = torch.randn((40, 8), generator=torch.Generator().manual_seed(0)) * 2
SELECTED = torch.tensor([6, 1, 3, 0])


def dense(weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    return torch.zeros((len(weights), 4), dtype=torch.float64).scatter_add_(1, chosen, weights.double())


@pytest.mark.parametrize("skip_below", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("logits_space", [True, False])
def test_pruned_routing_skips_as_the_oracle_does(skip_below: float, renormalise: bool, logits_space: bool) -> None:
    found = routing.route_selected(LOGITS, SELECTED, 2, RoutingRule(renormalise), logits_space, skip_below)
    mapping = torch.eye(8)[SELECTED]
    expected = torch.stack(
        [oracles.route_token(row, mapping, 2, RoutingRule(renormalise), logits_space, skip_below) for row in LOGITS]
    )
    torch.testing.assert_close(dense(*found), expected, atol=1e-6, rtol=0)
    skipped = (expected > 0).sum(dim=1) == 1
    assert bool(skipped.any()) == (skip_below > 0) and bool((~skipped).any()) == (skip_below < 1)
    if renormalise:
        torch.testing.assert_close(expected.sum(dim=1), torch.ones(40, dtype=torch.float64))


@pytest.mark.parametrize("renormalise", [True, False])
def test_mapped_and_folded_routing_skip_as_the_oracle_does(renormalise: bool) -> None:
    mapping = torch.rand((4, 8), generator=torch.Generator().manual_seed(1)) + 0.05
    mapped = routing.route_mapped(LOGITS, mapping, 2, RoutingRule(renormalise), 0.8)
    expected = torch.stack(
        [oracles.route_token(row, mapping, 2, RoutingRule(renormalise), False, 0.8) for row in LOGITS]
    )
    torch.testing.assert_close(dense(*mapped), expected, atol=1e-5, rtol=0)
    folded = routing.route_logits(LOGITS @ mapping.t(), 2, RoutingRule(renormalise), 0.8)
    expected = torch.stack(
        [oracles.route_token(row, mapping, 2, RoutingRule(renormalise), True, 0.8) for row in LOGITS]
    )
    torch.testing.assert_close(dense(*folded), expected, atol=1e-5, rtol=0)


def test_where_weights_vanish_the_skipped_expert_gets_no_share() -> None:
    logits = torch.zeros((1, 4))
    mapping = -torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    weights, chosen = routing.route_mapped(logits, mapping, 2, RoutingRule(True), 0.5)
    assert weights.tolist() == [[1.0, 0.0]] and chosen.tolist() == [[0, 1]]
    expected = oracles.route_token(logits[0], mapping, 2, RoutingRule(True), False, 0.5)
    assert expected.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("skip_below", [0.0, 0.5])
def test_a_softmax_of_the_chosen_skips_and_shares_again(skip_below: float) -> None:
    """GPT-OSS: weights are the softmax of the two chosen logits, and the remaining weights sum to the scale."""
    rule = RoutingRule(True, "softmax_of_chosen", scale=2.0)
    logits = torch.randn((50, 6), generator=torch.Generator().manual_seed(1))
    weights, chosen = routing.route_logits(logits, 2, rule, skip_below)
    for row, found, experts in zip(logits.double(), weights.double(), chosen, strict=True):
        first, second = row.sort(descending=True).values[:2]
        assert row[experts].tolist() == [first, second]
        share = float(1 / (1 + torch.exp(second - first)))
        skipped = 1 - share < skip_below * share
        expected = [2.0, 0.0] if skipped else [2 * share, 2 * (1 - share)]
        assert found.tolist() == pytest.approx(expected, abs=1e-6)
