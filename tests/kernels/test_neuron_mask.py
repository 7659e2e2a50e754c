"""The masked feed-forward network against its oracle, in both of its forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracles import masked_ffn_token
from torch import Tensor
from torch.nn.functional import relu, silu

from moevolve.kernels import expert_ffn, neuron_mask
from moevolve.kernels.expert_ffn import NetworkWeights
from moevolve.kernels.neuron_mask import ExpertMasks, choose_expert, masked_network, top_dimensions

HIDDEN, WIDTH, EXPERTS = 10, 24, 4
shapes = pytest.mark.parametrize(("gated", "bias"), [(True, False), (True, True), (False, False), (False, True)])
forms = pytest.mark.parametrize("copy_cost", [0, 10**9], ids=["sliced", "masked"])


def network(gated: bool, bias: bool, activation: Callable[[Tensor], Tensor] | None = None) -> NetworkWeights:
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
        activation=activation or (silu if gated else relu),
    )


def masks(kept: int, experts: int = EXPERTS, seed: int = 1) -> ExpertMasks:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randperm(WIDTH, generator=draw) < kept for _ in range(experts)])
    return ExpertMasks.of(rows)


def inputs(tokens: int = 33) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(tokens, HIDDEN, generator=draw), torch.randint(0, EXPERTS, (tokens,), generator=draw)


@forms
@shapes
@pytest.mark.parametrize("kept", [7, 24])
def test_both_forms_are_the_oracle(
    gated: bool, bias: bool, kept: int, copy_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neuron_mask, "_COPY_COST", copy_cost)
    weights, experts, (hidden, chosen) = network(gated, bias), masks(kept), inputs()
    found = masked_network(hidden, chosen, experts, weights)
    expected = [masked_ffn_token(row, weights, experts.kept[e]) for row, e in zip(hidden, chosen, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected).float(), rtol=1e-5, atol=1e-5)
    # Experts without tokens are passed over.
    found = masked_network(hidden[:5], torch.full((5,), 2), experts, weights)
    expected = [masked_ffn_token(row, weights, experts.kept[2]) for row in hidden[:5]]
    torch.testing.assert_close(found, torch.stack(expected).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [2, 200])
@pytest.mark.parametrize(("copy_cost", "computed"), [(10_000, WIDTH), (24, 6)])
def test_only_active_neurons_are_computed_where_copying_pays_off(
    tokens: int, copy_cost: int, computed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU this holds for any number of tokens."""
    monkeypatch.setattr(neuron_mask, "_COPY_COST", copy_cost)
    monkeypatch.setattr(expert_ffn, "elementwise", lambda function, values: function(values))
    counted: list[int] = []

    def counting(values: Tensor) -> Tensor:
        counted.append(values.numel())
        return silu(values)

    hidden, chosen = inputs(tokens)
    weights = network(True, False)
    expected = masked_network(hidden, chosen, masks(6), weights)
    assert torch.equal(masked_network(hidden, chosen, masks(6), replace(weights, activation=counting)), expected)
    assert sum(counted) == tokens * computed


def test_a_tie_goes_to_the_first_expert() -> None:
    hidden, _ = inputs()
    logits, chosen = choose_expert(hidden, torch.zeros(EXPERTS, HIDDEN))
    assert not logits.any() and not chosen.any()
    # Of small integers, so that sums are exact and equal rows tie however a product is divided among registers.
    draw = torch.Generator().manual_seed(3)
    row = torch.randint(-8, 9, (1, HIDDEN), generator=draw).float()
    whole = torch.randint(-8, 9, hidden.shape, generator=draw).bfloat16()
    both = choose_expert(whole, torch.cat((torch.zeros_like(row), row, row)))[1]
    assert set(both.tolist()) == {0, 1}


def test_top_dimensions_are_the_largest_scores_and_the_first_of_equal_ones() -> None:
    scores = torch.tensor([[0.5, 2.0, 2.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
    assert top_dimensions(scores, 2).tolist() == [[False, True, True, False], [True, True, False, False]]
    assert top_dimensions(scores, 1).tolist() == [[False, True, False, False], [True, False, False, False]]
    assert top_dimensions(scores, 4).all()
