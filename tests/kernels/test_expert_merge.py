"""Merging of experts against the loop oracle."""

from __future__ import annotations

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes

from moevolve.kernels import expert_merge

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def check(coefficients: torch.Tensor, experts: torch.Tensor) -> None:
    out = torch.full((coefficients.shape[0], *experts.shape[1:]), float("nan"), dtype=experts.dtype)
    before = experts.clone()
    expert_merge.merge_experts(coefficients, experts, out)
    assert torch.equal(experts, before)
    expected = oracles.merge_experts(coefficients, experts)
    scale = float((coefficients.abs().double() @ experts.abs().double().flatten(1)).max().clamp_min(1e-6))
    assert float((out.double() - expected.double()).abs().max()) <= TOLERANCE[experts.dtype] * scale


@settings(max_examples=30, deadline=None)
@given(
    retained=st.integers(1, 9),
    count=st.integers(1, 9),
    shape=st.tuples(st.integers(1, 13), st.integers(1, 7)),
    density=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 2**31 - 1),
)
def test_matches_the_oracle(
    retained: int, count: int, shape: tuple[int, int], density: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    coefficients = torch.randn((retained, count), generator=generator)
    coefficients *= torch.rand((retained, count), generator=generator) < density
    check(coefficients, torch.randn((count, *shape), generator=generator).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.2, 1.0])
def test_pieces_join_without_gap(dtype: torch.dtype, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_MERGED_VALUES": 80, "_SCRATCH_VALUES": 130, "_BAG_COLUMNS": 5}.items():
        monkeypatch.setattr(expert_merge, name, size)
    generator = torch.Generator().manual_seed(0)
    coefficients = torch.randn((4, 8), generator=generator)
    coefficients *= torch.rand((4, 8), generator=generator) < density
    check(coefficients, torch.randn((8, 5, 31), generator=generator).to(dtype))


@pytest.mark.parametrize("rows", [1, 33])
def test_sparse_merging_skips_what_is_not_used(rows: int) -> None:
    """Unused experts may have any values, and a new expert without terms is zero."""
    coefficients = torch.zeros((4, 8))
    coefficients[0, [1, 5]] = torch.tensor([0.5, -2.0])
    coefficients[1, 1] = 1.0
    coefficients[3, [1, 2, 5]] = torch.tensor([1.0, 0.25, 0.125])
    experts = torch.randn((8, rows * 16, 64), generator=torch.Generator().manual_seed(1))
    check(coefficients, experts)
    experts[[0, 3, 4, 6, 7]] = float("nan")
    out = torch.empty((4, rows * 16, 64))
    expert_merge.merge_experts(coefficients, experts, out)
    assert torch.isfinite(out).all()
    assert torch.equal(out[1], experts[1])
    assert not out[2].any()


def test_streaming_between_devices_matches_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_merge, "_STAGED_VALUES", 128)
    generator = torch.Generator().manual_seed(0)
    experts, coefficients = torch.randn((6, 50), generator=generator), torch.randn((3, 6), generator=generator)
    coefficients[:, 2] = 0
    out = torch.empty((3, 50))
    expert_merge._merge_streamed(coefficients, experts, out)
    torch.testing.assert_close(out, oracles.merge_experts(coefficients, experts), atol=1e-5, rtol=0)
    expert_merge._merge_streamed(torch.zeros((3, 6)), experts, out)
    assert not out.any()


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.float32), (64, torch.bfloat16)])
def test_what_streaming_takes_is_stated_and_does_not_grow_with_the_number_of_experts(
    experts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_merge, "_STAGED_VALUES", 1 << 20)
    source = torch.zeros((experts, 1 << 18), dtype=dtype)
    out = torch.zeros((4, 1 << 18), dtype=dtype)
    with LiveBytes() as device:
        expert_merge._merge_streamed(torch.ones(4, experts), source, out)
    stated = expert_merge.staged_bytes(4, experts, 1 << 18, dtype.itemsize)
    assert 0.9 * stated <= device.peak <= 1.02 * stated
    assert stated <= (1 << 20) * 9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("on_host", [False, True])
def test_device_matches_the_oracle(dtype: torch.dtype, on_host: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    experts = torch.randn((8, 33, 17), generator=generator).to(dtype)
    coefficients = torch.randn((4, 8), generator=generator)
    out = torch.empty((4, 33, 17), dtype=dtype, device="cuda")
    expert_merge.merge_experts(coefficients, experts.pin_memory() if on_host else experts.cuda(), out)
    expected = oracles.merge_experts(coefficients, experts)
    assert float((out.cpu().double() - expected.double()).abs().max()) <= TOLERANCE[dtype] * 20
