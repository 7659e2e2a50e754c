"""The launch grids of the Triton kernels for real models stay within CUDA's limits; needs no device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest
import torch

from moevolve.kernels.expert_merge import has_triton

pytestmark = pytest.mark.skipif(not has_triton(), reason="triton is not installed")

MODELS = Path(__file__).parents[2] / "configs" / "models"
LIMITS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
"""Programs on a grid's three axes: CUDA C++ Programming Guide, technical specifications per compute capability."""


def layers() -> Iterator[Any]:
    """Experts, hidden size and expert width of the models whose configs we ship, and of DeepSeek-V3."""
    for model in ("mixtral-8x7b", "mixtral-8x22b", "qwen1.5-moe-a2.7b", "qwen2-57b-a14b", "qwen3-30b-a3b"):
        config = json.loads((MODELS / model / "config.json").read_text(encoding="utf-8"))
        experts = config.get("num_local_experts") or config["num_experts"]
        width = config.get("moe_intermediate_size") or config["intermediate_size"]
        yield pytest.param(experts, config["hidden_size"], width, id=model)
    yield pytest.param(256, 7168, 2048, id="deepseek-v3")


class Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **settings: self.launches.append((grid, settings))


@pytest.mark.parametrize(("experts", "hidden", "width"), layers())
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
