"""The Triton kernels compile to machine code for NVIDIA devices, which takes the compiler in Triton and no device.

The interpreter runs the kernels as Python, and so lets much pass that the compiler does not.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moevolve.kernels.dispatch import has_triton

pytestmark = [
    pytest.mark.skipif(not has_triton(), reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]


def assembly(
    kernel: object, signature: dict[str, str], constants: dict[str, object], capability: int, cache: Path
) -> str:
    """PTX of a kernel launched on 16-byte aligned tensors of sizes that divide by 16; ptxas has accepted it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache)
        divisible = {
            (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind != "fp32"
        }
        types = signature | dict.fromkeys(constants, "constexpr")
        source = ASTSource(kernel, signature=types, constexprs=constants, attrs=divisible)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    assert len(compiled.asm["cubin"]) > 1000
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize(("dtype", "block"), [("fp32", 1024), ("bf16", 2048)])
def test_merging_loads_sixteen_bytes_at_a_time(dtype: str, block: int, tmp_path: Path) -> None:
    from moevolve.kernels.triton_merge import _merge

    tensors = {"coefficients": "*fp32", "source": f"*{dtype}", "target": f"*{dtype}", "size": "i32", "rows": "i32"}
    ptx = assembly(_merge, tensors, {"COUNT": 9, "ROWS": 4, "BLOCK": block, "UNROLL": 4}, 80, tmp_path)
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert "st.local" not in ptx  # nothing spilled


@pytest.mark.parametrize("one_hot", [True, False])
def test_routing_compiles(one_hot: bool, tmp_path: Path) -> None:
    from moevolve.kernels.triton_router import _route

    mapping = "*i64" if one_hot else "*fp32"
    tensors = {"logits_at": "*bf16", "owner_at": "*i64", "mapping_at": mapping, "biases_at": "*fp32"}
    tensors |= {"weights_at": "*fp32", "chosen_at": "*i64", "scale": "fp32"}
    sizes = {"COUNT": 60, "RETAINED": 30, "ACTIVE": 4, "WIDE": 64, "NEW": 32, "PICKS": 4}
    ways = {"SIGMOID": False, "ONE_HOT": one_hot, "ALONE": one_hot, "BIASED": True, "RESCALE": True}
    assembly(_route, tensors, sizes | ways, 80, tmp_path)


@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async")])
def test_experts_use_tensor_cores(capability: int, instruction: str, tmp_path: Path) -> None:
    from moevolve.kernels.triton_ffn import _down, _gate_up

    places = {"starts": "*i32", "ends": "*i32", "first_tiles": "*i32", "experts": "i32"}
    tiles = {"TOKENS": 64, "OUTPUTS": 128, "INNER": 32}
    first = {"tokens": "*bf16", "weight": "*bf16", "inner": "*bf16", **places, "hidden": "i32", "width": "i32"}
    assert instruction in assembly(_gate_up, first, {"GELU": False, **tiles}, capability, tmp_path)
    second = {"inner": "*bf16", "weight": "*bf16", "out": "*bf16", **places, "width": "i32", "hidden": "i32"}
    assert instruction in assembly(_down, second, tiles, capability, tmp_path)
