"""Several candidates at once: merging, and routing of tokens by owner, against the oracles and against each alone."""

from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moevolve.kernels.expert_merge import merge_experts
from moevolve.kernels.routing import route_mapped, route_selected
from moevolve.kernels.routing_population import (
    TokenOwners,
    linear_by_owner,
    route_mapped_by_owner,
    route_selected_by_owner,
)
from moevolve.kernels.routing_rule import RoutingGroups, RoutingRule

RULES = [
    RoutingRule(True),
    RoutingRule(False),
    RoutingRule(True, "sigmoid", scale=2.5),
    RoutingRule(True, "sigmoid", RoutingGroups(3, 2, 2)),
]


def route_population(
    logits: torch.Tensor,
    mappings: torch.Tensor,
    owner: torch.Tensor,
    active: int,
    rule: RoutingRule,
    logits_space: bool,
) -> torch.Tensor:
    """Routing weights of tokens that each belong to one of P candidates, zero where an expert was not chosen.

    Args:
        logits: the router's logits over all n experts, [tokens, n].
        mappings: each candidate's `W_RM`, [P, n', n].
        owner: the candidate of each token, [tokens].
        active, rule, logits_space: see `oracles.route_token`.

    Returns:
        float64 [tokens, n'].
    """
    return torch.stack(
        [
            oracles.route_token(token, mappings[int(candidate)], active, rule, logits_space)
            for token, candidate in zip(logits, owner, strict=True)
        ]
    )


def some_owners(tokens: int, candidates: int, generator: torch.Generator) -> TokenOwners:
    return TokenOwners.of(torch.randint(candidates, (tokens,), generator=generator), candidates)


def dense(weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.zeros((weights.shape[0], experts), dtype=torch.float64).scatter_add_(1, chosen, weights.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7, 5), (33, 1024)])
def test_candidates_merge_as_each_alone(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.randn((6, *shape), generator=generator).to(dtype)
    coefficients = torch.randn((5, 4, 6), generator=generator)
    coefficients[1] = torch.eye(6)[[5, 0, 0, 2]]
    coefficients[2] = 0
    coefficients[3] *= torch.rand((4, 6), generator=generator) < 0.3
    out = torch.full((5, 4, *shape), float("nan"), dtype=dtype)
    merge_experts(coefficients, experts, out)
    for each, merged in zip(coefficients, out, strict=True):
        alone = torch.empty_like(merged)
        merge_experts(each, experts, alone)
        assert torch.equal(merged, alone)
        expected = oracles.merge_experts(each, experts)
        torch.testing.assert_close(merged, expected, atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=1e-2)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 12),
    candidates=st.integers(1, 5),
    count=st.sampled_from([6, 12]),
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31 - 1),
)
def test_continuous_mappings_match_the_oracle(
    tokens: int, candidates: int, count: int, rule: RoutingRule, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    owners = some_owners(tokens, candidates, generator)
    logits = (torch.randn((tokens, count), generator=generator) * 3).to(dtype)
    mappings = torch.rand((candidates, 6, count), generator=generator) + 0.05
    weights, chosen = route_mapped_by_owner(logits, mappings, owners, 2, rule)
    expected = route_population(logits, mappings, owners.owner, 2, rule, logits_space=False)
    torch.testing.assert_close(dense(weights, chosen, 6), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("logits_space", [True, False])
def test_one_hot_mappings_match_the_oracle(rule: RoutingRule, logits_space: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    owners = some_owners(40, 3, generator)
    logits = torch.randn((40, 12), generator=generator) * 3
    selected = torch.stack([torch.randperm(12, generator=generator)[:6] for _ in range(3)])
    weights, chosen = route_selected_by_owner(logits, selected, owners, 2, rule, logits_space)
    expected = route_population(logits, torch.eye(12)[selected], owners.owner, 2, rule, logits_space)
    torch.testing.assert_close(dense(weights, chosen, 6), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("count", "retained", "active"), [(8, 4, 2), (60, 31, 4), (8, 1, 1)])
@pytest.mark.parametrize("mapped", [True, False])
def test_tokens_get_the_bits_they_get_alone(count: int, retained: int, active: int, mapped: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    owner = torch.randint(4, (501,), generator=generator)
    owner[owner == 2] = 0  # one candidate has no token
    owners = TokenOwners.of(owner, 4)
    assert [len(rows) for rows in owners.rows] == [int((owner == each).sum()) for each in range(4)]
    logits = torch.randn((501, count), generator=generator).bfloat16()
    rule, biases = RoutingRule(True, "sigmoid"), torch.randn((4, retained), generator=generator)
    mappings = torch.randn((4, retained, count), generator=generator)
    selected = torch.stack([torch.randperm(count, generator=generator)[:retained] for _ in range(4)])
    if mapped:
        weights, chosen = route_mapped_by_owner(logits, mappings, owners, active, rule, biases=biases)
    else:
        weights, chosen = route_selected_by_owner(logits, selected, owners, active, rule, False, biases=biases)
    for each, rows in enumerate(owners.rows):
        mine, bias = logits[rows], biases[each].clone()
        if mapped:
            alone = route_mapped(mine, mappings[each].clone(), active, rule, bias=bias)
        else:
            alone = route_selected(mine, selected[each], active, rule, False, bias=bias)
        assert torch.equal(weights[rows], alone[0])
        assert torch.equal(chosen[rows], alone[1])


def test_folded_routers_of_each_candidate() -> None:
    generator = torch.Generator().manual_seed(4)
    owners = some_owners(17, 3, generator)
    inputs = torch.randn((17, 33), generator=generator)
    weight, bias = torch.randn((3, 5, 33), generator=generator), torch.randn((3, 5), generator=generator)
    logits = linear_by_owner(inputs, weight, owners, bias)
    expected = torch.einsum("th,teh->te", inputs.double(), weight[owners.owner].double()) + bias[owners.owner]
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=0)


def test_a_token_of_no_candidate_is_refused() -> None:
    with pytest.raises(ValueError, match="candidate 3 of 3"):
        TokenOwners.of(torch.tensor([0, 3]), 3)
