"""Block-mixed linear layers against their dense weights."""

from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moevolve.kernels.block_mix import block_mix

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
FORMS = ("low_rank", "I", "II", "III")


def factors(
    form: str, blocks: int, height: int, width: int, rank: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn((blocks, height, rank), generator=generator)
    v = torch.randn((blocks, rank, width), generator=generator)
    shapes = {"I": (blocks, blocks), "II": (blocks, blocks, rank), "III": (3, blocks, blocks, rank)}
    return u, v, None if form == "low_rank" else torch.randn(shapes[form], generator=generator)


def scale_of(x: Tensor, u: Tensor, v: Tensor, mixing: Tensor | None) -> float:
    sizes = [each if each is None else each.abs() for each in (u, v, mixing)]
    return float((x.abs().double() @ oracles.block_mix_weight(*sizes).t()).max().clamp_min(1))  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(
    form=st.sampled_from(FORMS),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(1, 7)),
    leading=st.sampled_from([(), (1,), (3,), (2, 5), (0, 4)]),
    strided=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**31 - 1),
)
def test_matches_the_dense_weight(
    form: str,
    sizes: tuple[int, int, int, int],
    leading: tuple[int, ...],
    strided: bool,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    blocks, height, width, rank = sizes
    blocks = 1 if form == "low_rank" else blocks
    u, v, mixing = (
        part if part is None else part.to(dtype) for part in factors(form, blocks, height, width, rank, seed)
    )
    assert u is not None and v is not None
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn((*leading, 2 * blocks * width), generator=generator).to(dtype)
    x = x[..., ::2] if strided else x[..., : blocks * width]
    bias = torch.randn(blocks * height, generator=generator).to(dtype) if biased else None
    found = block_mix(x, u, v, mixing, bias)
    assert found.shape == (*leading, blocks * height) and found.dtype == dtype
    expected = x.double() @ oracles.block_mix_weight(u, v, mixing).t()
    if bias is not None:
        expected = expected + bias.double()
    if expected.numel():
        assert float((found.double() - expected).abs().max()) <= TOLERANCE[dtype] * scale_of(x, u, v, mixing)


def test_ones_are_plain_low_rank() -> None:
    u, v, _ = factors("I", 4, 6, 3, 5)
    low_rank = u.flatten(0, 1), v.permute(1, 0, 2).flatten(1)
    torch.testing.assert_close(
        oracles.block_mix_weight(u, v, torch.ones(4, 4)), low_rank[0].double() @ low_rank[1].double()
    )
    x = torch.randn((9, 12), generator=torch.Generator().manual_seed(4))
    found = block_mix(x, low_rank[0][None], low_rank[1][None])
    torch.testing.assert_close(found, block_mix(x, u, v, torch.ones(4, 4)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "height", "width", "rank"), [(4, 6, 5, 2), (3, 4, 4, 5), (2, 9, 3, 1), (1, 8, 8, 3), (2, 5, 4, 16)]
)
def test_ranks_are_those_of_theorem_1(blocks: int, height: int, width: int, rank: int) -> None:
    """NanoMoE, Theorem 1 and Remark 3: low rank is a case of mixing, which reaches rank min(d1, d2, K r) and not r."""
    u, v, mixing = (part.double() for part in factors("I", blocks, height, width, rank) if part is not None)
    low_rank = u.flatten(0, 1) @ v.permute(1, 0, 2).flatten(1)

    def mixed(a: Tensor) -> Tensor:
        return torch.block_diag(*u) @ torch.kron(a, torch.eye(rank).double()) @ torch.block_diag(*v)

    torch.testing.assert_close(mixed(torch.ones_like(mixing)), low_rank)
    smallest = blocks * min(height, width)
    assert torch.linalg.matrix_rank(low_rank) == min(smallest, rank)
    assert torch.linalg.matrix_rank(mixed(mixing)) == min(smallest, blocks * rank)
    torch.testing.assert_close(block_mix(torch.eye(blocks * width).double(), u, v, mixing).t(), mixed(mixing))
    for form in ("II", "III"):
        weight = oracles.block_mix_weight(*factors(form, blocks, height, width, rank))
        assert torch.linalg.matrix_rank(weight) == min(smallest, blocks * rank)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("form", FORMS)
def test_device_matches_the_dense_weight(form: str) -> None:
    u, v, mixing = factors(form, 1 if form == "low_rank" else 4, 24, 12, 8)
    x = torch.randn((33, u.shape[0] * 12), generator=torch.Generator().manual_seed(4))
    found = block_mix(x.cuda(), u.cuda(), v.cuda(), None if mixing is None else mixing.cuda())
    expected = x.double() @ oracles.block_mix_weight(u, v, mixing).t()
    assert float((found.cpu().double() - expected).abs().max()) <= 1e-5 * scale_of(x, u, v, mixing)
