"""The Triton kernels against the oracles: on a CUDA device, and everywhere under Triton's interpreter.

Whether kernels are interpreted is settled when triton is first imported, so a subprocess runs this file once more with
TRITON_INTERPRET=1; in the test process itself the kernels run on a device or not at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moevolve.kernels import reference
from moevolve.kernels.dispatch import has_triton
from moevolve.kernels.grouped_ffn import grouped_ffn
from moevolve.kernels.routing_population import TokenOwners, route_mapped_by_owner, route_selected_by_owner
from moevolve.kernels.routing_rule import RoutingRule

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter rounds to bfloat16 towards zero, and multiplies matrices of it bit by bit as integers.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11}
PRODUCT_DTYPES = [torch.float32, torch.float16] if INTERPRETED else DTYPES

runs = pytest.mark.skipif(
    not has_triton() or not (INTERPRETED or torch.cuda.is_available()), reason="needs triton and a CUDA device"
)


@pytest.mark.skipif(INTERPRETED, reason="this is the subprocess")
@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_all_hold_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(Path(__file__))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run(
        command, env={**environment, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "1 skipped" in done.stdout, done.stdout[-500:]  # this test alone


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("candidates", "retained", "count", "size"), [(1, 4, 8, 1021), (1, 1, 1, 3), (5, 3, 6, 2048), (3, 7, 13, 1500)]
)
def test_merging(dtype: torch.dtype, candidates: int, retained: int, count: int, size: int) -> None:
    from moevolve.kernels.triton_merge import merge

    generator = torch.Generator().manual_seed(0)
    experts = torch.randn((count, size), generator=generator).to(dtype)
    coefficients = torch.randn((candidates * retained, count), generator=generator)
    coefficients[0] = 0
    source, factors = experts.to(DEVICE), coefficients.to(DEVICE)
    out = torch.full((candidates * retained, size), float("nan"), dtype=dtype, device=DEVICE)
    merge(factors, source, out)
    expected = reference.merge_experts(coefficients, experts).double()
    scale = float((coefficients.abs().double() @ experts.abs().double()).max())
    assert float((out.cpu().double() - expected).abs().max()) <= TOLERANCE[dtype] * scale
    alone = torch.empty_like(out[:retained])
    for start in range(0, len(out), retained):
        merge(factors[start : start + retained].clone(), source, alone)
        assert torch.equal(alone, out[start : start + retained])


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("retained", "count", "active"), [(4, 8, 2), (31, 60, 4), (1, 5, 1)])
@pytest.mark.parametrize("rule", [RoutingRule(True), RoutingRule(False, scale=2.5), RoutingRule(True, "sigmoid")])
@pytest.mark.parametrize("kind", ["mapped", "selected", "logits", "biased"])
def test_routing(dtype: torch.dtype, retained: int, count: int, active: int, rule: RoutingRule, kind: str) -> None:
    from moevolve.kernels.triton_router import route

    generator = torch.Generator().manual_seed(1)
    owners = TokenOwners.of(torch.randint(3, (19,), generator=generator), 3)
    logits = (torch.randn((19, count), generator=generator) * 2).to(dtype)
    biases = torch.rand((3, retained), generator=generator) if kind == "biased" else None
    if kind in ("mapped", "biased"):
        mappings = torch.randn((3, retained, count), generator=generator)
        mappings[0] = mappings[0].abs()
        expected = route_mapped_by_owner(logits, mappings, owners, active, rule, biases=biases)
    else:
        mappings = torch.stack([torch.randperm(count, generator=generator)[:retained] for _ in range(3)])
        expected = route_selected_by_owner(logits, mappings, owners, active, rule, kind == "logits")
    bias = None if biases is None else biases.to(DEVICE)
    alone = rule.one_hot_folds or kind == "logits"
    weights, chosen = route(
        logits.to(DEVICE), owners.owner.to(DEVICE), mappings.to(DEVICE), bias, active, rule, selected_alone=alone
    )
    # Equal logits (likely in bfloat16) may be told apart either way: what was chosen must be worth as much.
    torch.testing.assert_close(weights.cpu(), expected[0], atol=1e-5, rtol=1e-4)
    assert all(len(set(row)) == active for row in chosen.tolist())
    if dtype == torch.float32:
        assert torch.equal(chosen.cpu(), expected[1])


@pytest.mark.gpu
@runs
def test_routing_falls_back_to_even_shares() -> None:
    from moevolve.kernels.triton_router import route

    owner = torch.tensor([0, 1], device=DEVICE)
    mappings = torch.stack([-torch.eye(4)[:3], torch.zeros((3, 4))]).to(DEVICE)
    weights, chosen = route(torch.zeros((2, 4), device=DEVICE), owner, mappings, None, 2, RoutingRule(True), False)
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert chosen.tolist() == [[0, 1], [0, 1]]


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(
    ("counts", "hidden", "width"), [([0, 3, 0, 70, 1, 0], 40, 24), ([5], 33, 17), ([0, 0, 129], 16, 65), ([0, 0], 8, 8)]
)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_grouped_experts(dtype: torch.dtype, counts: list[int], hidden: int, width: int, activation: str) -> None:
    generator = torch.Generator().manual_seed(2)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    tokens = torch.randn((sum(counts), hidden), generator=generator).to(dtype)
    gate_up = (torch.randn((len(counts), 2 * width, hidden), generator=generator) / hidden**0.5).to(dtype)
    down = (torch.randn((len(counts), hidden, width), generator=generator) / width**0.5).to(dtype)
    on_device = [tensor.to(DEVICE) for tensor in (tokens, ends, gate_up, down)]
    out = grouped_ffn(*on_device, activation=activation, implementation="triton").cpu()  # type: ignore[arg-type]
    expected = reference.grouped_ffn(tokens, ends, gate_up, down, activation)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype] * 8, rtol=TOLERANCE[dtype] * 8)
