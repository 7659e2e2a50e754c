"""Routing over mapped and picked experts by every kind of rule, with and without skipping, against a loop per token."""

from __future__ import annotations

import math

import oracles
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moevolve.kernels import routing
from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule

FREE, PAIRS = RoutingGroups(), RoutingGroups(count=3, chosen=2, best=2)
RULES = {
    "softmax": RoutingRule(True),
    "softmax-unscaled": RoutingRule(False),
    "sigmoid": RoutingRule(True, "sigmoid", FREE, 2.5),
    "sigmoid-grouped": RoutingRule(True, "sigmoid", PAIRS, 2.5),
    "sigmoid-unscaled": RoutingRule(False, "sigmoid", PAIRS),
    "softmax-grouped": RoutingRule(False, "softmax", RoutingGroups(count=3, chosen=1, best=1), 1.5),
    "softmax-grouped-rescaled": RoutingRule(True, "softmax", RoutingGroups(count=3, chosen=2, best=1)),
    "chosen": RoutingRule(True, "softmax_of_chosen"),
    "chosen-sigmoid": RoutingRule(False, "sigmoid_of_chosen"),
    "chosen-sigmoid-rescaled": RoutingRule(True, "sigmoid_of_chosen", scale=2.5),
    "chosen-root": RoutingRule(True, "sqrt_softplus_of_chosen", scale=1.5),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
few = settings(max_examples=12, deadline=None)


def dense(weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.zeros((weights.shape[0], experts), dtype=torch.float64).scatter_add_(1, chosen, weights.double())


def sample(seed: int, retained: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [tokens, 12], a mapping [n', 12] and a correction bias [12]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((9, 12), generator=generator) * 2
    mapping = torch.rand((retained, 12), generator=generator) + 0.05
    return logits, mapping, torch.randn(12, generator=generator) * 0.3


@rules
@few
@given(
    seed=st.integers(0, 2**31 - 1),
    size=st.integers(2, 4),
    active=st.integers(1, 2),
    logits_space=st.booleans(),
    corrects=st.booleans(),
    skip_below=st.sampled_from([None, 0.0, 0.5, 0.8]),
)
# Scores that sum to 7e-8.
@example(seed=4426, size=3, active=2, logits_space=True, corrects=True, skip_below=None)
def test_every_rule_matches_the_oracle(
    rule: RoutingRule,
    seed: int,
    size: int,
    active: int,
    logits_space: bool,
    corrects: bool,
    skip_below: float | None,
) -> None:
    retained, skip = 3 * size, skip_below if active == 2 else None
    logits, mapping, correction = sample(seed, retained)
    bias = correction if corrects and rule.scores.startswith(("sigmoid", "sqrt")) else None
    mapped_bias = None if bias is None else mapping @ bias
    logits_space = logits_space or not rule.has_scores
    if logits_space:
        weights, chosen = routing.route_logits(logits @ mapping.t(), active, rule, skip, bias=mapped_bias)
    else:
        weights, chosen = routing.route_mapped(logits, mapping, active, rule, skip, bias=mapped_bias)
    expected = [oracles.route_token(row, mapping, active, rule, logits_space, skip, bias) for row in logits]
    torch.testing.assert_close(dense(weights, chosen, retained), torch.stack(expected), atol=2e-5, rtol=0)


@rules
@few
@given(seed=st.integers(0, 2**31 - 1), logits_space=st.booleans(), skip=st.sampled_from([None, 0.5]), data=st.data())
def test_picking_experts_matches_the_oracle(
    rule: RoutingRule, seed: int, logits_space: bool, skip: float | None, data: st.DataObject
) -> None:
    logits, _, correction = sample(seed, 6)
    selected = torch.tensor(data.draw(st.permutations(range(12)))[:6])
    bias = correction if rule.scores.startswith(("sigmoid", "sqrt")) else None
    kept = None if bias is None else bias[selected]
    weights, chosen = routing.route_selected(logits, selected, 2, rule, logits_space, skip, bias=kept)
    one_hot = torch.eye(12)[selected]
    expected = [oracles.route_token(row, one_hot, 2, rule, logits_space, skip, bias) for row in logits]
    torch.testing.assert_close(dense(weights, chosen, 6), torch.stack(expected), atol=2e-6, rtol=0)
    if rule.one_hot_folds:
        alone = routing.route_logits(logits[:, selected], 2, rule, skip, bias=kept)
        assert torch.equal(weights, alone[0]) and torch.equal(chosen, alone[1])


def test_the_second_expert_is_skipped_below_its_share() -> None:
    logits, selected = sample(0, 4)[0], torch.tensor([6, 1, 3, 0])
    for skip, some, all_of_them in ((0.0, False, False), (0.5, True, False), (1.0, True, True)):
        weights = routing.route_selected(logits, selected, 2, RoutingRule(True), False, skip)[0]
        skipped = weights[:, 1] == 0
        assert (bool(skipped.any()), bool(skipped.all())) == (some, all_of_them)
        torch.testing.assert_close(weights.sum(dim=1), torch.ones(9))
    # Where weights vanish, the skipped expert gets no share.
    mapping = -torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    weights, chosen = routing.route_mapped(torch.zeros((1, 4)), mapping, 2, RoutingRule(True), 0.5)
    assert weights.tolist() == [[1.0, 0.0]] and chosen.tolist() == [[0, 1]]


@rules
@few
@given(
    seed=st.integers(0, 2**31 - 1),
    scale=st.sampled_from([0.0, 1e-30, 1e-7, 1.0, 1e4]),
    logit_scale=st.sampled_from([0.0, 1.0, 1e3]),
)
def test_any_finite_mapping_gives_finite_weights_in_reach(
    rule: RoutingRule, seed: int, scale: float, logit_scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((20, 12), generator=generator) * logit_scale
    mapping = torch.randn((6, 12), generator=generator) * scale
    if not rule.has_scores:
        weights, chosen = routing.route_logits(logits @ mapping.t(), 2, rule)
    else:
        weights, chosen = routing.route_mapped(logits, mapping, 2, rule)
    assert torch.isfinite(weights).all()
    assert all(len(set((row // (6 // rule.groups.count)).tolist())) <= rule.groups.chosen for row in chosen) or (
        rule.groups.count == 1
    )


def test_the_bias_chooses_and_does_not_weigh() -> None:
    rule, logits = RoutingRule(True, "sigmoid"), torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, chosen = routing.route_logits(logits, 2, rule, bias=torch.tensor([-1.0, 0.0, 0.0, 1.0]))
    assert chosen.tolist() == [[3, 1]]
    picked = torch.sigmoid(torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(weights, (picked / picked.sum())[None])


def test_vanishing_sigmoids_are_divided_as_the_families_do() -> None:
    """Selected experts get the family's own quotient, however small; mapped ones get equal weights."""
    rule, logits = RoutingRule(True, "sigmoid"), torch.full((1, 4), -20.0)
    selected = torch.tensor([0, 1, 2])
    assert routing.route_selected(logits, selected, 2, rule, False)[0].tolist() == [[0.5, 0.5]]
    far = torch.tensor([[-20.0, -22.0, -30.0, 0.0]])
    weights = routing.route_selected(far, selected, 2, rule, False)[0][0]
    assert float(weights[0] / weights[1]) == pytest.approx(float(torch.exp(torch.tensor(2.0))), rel=1e-4)
    assert routing.route_mapped(far, torch.eye(4)[:3], 2, rule)[0].tolist() == [[0.5, 0.5]]


def test_negative_sums_share_evenly_and_negative_weights_stay() -> None:
    logits, mapping = torch.zeros((1, 4)), -torch.eye(4)[:3]
    assert routing.route_mapped(logits, mapping, 2, RoutingRule(True))[0].tolist() == [[0.5, 0.5]]
    assert routing.route_mapped(logits, mapping, 2, RoutingRule(False))[0].tolist() == [[-0.25, -0.25]]
    even = routing.route_mapped(logits, torch.zeros((3, 4)), 3, RoutingRule(True))[0]
    assert even.tolist() == [[pytest.approx(1 / 3)] * 3]


def test_what_groups_allow_and_which_rules_fold() -> None:
    assert [PAIRS.reach(n) for n in (6, 12)] == [4, 8]
    assert PAIRS.fault(6) is None
    assert PAIRS.fault(8) == (
        "can't be divided among the model's 3 routing groups; use a multiple of 3, so that every group keeps as many"
    )
    assert str(PAIRS.fault(3)).endswith("needs as many in each of its 3 routing groups; use 6 or more")
    assert str(RoutingGroups(best=2).fault(1)).endswith("2 best experts and needs as many; use 2 or more")
    assert FREE.fault(1) is None
    unfolded = [name for name, rule in RULES.items() if not rule.one_hot_folds]
    assert unfolded == ["softmax-unscaled", "softmax-grouped"]


@few
@given(seed=st.integers(0, 2**31 - 1), retained=st.integers(1, 8), active=st.integers(1, 5))
def test_fixed_experts_are_replaced_by_those_that_are_kept(seed: int, retained: int, active: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    given_ = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(20)])
    kept = torch.randperm(8, generator=generator)[:retained]
    places = torch.full((8,), -1)
    places[kept] = torch.arange(retained)
    found = routing.choose_kept(given_, places, retained, active).tolist()
    for row, experts in zip(found, given_.tolist(), strict=True):
        left = [kept.tolist().index(expert) for expert in experts if expert in kept.tolist()]
        left = left or [expert % retained for expert in experts]
        assert row == (left * active)[:active]


def test_fixed_experts_are_weighted_by_their_scores_alone() -> None:
    """Rescaled over both, or over the one that a token gets twice."""
    rule, logits = RoutingRule(True, "sqrt_softplus_of_chosen", scale=3.0), torch.tensor([[0.0, 1.0, -2.0]] * 2)
    chosen = torch.tensor([[2, 0], [1, 1]])
    scores = [math.sqrt(math.log1p(math.exp(each))) for each in (0.0, 1.0, -2.0)]
    total = (scores[2] + scores[0]) / 3
    for weights, found in (
        routing.route_logits(logits, 2, rule, chosen=chosen),
        routing.route_selected(logits, torch.arange(3), 2, rule, False, chosen=chosen),
    ):
        assert torch.equal(found, chosen)
        expected = [[scores[2] / total, scores[0] / total], [1.5, 1.5]]
        torch.testing.assert_close(weights, torch.tensor(expected))


def test_two_experts_are_chosen_one_after_the_other() -> None:
    """Weights are softmaxes over the logits near the best one, and then over those near the second."""
    rule = RoutingRule(False, "sparse_mixer", nearness=0.5)
    logits = torch.tensor([[1.0, 4.0, 2.5, 1.5], [-3.0, -1.0, -1.2, -9.0]])
    weights, chosen = routing.route_logits(logits, 2, rule)
    assert chosen.tolist() == [[1, 2], [1, 2]]
    # Near 4 is 2.5, since (4 - 2.5) / 4 < 0.5; near 2.5 is 1.5. Distances to negative logits are relative to them.
    first, second = torch.tensor([4.0, 2.5]).softmax(0), torch.tensor([2.5, 1.5]).softmax(0)
    near, alone = torch.tensor([-1.0, -1.2]).softmax(0), torch.tensor(1.0)
    torch.testing.assert_close(weights, torch.tensor([[first[0], second[0]], [near[0], alone]]))
    assert rule.one_hot_folds and not rule.has_scores
    assert rule.active_fault(6, 2) is None and "always choose two" in str(rule.active_fault(6, 1))
