"""The Triton kernels compile to machine code for NVIDIA devices, which needs no device.

The interpreter runs the kernels as Python, and so lets much pass that the compiler does not.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moevolve.kernels.expert_merge import has_triton

pytestmark = [
    pytest.mark.skipif(not has_triton(), reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]


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


def test_merging_loads_sixteen_bytes_at_a_time(tmp_path: Path) -> None:
    from moevolve.kernels.triton_merge import _merge

    tensors = {"coefficients": "*fp32", "source": "*bf16", "target": "*bf16", "size": "i32"}
    tensors |= {"rows": "i32", "row_tiles": "i32"}
    ptx = assembly(_merge, tensors, {"COUNT": 9, "ROWS": 4, "BLOCK": 2048, "UNROLL": 4}, tmp_path)
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "st.local" not in ptx  # nothing spilled
