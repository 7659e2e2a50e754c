"""Tiled products against torch's own and float64, for all positions of a row and all other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from moevolve.kernels import products

Function = Callable[[Tensor], Tensor]


@pytest.fixture(params=["torch", "onednn"])
def use_onednn(request: pytest.FixtureRequest) -> bool:
    if request.param == "onednn" and not products.onednn_available():
        pytest.skip("this build of torch has no oneDNN")
    return bool(request.param == "onednn")


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@torch.inference_mode()
def test_linear_is_torchs(use_onednn: bool) -> None:
    for shape in ((1, 8), (7, 33), (2, 5, 16), (0, 8), (130, 128)):
        inputs, weight = draw(*shape), draw(12, shape[-1])
        for offset in (draw(12), None):
            found = products.linear(inputs, weight, offset, use_onednn=use_onednn)
            torch.testing.assert_close(found, torch.nn.functional.linear(inputs, weight, offset), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "active", "activation"), [(0, 2, silu), (1, 1, silu), (9, 3, gelu), (150, 2, silu)])
def test_experts_are_weighted_sums_of_each_ones_network(
    tokens: int, active: int, activation: Function, use_onednn: bool
) -> None:
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
            expected[token] += float(weights[token, rank]) * (down[expert].double() @ (activation(gate) * up))
    with torch.inference_mode():
        found = products.experts(inputs, chosen, weights, gate_up, down, activation, use_onednn=use_onednn)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [1, 6, 33, 128])
def test_a_row_is_the_same_wherever_it_stands(
    features: int, dtype: torch.dtype, threads: int, use_onednn: bool
) -> None:
    """Tries many numbers of rows, and few outputs, for which MKL's own code treats rows differently."""
    use_onednn = use_onednn and dtype == torch.float32
    for outputs in (1, 2, 8, 17, 97):
        weight, bias = draw(outputs, features).to(dtype), draw(outputs).to(dtype)
        rows = draw(1, features).to(dtype).repeat(200, 1)
        whole = products.linear(rows, weight, bias, use_onednn=use_onednn)
        assert torch.equal(whole, whole[:1].expand(whole.shape))
        for count in (1, 30, 97):
            part = products.linear(rows[:count], weight, bias, use_onednn=use_onednn)
            assert torch.equal(part, whole[:count])
            shifted = torch.cat((rows.new_ones(3), rows[:count].flatten()))[3:].view(count, features)
            assert torch.equal(products.linear(shifted, weight, bias, use_onednn=use_onednn), part)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("outputs", "features", "dtype"), [(1, 40, torch.float16), (17, 33, torch.bfloat16), (320, 256, torch.bfloat16)]
)
def test_widened_numbers_are_summed_exactly_and_rounded_once(
    outputs: int, features: int, dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "widens", lambda _: True)
    monkeypatch.setattr(products, "_WIDENED", 1 << 9)  # so that matrices are widened in several pieces
    # Sums of small whole numbers are exact in float32.
    weight, rows = (draw(n, features).mul(3).round().to(dtype) for n in (outputs, 130))
    for bias in (None, draw(outputs).mul(9).round().to(dtype)):
        exact = rows.double() @ weight.double().t() + (0 if bias is None else bias.double())
        for each in (weight, weight.t().contiguous().t()):
            found = products.linear(rows, each, bias)
            assert torch.equal(found, exact.to(dtype))
    row = draw(1, features, seed=1).to(dtype).repeat(130, 1)
    whole = products.linear(row, weight, bias)
    for count in (1, 97, 130):
        assert torch.equal(products.linear(row[:count], weight, bias), whole[:1].expand(count, -1))


@torch.inference_mode()
def test_a_row_is_the_same_among_products_of_large_matrices(use_onednn: bool, threads: int) -> None:
    weight, rows = draw(320, 256), draw(1, 256).repeat(200, 1)
    whole = products.linear(rows, weight, use_onednn=use_onednn)
    assert torch.equal(whole, whole[:1].expand(whole.shape))
    assert torch.equal(products.linear(rows[:1], weight, use_onednn=use_onednn), whole[:1])
    torch.testing.assert_close(whole, torch.nn.functional.linear(rows, weight), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("function", [silu, torch.sigmoid])
def test_a_value_is_the_same_wherever_it_stands(function: Function, threads: int) -> None:
    values = draw(700, 100)
    whole = products.elementwise(function, values)
    torch.testing.assert_close(whole, function(values))
    for width in (1, 7, 33, 64, 99):
        for count in (1, 3, 700):
            part = products.elementwise(function, values[:count, 100 - width :])
            assert torch.equal(part, whole[:count, 100 - width :])


@torch.inference_mode()
def test_groups_and_batches_are_products_of_their_own(threads: int) -> None:
    inputs, weights = draw(12, 8), draw(4, 8, 6)
    found = products.grouped(inputs, weights, torch.tensor([5, 5, 11, 12]))
    expected = torch.cat((inputs[:5] @ weights[0], inputs[5:11] @ weights[2], inputs[11:] @ weights[3]))
    torch.testing.assert_close(found, expected)
    batch = draw(4, 3, 8)
    torch.testing.assert_close(products.batched(batch, weights.transpose(1, 2)), batch @ weights)


@torch.inference_mode()
def test_a_long_row_alone_is_summed_as_among_others(threads: int) -> None:
    values = draw(4, 70_000)
    for reduce in (products.row_sums, products.logsumexp):
        assert torch.equal(reduce(values)[:1], reduce(values[:1]))
    torch.testing.assert_close(products.logsumexp(values), values.logsumexp(dim=-1))
