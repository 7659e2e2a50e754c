"""The Triton kernels against the oracles, on a CUDA device and with Triton's interpreter.

Whether kernels are interpreted is settled when triton is first imported, so a subprocess runs this file once more with
TRITON_INTERPRET=1; in the test process itself the kernels run on a device or not at all.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import oracles
import pytest
import torch

from moevolve.kernels.expert_merge import has_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


# The interpreter rounds to bfloat16 towards zero.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11}

runs = pytest.mark.skipif(
    not has_triton() or not (INTERPRETED or torch.cuda.is_available()), reason="needs triton and a CUDA device"
)


@pytest.mark.skipif(INTERPRETED, reason="this is the subprocess")
@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_all_hold_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    environment |= {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "3 skipped" in done.stdout, done.stdout[-500:]  # this test, and products of bfloat16


@pytest.mark.gpu
@runs
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("retained", "count", "size"), [(4, 8, 1021), (1, 1, 3), (21, 13, 1500), (3, 16, 70), (70, 60, 300)]
)
def test_merging(dtype: torch.dtype, retained: int, count: int, size: int) -> None:
    from moevolve.kernels.triton_merge import merge

    if INTERPRETED and dtype == torch.bfloat16 and count >= 16:
        pytest.skip("the interpreter multiplies the bits of bfloat16")
    generator = torch.Generator().manual_seed(0)
    experts = torch.randn((count, size), generator=generator).to(dtype)
    coefficients = torch.randn((retained, count), generator=generator)
    coefficients[0] = 0
    source, factors = experts.to(DEVICE), coefficients.to(DEVICE)
    out = torch.full((retained, size), float("nan"), dtype=dtype, device=DEVICE)
    merge(factors, source, out)
    expected = oracles.merge_experts(coefficients, experts).double()
    scale = float((coefficients.abs().double() @ experts.abs().double()).max())
    assert float((out.cpu().double() - expected).abs().max()) <= TOLERANCE[dtype] * scale


@pytest.mark.gpu
@runs
@pytest.mark.parametrize(("rows", "count", "size"), [(3, 2, 4200), (21, 2, 1500), (70, 17, 300)])
def test_every_program_of_a_merge_makes_its_own_part(rows: int, count: int, size: int) -> None:
    """The first p programs write the first p parts and nothing else, so no value is written twice."""
    from moevolve.kernels.triton_merge import LaunchGrid, _merge

    launch = LaunchGrid.of(rows, count, size, itemsize=4)
    coefficients, source = torch.ones((rows, count), device=DEVICE), torch.ones((count, size), device=DEVICE)
    parts = [
        (slice(row, row + launch.tile), slice(column, column + launch.block))
        for column in range(0, size, launch.block)
        for row in range(0, rows, launch.tile)
    ]
    assert len(parts) == launch.programs > 2
    expected = torch.zeros((rows, size))
    for programs, part in enumerate(parts, start=1):
        assert not expected[part].any()
        expected[part] = count
        out = torch.zeros((rows, size), device=DEVICE)
        sizes = {"COUNT": count, "ROWS": launch.tile, "BLOCK": launch.block, "UNROLL": 32 if count > 16 else 8}
        sizes |= {"MANY": count > 16}
        _merge[(programs,)](coefficients, source, out, size, rows, launch.row_tiles, **sizes)
        assert torch.equal(out.cpu(), expected)
    assert expected.all()


@pytest.mark.skipif(not INTERPRETED, reason="the interpreter alone takes memory that is not there")
def test_experts_beyond_32_bits_are_reached(tmp_path: Path) -> None:
    """Three experts of almost 2^31 values in sparse files, in which only the merged columns are filled."""
    from moevolve.kernels.triton_merge import _merge

    size, columns, dtype = 2**31 - 64, 64, torch.bfloat16

    def experts(name: str) -> list[torch.Tensor]:
        """The first columns of each expert; a kernel that gets those of the first finds the others after it."""
        with (tmp_path / name).open("w+b") as file:
            file.truncate(3 * size * 2)
            memory = mmap.mmap(file.fileno(), 0)
        return [torch.frombuffer(memory, dtype=dtype, count=columns, offset=each * size * 2) for each in range(3)]

    source, target = experts("source"), experts("target")
    for each, values in enumerate(source):
        values.copy_(torch.arange(columns) + 64 * each)
    order = torch.eye(3)[[2, 0, 1]]
    _merge[(1,)](order, source[0], target[0], size, 3, 1, COUNT=3, ROWS=4, BLOCK=columns, UNROLL=4, MANY=False)
    for found, old in zip(target, (2, 0, 1), strict=True):
        assert torch.equal(found, source[old])
