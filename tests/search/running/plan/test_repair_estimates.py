"""What a plan says of repairs: by hand for a shipped model, and against repairs of tiny models that are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dense_lab import dense_run
from live_bytes import LiveBytes
from report_lab import DENSE, finished
from tiny_models import WORDS, save_tiny_model

from moevolve.search.config.files import find_model, load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import costs_of
from moevolve.search.genomes.repaired import base_space
from moevolve.search.running.plan.counts import TokenCounts
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.plan.memory import worker_memory
from moevolve.search.running.plan.workload import Prompts
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import measurement_parts
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.methods.registry import calibrator_of
from moevolve.workers.methods.repair import fits as repair_fits
from moevolve.workers.methods.repair.edit import RepairedEdit
from moevolve.workers.methods.repair.fit_cache import FitCache
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.outline import outline_model

RUNS = Path(__file__).parents[4] / "configs" / "runs"


def planned(repair: dict[str, Any] | None, *more: dict[str, Any], **changes: Any) -> Any:
    """The plan of pruning Mixtral-8x7B to 4 of 8 experts, repaired."""
    data: dict[str, Any] = {
        "name": "lab",
        "model": {"path": find_model("mixtral-8x7b"), "dtype": "bfloat16", "device": "cuda"},
        "tasks": [{"name": "boolq"}],
        "genome": {"experts": 4, "groups": "per_layer"},
        "phases": [{"kind": "prune", "evaluations": 40, "repair": repair}, *more],
        "workers": {"count": 4, "num_gpus": 1},
    }
    config = RunConfig.model_validate(data | changes)
    return estimate(config, Prompts(160, 8, 256))


def settings(tokens: int, **changes: Any) -> dict[str, Any]:
    return {"ridge_lambdas": [0.01], "tokens": tokens, "neurons": False} | changes


HIDDEN, NEURONS, KEPT = 4096, 14336, 4
REPAIRING = (
    "a candidate's own weights",
    "what a layer's fit, with states of its tokens, takes beyond these",
    "states of all layers to fit to",
)
"""What repairing a candidate takes on a CPU beside the unedited model."""


def fitting(plan: Any) -> int:
    """Bytes of the largest fit: what scoring takes is free again while a candidate is fitted."""
    return sum(item.device for item in plan.memory["device"].items if "batch" in item.title or "beyond" in item.title)


def test_a_whole_mixtral_by_hand() -> None:
    tokens = 65536
    plan = planned(settings(tokens))
    *_, targets, _ = plan.memory["device"].items
    assert targets.host == 33 * tokens * HIDDEN * 2
    features = tokens * 2 * NEURONS * 2  # a token uses two experts, in bfloat16
    states = tokens * HIDDEN * (2 * 2 + 4 + 4)
    change, panels = 4 * KEPT * NEURONS * HIDDEN, 4 * 1024 * KEPT * NEURONS
    solving = 4 * 512 * (5 * KEPT * NEURONS + 3 * tokens)
    assert fitting(plan) == features + states + change + panels + solving < 14 << 30
    assert fitting(planned(settings(tokens, input_rounds=2))) > 4 * HIDDEN * 10 * 2 * NEURONS


def test_repaired_pruning_has_weights_of_its_own() -> None:
    plain, repaired = planned(None), planned(settings(4096))
    experts = 32 * 8 * 3 * HIDDEN * NEURONS * 2
    assert [each.memory["device"].items[2].device for each in (plain, repaired)] == [0, experts // 2]


def test_one_layer_at_a_time_takes_a_layer_and_a_fit() -> None:
    """Mixtral, whose answers aren't decoded: a layer of its experts on the device, and of a candidate no more."""
    plan = planned(settings(65536), tasks=[{"name": "boolq@agreement"}])
    here, there = plan.memory["device"], plan.memory["host"]
    layer = 8 * 3 * HIDDEN * NEURONS * 2
    outside, originals, own, *_ = there.items
    assert (originals.device, own.device) == (layer, 0)
    # A candidate of half of the experts leaves the other half of a layer's room to its fit.
    scoring = sum(item.device for item in here.items if "batch" in item.title)
    assert there.device == outside.device + max(layer + scoring, layer // 2 + fitting(plan))


@pytest.mark.parametrize(
    ("name", "most"), [("qwen3-30b-a3b", 16), ("glm-4.5-air", 24), ("qwen3-coder-480b-a35b", 40), ("deepseek-v3", 48)]
)
def test_half_of_the_neurons_of_published_models_fits_on_a_device(name: str, most: int) -> None:
    """GiB, repaired on 65,536 tokens, with the experts on the disk."""
    config = load_run_config(RUNS / "half.yaml")
    config = config.model_copy(update={"model": replace(config.model, path=find_model(name))})
    memory = estimate(config, Prompts(512, None, 128)).memory["disk"]
    assert memory.device < most << 30


def test_shared_experts_are_fitted_in_copies_of_their_output_projections() -> None:
    model = {"path": find_model("qwen1.5-moe-a2.7b"), "dtype": "bfloat16", "device": "cuda"}
    plan = planned(settings(4096), model=model, genome={"experts": 15, "groups": "per_layer"})
    hidden, neurons, shared, layers = 2048, 1408, 5632, 24
    assert fitting(plan) > 2 * 4096 * (4 * neurons + shared)  # of 15 experts a token uses 4
    assert plan.memory["device"].items[2].device == layers * 2 * hidden * (15 * 3 * neurons + shared)


@pytest.mark.parametrize(
    ("genome", "tokens"),
    [
        ({"kind": "factorllm", "experts": 4, "active": 2}, 6000),
        ({"kind": "tomoe", "experts": 4, "budget": 0.5}, 6000),
        ({"kind": "tomoe", "experts": 1, "budget": 0.5, "attention": False}, 5000),
    ],
)
def test_what_a_repair_of_a_dense_model_takes_is_planned(
    genome: dict[str, Any], tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside weights: states of all layers, a layer's fit, fits that are kept, and copies of output projections."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 3, "max_position_embeddings": 256}
    save_tiny_model(tmp_path, "llama", WORDS, seed=5, num_hidden_layers=4, **sizes)
    phases = [{"kind": "tune", "evaluations": 1, "initial": 1, "repair": {"tokens": tokens, "answer_weight": 1}}]
    data = {"name": "lab", "model": {"path": str(tmp_path), "dtype": "float32", "device": "cpu"}, "genome": genome}
    # Fits take turns with scoring and calibrating, which are to take less here.
    few = {"engine": {"batch_tokens": 1, "max_prompt_tokens": 1}}
    config = RunConfig.model_validate(data | {"tasks": [{"name": "boolq"}], "phases": phases} | few)
    outline = outline_model(config.model)
    space = config.space(outline.facts)
    costs = costs_of(space, outline)
    monkeypatch.setattr(costs, "calibration_bytes", lambda longest: 0)
    counted = worker_memory(config, outline, costs, TokenCounts(), "device")
    sizes = {item.title: item.device + item.host for item in counted.items}
    model = ResidentModel.load(config.model)
    rng, count = np.random.default_rng(0), tokens // 100
    words = rng.integers(4, 4 + len(WORDS), 100 * count).astype(np.int32)
    lengths = np.full(count, 100, dtype=np.int32)
    rows = FitRows(words, lengths, lengths)
    assert space.measurement is not None
    calibrate = calibrator_of(measurement_parts(space.measurement)[0])
    inner = base_space(space)
    made = calibrate(model, rows.first(1000), inner.measurement)
    start = inner.calibrated(made).start(config.phases[0])
    assert start is not None and config.phases[0].repair is not None
    with LiveBytes() as live:
        for ridge_lambdas in ((0.1, 1.0), (0.01,)):
            edit = RepairedEdit(
                start.genome.express(), replace(config.phases[0].repair, ridge_lambdas=ridge_lambdas), rows
            )
            with model.edited(edit):
                pass
    planned = sum(size for title, size in sizes.items() if title in REPAIRING or "a batch" in title)
    assert live.peak == pytest.approx(planned, rel=0.1)


def eep_run(tiny: Any, folder: Path) -> RunConfig:
    changes = {"phases": [{"kind": "prune", "evaluations": 2, "initial": 2}]}
    return load_run_config(tiny.write_run(folder / "run.yaml", "counted", **changes))


MAKERS: dict[str, Callable[[Any, Path], RunConfig]] = {"eep": eep_run} | {
    kind: lambda tiny, folder, kind=kind: dense_run(tiny, folder, {"kind": kind, **DENSE[kind]}, "counted")  # type: ignore[misc]
    for kind in ("factorllm", "tomoe")
}


@pytest.mark.parametrize("kind", ["eep", "factorllm", "tomoe"])
def test_fits_are_those_that_are_made(kind: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths, and how many columns are at work for a token, of repairs on tiny models."""
    run = MAKERS[kind](tiny, tmp_path)
    phase = run.phases[0].kind
    repair = {"neurons": kind == "eep"}
    phases = [{"kind": phase, "evaluations": 2, "initial": 2, "repair": {"tokens": 200} | repair}]
    final = {"rerank": 0, "test": False}
    config = RunConfig.model_validate(run.model_dump() | {"phases": phases, "final": final})
    fits: list[tuple[int, int, float]] = []
    fit_ridge = repair_fits.fit_ridge

    def fitted(layer: Any, *others: Any) -> Any:
        features, tokens = layer.features, len(layer.residual)
        filled = sum(block.values.numel() for block in features.blocks)
        fits.append((features.width, tokens, filled / (tokens * features.width)))
        return fit_ridge(layer, *others)

    monkeypatch.setattr(repair_fits, "fit_ridge", fitted)
    monkeypatch.setattr(FitCache, "get", lambda *_: None)
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        finished(store, config)
        candidates = len({row.phenotype_hash for row in store.history(store.search("counted").id)})
    outline = outline_model(config.model)
    costs = costs_of(config.space(outline.facts), outline)
    expected = [fit for layer in costs.fitted_maps() for fit in layer]
    assert [width for width, _, _ in fits] == [fit.width for fit in expected] * candidates
    assert {tokens for _, tokens, _ in fits} <= set(range(180, 201))
    for fit, (_, _, density) in zip(expected, fits, strict=False):
        # Random candidates' differ from the start's, and blocks are taken as wide as one of their columns needs.
        assert density == pytest.approx(fit.density, abs=1e-6 if kind == "eep" else 1.0)
        assert 0 < fit.density <= 1
