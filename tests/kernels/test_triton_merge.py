"""Compiling and launching the Triton kernel of expert merging, neither of which needs a device.

The interpreter runs kernels as Python, and so lets much pass that the compiler does not.
"""

from __future__ import annotations

import os
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
import torch

from moevolve.kernels.expert_merge import has_triton

pytestmark = pytest.mark.skipif(not has_triton(), reason="triton is not installed")

LIMITS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
"""Programs on a grid's three axes: CUDA C++ Programming Guide, technical specifications per compute capability."""


class Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **settings: self.launches.append((grid, settings))


# Of Qwen3-30B-A3B, Mixtral-8x22B and DeepSeek-V3.
@pytest.mark.parametrize(("experts", "hidden", "width"), [(128, 2048, 768), (8, 6144, 16384), (256, 7168, 2048)])
def test_merging_covers_every_value_once_within_the_grids_limits(
    experts: int, hidden: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moevolve.kernels import triton_merge

    recorder = Recorder()
    monkeypatch.setattr(triton_merge, "_merge", recorder)
    for size in (2 * width * hidden, hidden * width):
        for retained in {1, 2, 3, 4, 5, experts // 2, experts - 1, experts}:
            coefficients = torch.empty((retained, experts), device="meta")
            source, target = (
                torch.empty((each, size), dtype=torch.bfloat16, device="meta") for each in (experts, retained)
            )
            triton_merge.merge(coefficients, source, target)
            grid, settings = recorder.launches.pop()
            assert all(1 <= programs <= most for programs, most in zip(grid, LIMITS, strict=False)), grid
            # A program per tile of rows and columns; test_triton_kernels.py sees that each makes its own.
            assert prod(grid) == ceil(retained / settings["ROWS"]) * ceil(size / settings["BLOCK"])


def assembly(kernel: object, signature: dict[str, str], constants: dict[str, object], cache: Path) -> str:
    """PTX of a kernel for 16-byte aligned tensors with sizes that are multiples of 16, accepted by ptxas."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache)
        divisible = {(place,): [["tt.divisibility", 16]] for place in range(len(signature))}
        types = signature | dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, signature=types, constexprs=constants, attrs=divisible)
        compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4})
    assert len(compiled.asm["cubin"]) > 1000
    return str(compiled.asm["ptx"])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_merging_loads_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    from moevolve.kernels.triton_merge import _merge

    tensors = {"coefficients": "*fp32", "source": "*bf16", "target": "*bf16", "size": "i32"}
    tensors |= {"rows": "i32", "row_tiles": "i32"}
    few = {"COUNT": 9, "ROWS": 4, "BLOCK": 4096, "UNROLL": 8, "MANY": False}
    many = {"COUNT": 60, "ROWS": 32, "BLOCK": 128, "UNROLL": 32, "MANY": True}
    assert "mma.sync" in assembly(_merge, tensors, many, tmp_path)
    ptx = assembly(_merge, tensors, few, tmp_path)
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "st.local" not in ptx  # nothing spilled
