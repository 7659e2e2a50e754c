"""The divided feed-forward network against its oracle, and against the undivided network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import factorized_ffn_token
from torch import Tensor
from torch.nn.functional import gelu, silu

from moevolve.kernels.expert_ffn import NetworkWeights, choose_experts, expert_ffn

HIDDEN, WIDTH, EXPERTS, TOKENS = 10, 24, 4, 33


def network(gated: bool, bias: bool) -> NetworkWeights:
    draw = torch.Generator().manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    return NetworkWeights(
        up=make(WIDTH, HIDDEN),
        gate=make(WIDTH, HIDDEN) if gated else None,
        down=make(HIDDEN, WIDTH),
        up_bias=make(WIDTH) if bias else None,
        gate_bias=make(WIDTH) if gated and bias else None,
        down_bias=make(HIDDEN) if bias else None,
        activation=silu if gated else gelu,
    )


def routers(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, EXPERTS, HIDDEN, generator=draw), torch.randn(count, EXPERTS, generator=draw)


def inputs() -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2))


shapes = pytest.mark.parametrize(("gated", "bias"), [(True, False), (True, True), (False, False), (False, True)])


@shapes
@pytest.mark.parametrize(("count", "active"), [(1, 2), (3, 3), (1, EXPERTS)])
def test_it_is_the_oracle(gated: bool, bias: bool, count: int, active: int) -> None:
    weights, hidden = network(gated, bias), inputs()
    weight, biases = routers(count)
    found = expert_ffn(hidden, choose_experts(hidden, weight, biases, active), weights)
    expected = [factorized_ffn_token(row, weights, EXPERTS, weight, biases, active) for row in hidden]
    torch.testing.assert_close(found, torch.stack(expected).float(), rtol=1e-5, atol=1e-5)


def test_one_router_chooses_exactly_k_experts_and_several_only_what_all_choose() -> None:
    weight, bias = routers(3)
    hidden = inputs()
    each = [choose_experts(hidden, weight[r : r + 1], bias[r : r + 1], 2) for r in range(3)]
    assert all((chosen.sum(dim=1) == 2).all() for chosen in each)
    together = choose_experts(hidden, weight, bias, 2)
    assert torch.equal(together, each[0] & each[1] & each[2])
    assert (together.sum(dim=1) < 2).any()
    biases = torch.tensor([[0.0, 2.0, -1.0, 1.0]])
    chosen = choose_experts(hidden, torch.zeros(1, EXPERTS, HIDDEN), biases, 2)
    assert torch.equal(chosen, torch.tensor([[False, True, False, True]]).expand(TOKENS, -1))


def test_tokens_without_experts_get_the_output_bias_and_no_tokens_nothing() -> None:
    weights = network(gated=False, bias=True)
    out = expert_ffn(inputs(), torch.zeros(TOKENS, EXPERTS, dtype=torch.bool), weights)
    assert weights.down_bias is not None
    assert torch.equal(out, weights.down_bias.expand(TOKENS, -1))
    empty = torch.empty(0, HIDDEN)
    assert expert_ffn(empty, choose_experts(empty, *routers(1), 2), weights).shape == (0, HIDDEN)


def test_an_expert_sees_its_own_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moevolve.kernels.expert_ffn.elementwise", lambda function, values: function(values))
    counted: list[int] = []

    def counting(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(values: Tensor) -> Tensor:
            counted.append(values.numel())
            return function(values)

        return run

    weights = network(gated=True, bias=False)
    settings: dict[str, Any] = {name: getattr(weights, name) for name in NetworkWeights.__slots__}
    watched = NetworkWeights(**(settings | {"activation": counting(silu)}))
    hidden = inputs()
    chosen = choose_experts(hidden, *routers(1), 1)
    expert_ffn(hidden, chosen, watched)
    assert sum(counted) == TOKENS * WIDTH // EXPERTS
    assert len(counted) == int(chosen.any(dim=0).sum())
