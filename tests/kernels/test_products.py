"""Products in tiles against torch's own and plain float64; whatever shares a product with a row, and wherever it stands."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from moevolve.kernels import onednn

pytestmark = pytest.mark.skipif(not onednn.available(), reason="this build of torch has no oneDNN")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("shape", [(1, 8), (7, 33), (2, 5, 16), (0, 8), (130, 128)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_torchs(shape: tuple[int, ...], bias: bool) -> None:
    inputs, weight = draw(*shape), draw(12, shape[-1])
    offset = draw(12) if bias else None
    with torch.inference_mode():
        found = onednn.linear(inputs, weight, offset)
    torch.testing.assert_close(found, torch.nn.functional.linear(inputs, weight, offset), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 9, 300])
@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("activation", [silu, gelu])
def test_experts_are_weighted_sums_of_each_ones_network(tokens: int, active: int, activation: object) -> None:
    count, width, hidden = 5, 24, 16
    gate_up, down = draw(count, 2 * width, hidden), draw(count, hidden, width)
    inputs, weights = draw(tokens, hidden), draw(tokens, active).softmax(dim=-1)
    generator = torch.Generator().manual_seed(tokens)
    # Expert 3 is never chosen.
    choices = torch.tensor([0, 1, 2, 4])
    chosen = choices[torch.rand((tokens, 4), generator=generator).argsort(dim=1)[:, :active]]
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for rank in range(active):
            expert = int(chosen[token, rank])
            gate, up = (gate_up[expert].double() @ inputs[token].double()).chunk(2)
            expected[token] += float(weights[token, rank]) * (down[expert].double() @ (activation(gate) * up))  # type: ignore[operator]
    with torch.inference_mode():
        found = onednn.experts(inputs, chosen, weights, gate_up, down, activation)  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


