"""Fitted layers in files: what one process has written another reads, bit for bit, and the disk isn't filled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moevolve.workers.methods.repair import fit_cache
from moevolve.workers.methods.repair.fit_cache import FitCache, FittedLayer
from moevolve.workers.methods.repair.ridge import FitOutcome


def fitted(seed: int = 0) -> FittedLayer:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    fused = draw(2, 8, 4)
    return FittedLayer(
        selection=torch.arange(8).view(2, 4),
        weights=((slice(0, 4), draw(4, 4)), (slice(4, 8), draw(4, 4).t())),
        state=draw(5, 4),
        outcome=FitOutcome(0.1, 3.0, 1.5),
        inputs=(fused[0], fused[1]),
    )


def same(one: FittedLayer | None, other: FittedLayer) -> bool:
    assert one is not None and one.selection is not None and other.selection is not None
    tensors = [[each.selection, *(weights for _, weights in each.weights), *each.inputs] for each in (one, other)]
    return (
        [columns for columns, _ in one.weights] == [columns for columns, _ in other.weights]
        and one.outcome == other.outcome
        and all(torch.equal(first, second) for first, second in zip(*tensors, strict=True))
    )


def test_what_is_kept_is_found_again() -> None:
    cache, layer = FitCache(), fitted()
    assert cache.get("a-0") is None
    cache.put("a-0", layer)
    found = cache.get("a-0")
    assert same(found, layer) and found is not None and found.state is not None
    assert torch.equal(found.state, layer.state)
    without = FitCache(states=False)
    without.put("a-0", layer)
    found = without.get("a-0")
    assert same(found, layer) and found is not None and found.state is None


def test_a_fit_that_changed_nothing_is_kept_as_well() -> None:
    cache = FitCache()
    cache.put("a-0", FittedLayer(None, (), None, None))
    found = cache.get("a-0")
    assert found is not None and (found.selection, found.weights, found.outcome, found.inputs) == (None, (), None, ())


def test_another_process_finds_what_is_in_a_shared_folder(tmp_path: Path) -> None:
    FitCache(tmp_path).put("a-0", fitted())
    program = (
        "import sys, json; from pathlib import Path; from moevolve.workers.methods.repair.fit_cache import FitCache\n"
        "found = FitCache(Path(sys.argv[1])).get('a-0')\n"
        "print(json.dumps([found.outcome.after, found.weights[1][1].float().tolist()]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [1.5, fitted().weights[1][1].float().tolist()]
    assert [file.name for file in tmp_path.iterdir()] == ["a-0.safetensors"], "nothing else is left there"


def test_nothing_is_written_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    cache = FitCache(tmp_path / "elsewhere")
    cache.put("a-0", fitted())
    assert same(cache.get("a-0"), fitted()) and not (tmp_path / "elsewhere").exists()


def test_a_damaged_file_is_fitted_again(tmp_path: Path) -> None:
    FitCache(tmp_path).put("a-0", fitted())
    file = tmp_path / "a-0.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    cache = FitCache(tmp_path)
    assert cache.get("a-0") is None
    cache.put("a-0", fitted())
    assert same(FitCache(tmp_path).get("a-0"), fitted())


@pytest.mark.parametrize("shared", [False, True])
def test_those_used_least_recently_go_when_there_is_no_room(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 0
    FitCache(tmp_path).put("x-0", fitted())
    size = (tmp_path / "x-0.safetensors").stat().st_size
    (tmp_path / "x-0.safetensors").unlink()
    usage = type("Usage", (), {"free": 4 * 2 * size})
    monkeypatch.setattr(fit_cache.shutil, "disk_usage", lambda _: usage)
    cache = FitCache(tmp_path if shared else None)
    for number, key in enumerate(("a-0", "b-0")):
        cache.put(key, fitted(number))
    held = cache.get("a-0")
    cache.put("c-0", fitted(2))
    assert cache.get("b-0") is None and same(cache.get("a-0"), fitted(0)) and same(cache.get("c-0"), fitted(2))
    assert same(held, fitted(0))
    assert len(list(tmp_path.iterdir())) == (2 if shared else 0)
