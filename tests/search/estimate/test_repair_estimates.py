"""What a plan says of repairs: by hand for a shipped model, and against repairs of tiny models that are made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dense_lab import dense_run
from report_lab import DENSE, finished

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.config.models import find_model
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.devices import GPUS
from moevolve.search.estimate.estimate import EstimateRequest, estimate
from moevolve.search.estimate.repairs import RepairWork, repair_works
from moevolve.search.estimate.workload import Prompts
from moevolve.search.genomes.registry import costs_of, make_space
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store
from moevolve.workers.methods.eep.elimination import candidates_of, elimination_flops
from moevolve.workers.methods.fitting import NeuronRecipe
from moevolve.workers.methods.repair import apply as repair_apply
from moevolve.workers.methods.repair.streams import Streams
from moevolve.workers.profiling.outline import outline_model

RUNS = Path(__file__).parents[3] / "configs" / "runs"
LENGTH = 160
"""Tokens of a prompt."""


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
    return estimate(EstimateRequest(config, (GPUS["h200"],), prompts=Prompts(160, 8, 256)))


def recipe(tokens: int, **changes: Any) -> dict[str, Any]:
    return {"strengths": [0.01], "tokens": tokens, "neurons": None} | changes


HIDDEN, NEURONS, LAYERS, KEPT = 4096, 14336, 32, 4
EXPERT = 2 * 3 * HIDDEN * NEURONS
PROJECTIONS = 2 * HIDDEN * (2 * HIDDEN + 2 * 1024)
WIDTH = KEPT * NEURONS


def passed_layer(tokens: int) -> int:
    """Operations of one layer of Mixtral-8x7B on so many tokens: two experts, a router of eight, and attention."""
    return tokens * (PROJECTIONS + 2 * EXPERT + 2 * HIDDEN * 8) + 4 * HIDDEN * tokens * LENGTH


def fitted_layer(tokens: int, strengths: int) -> float:
    """Dual: half of the tokens have an expert; its products with each other, systems, and changes, made and applied."""
    held, there = tokens // 8, tokens / 2
    fitted = tokens - held
    products = there * (there + 1024) * WIDTH
    system = fitted**3 / 3 + 2 * fitted**2 * HIDDEN + 2 * held * fitted * HIDDEN
    change = 2 * there * WIDTH * HIDDEN
    return products + strengths * system + 2 * change


@pytest.mark.parametrize("tokens", [4096, 16384])
def test_a_whole_mixtral_by_hand(tokens: int) -> None:
    (work,) = planned(recipe(tokens)).repairs
    assert (work.phase, work.kind, work.tokens, work.layer_passes, work.width) == (0, "prune", tokens, LAYERS, WIDTH)
    assert work.forward == pytest.approx(LAYERS * passed_layer(tokens), rel=1e-6)
    assert work.reference == pytest.approx(work.forward, rel=1e-6), "two experts per token, of however many"
    activations = tokens * 2 * EXPERT * 2 / 3
    # With 16,384 tokens there isn't room for the features beside the system, so they are made twice.
    made = 1 if tokens == 4096 else 2
    expected = LAYERS * (fitted_layer(tokens, 1) + made * activations)
    assert work.fitting == pytest.approx(expected, rel=1e-6)
    assert work.flops == work.forward + work.fitting
    assert work.needed == 16 * tokens**2 + 32 * tokens * HIDDEN + 24 * 1024 * tokens
    assert work.streams == 33 * tokens * HIDDEN * 2 and work.kept == 0
    assert work.needed < work.taken < work.allowed + 32 * tokens * HIDDEN
    assert work.fault is None


def test_targets_strengths_and_neurons_have_their_price() -> None:
    def of(**changes: Any) -> RepairWork:
        (work,) = planned(recipe(4096, **changes)).repairs
        assert isinstance(work, RepairWork)
        return work

    plain, local, more = of(), of(target="local"), of(strengths=[0.01, 0.1, 1.0])
    filled = of(neurons={"candidates": 1, "router": "kept"})
    routed, chosen = (of(neurons={"candidates": each}) for each in (1, 2))
    assert (local.layer_passes, local.forward) == (2 * LAYERS, 2 * plain.forward)
    assert local.fitting == plain.fitting
    systems = LAYERS * (fitted_layer(4096, 3) - fitted_layer(4096, 1))
    assert more.fitting - plain.fitting == pytest.approx(systems, rel=1e-6)
    assert (filled.layer_passes, filled.forward) == (2 * LAYERS, 2 * plain.forward)
    # The activations of two experts per token once more, and what they are worth to each of four slots.
    assert filled.fitting - plain.fitting == LAYERS * 4096 * 2 * (EXPERT * 2 // 3 + 2 * KEPT * NEURONS)
    # The router's inputs with themselves, with what is missing and with the rows; the system.
    rows = 2 * 4096 * HIDDEN * (HIDDEN + 2 * KEPT) + HIDDEN**3 // 3
    assert routed.fitting - filled.fitting == LAYERS * rows
    assert routed.forward == filled.forward
    # Everything but these twice, and in 8 GiB there is room for a tenth more candidates than a slot has neurons.
    assert (chosen.layer_passes, chosen.forward) == (3 * LAYERS, 3 * plain.forward)
    count = candidates_of(NEURONS, NeuronRecipe(candidates=2.0), 4096 // 2, HIDDEN, 8 << 30)
    assert NEURONS < count < 1.2 * NEURONS
    slots = KEPT * elimination_flops(NEURONS, count, 8 * NEURONS, 2048, HIDDEN, 4 * HIDDEN)
    assert chosen.fitting - routed.fitting == pytest.approx(plain.fitting + LAYERS * slots, rel=1e-6)
    # Layers of half to one and a half times the width: as many passes, and systems that are no longer alike.
    sloped = of(neurons={"candidates": 1, "router": "kept", "slope": 0.5})
    assert (sloped.layer_passes, sloped.forward) == (filled.layer_passes, filled.forward)
    assert 1 < sloped.taken / filled.taken < 1.5


def test_repaired_pruning_has_weights_of_its_own() -> None:
    plain, repaired = planned(None), planned(recipe(4096))
    experts = plain.outline.experts_bytes
    for where, before in (("device", 0), ("host", 0)):
        bare, ours = plain.memory[where], repaired.memory[where]
        assert (bare.items[2].device, ours.items[2].device) == (before, experts // 2)
        assert [item.title for item in ours.items[: len(bare.items)]] == [item.title for item in bare.items]
        fit, kept, streams = ours.items[len(bare.items) :]
        (work,) = repaired.repairs
        assert (fit.device, kept.device, streams.host) == (work.taken, 0, work.streams)
    (before_phase,), (after_phase,) = plain.devices[0].phases, repaired.devices[0].phases
    assert (before_phase.edit, before_phase.repair) == (0, 0)
    assert after_phase.edit == pytest.approx(experts / (0.6 * GPUS["h200"].bandwidth))
    assert after_phase.scoring == before_phase.scoring
    assert plain.repairs == ()


def test_repairs_take_their_time() -> None:
    one, both = planned(recipe(4096)), planned(recipe(4096), {"kind": "repair", "evaluations": 20})
    (work,), (phase,) = one.repairs, one.devices[0].phases
    gpu = GPUS["h200"]
    expected = work.layer_passes * gpu.layer_seconds
    expected += work.forward / (0.4 * gpu.flops("bfloat16")) + work.fitting / (0.4 * gpu.flops("float32"))
    assert phase.repair == pytest.approx(expected)
    plain = planned(None).devices[0]
    made, referred = phase.repair + phase.edit, work.reference / (0.4 * gpu.flops("bfloat16"))
    # 40 candidates, five on dev, and the best on test, by four workers; the unedited model once by each.
    extra = (46 * made / 4 + referred) / 3600
    assert one.devices[0].hours.least == pytest.approx(plain.hours.least + extra)
    assert [each.kind for each in both.repairs] == ["prune", "repair"]
    assert both.repairs[1].tokens == 16384 and both.devices[0].phases[1].repair > 3 * phase.repair
    assert [each.title for each in both.sizes] == ["full model", "prune", "repair"]
    assert both.sizes[1].parameters == both.sizes[2].parameters, "they are like those of the phase before"


def test_too_little_room_is_planned_and_said() -> None:
    (work,) = planned(recipe(16384, memory_mb=4096)).repairs
    assert work.fault is not None and work.fault.startswith("phases.0.repair.memory_mb: fitting 57,344 features")
    least = int(work.fault.rpartition("allow ")[2].split(",")[0] + work.fault.rpartition("allow ")[2].split(",")[1])
    (enough,) = planned(recipe(16384, memory_mb=least)).repairs
    assert enough.fault is None and least < 1.03 * 8 / 7 * work.needed / 2**20


def test_the_command_prints_and_writes_it(in_process: Any, tmp_path: Path) -> None:
    asked = ("--model", "mixtral-8x7b", "--gpu", "h200", "--prompt-tokens", "160", "--examples", "256")
    mended = ("--set", "phases.0.repair={tokens: 16384, memory_mb: 4096}")
    done = in_process("plan", RUNS / "mixtral-boolq.yaml", *asked, *mended)
    assert done.returncode == 0, done.stderr
    assert "repair of a candidate" in done.stdout and "+ repair" in done.stdout
    assert "phases.0.repair.memory_mb: fitting 57,344 features on 16,384 tokens takes" in done.stdout
    found = json.loads(in_process("plan", RUNS / "mixtral-boolq.yaml", *asked, *mended, "--json").stdout)
    (work,) = found["repairs"]
    assert work["flops"] == work["forward"] + work["fitting"] and work["fault"].startswith("phases.0.repair")
    assert found["devices"][0]["phases"][0]["repair"] > 0 == found["devices"][0]["phases"][1]["repair"]
    assert "repair of a candidate" not in in_process("plan", RUNS / "mixtral-boolq.yaml", *asked).stdout


@pytest.fixture(scope="module")
def wordy(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny task with calibration prompts of 50 words."""
    folder = tmp_path_factory.mktemp("wordy")
    task = yaml.safe_load(tiny.task.read_text())
    rows = [json.loads(line)["text"].split() for line in (tiny.task.parent / "prompts.jsonl").read_text().splitlines()]
    texts = [" ".join((row * 50)[:50]) for row in rows]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = {"all": str(tiny.task.parent / "pick.jsonl"), "prompts": str(folder / "prompts.jsonl")}
    task["source"] = {"files": files}
    (folder / "wordy.yaml").write_text(yaml.safe_dump(task))
    return folder / "wordy.yaml"


def test_too_little_room_is_refused_before_anything_runs(
    tiny: Any, wordy: Path, in_process: Any, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "genome": {"kind": "eep", "experts": 2, "groups": 2},
        "phases": [{"kind": "prune", "evaluations": 4, "initial": 2, "repair": {"memory_mb": 1}}],
    }
    run = tiny.write_run(tmp_path / "run.yaml", "small", tasks=[str(wordy)], **changes)
    done = in_process("launch", run)
    assert done.returncode == 2 and "phases.0.repair.memory_mb: fitting 32 features on 4," in done.stderr
    assert not (tmp_path / "moevolve.db").exists()
    with pytest.raises(UserError, match=r"phases\.0\.repair\.memory_mb"):
        set_up(load_run_config(run), "small-1")
    # As many tokens wouldn't fit either, but there are few.
    set_up(load_run_config(tiny.write_run(run, "small", **changes)), "small-1")


def eep_run(tiny: Any, folder: Path) -> RunConfig:
    changes = {"phases": [{"kind": "prune", "evaluations": 2, "initial": 2}], "engine": {}}
    return load_run_config(tiny.write_run(folder / "run.yaml", "counted", **changes))


MAKERS: dict[str, Callable[[Any, Path], RunConfig]] = {"eep": eep_run} | {
    kind: lambda tiny, folder, kind=kind: dense_run(tiny, folder, {"kind": kind, **DENSE[kind]}, "counted")  # type: ignore[misc]
    for kind in ("factorllm", "tomoe")
}


@pytest.mark.parametrize("target", ["global", "local"])
@pytest.mark.parametrize("kind", MAKERS)
def test_fits_and_passes_are_those_that_are_made(
    kind: str, target: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths, how many columns are at work for a token, and layers that are run, of repairs on tiny models."""
    run = MAKERS[kind](tiny, tmp_path)
    phase = run.phases[0].kind
    repair = {"target": target, "neurons": {} if kind == "eep" else None}
    phases = [{"kind": phase, "evaluations": 2, "initial": 2, "repair": {"tokens": 200} | repair}]
    final = {"rerank": 0, "test": False}
    config = RunConfig.model_validate(run.model_dump() | {"phases": phases, "final": final})
    fits: list[tuple[int, int, float]] = []
    passes = [0]
    fit_ridge, through = repair_apply.fit_ridge, Streams.through

    def fitted(features: Any, residual: Any, *others: Any) -> Any:
        filled = sum(block.values.numel() for block in features.blocks(1 << 30))
        fits.append((features.width, len(residual), filled / (len(residual) * features.width)))
        return fit_ridge(features, residual, *others)

    def passed(*arguments: Any, **named: Any) -> Any:
        passes[0] += 1
        return through(*arguments, **named)

    monkeypatch.setattr(repair_apply, "fit_ridge", fitted)
    monkeypatch.setattr(repair_apply, "KEPT_BYTES", 0)
    monkeypatch.setattr(Streams, "through", passed)
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        finished(store, config)
        candidates = len({row.phenotype_hash for row in store.history(store.search("counted").id)})
    outline = outline_model(config.model)
    costs = costs_of(make_space(config.genome, outline.facts, config.phases), outline)
    expected = [fit for layer in costs.fits() for fit in layer]
    (work,) = repair_works(config, costs, outline, 10.0)
    times = 2 if kind == "eep" else 1  # neurons by worth, and by what a fit of them leaves
    assert [width for width, _, _ in fits] == [fit.width for fit in expected for _ in range(times)] * candidates
    assert {tokens for _, tokens, _ in fits} <= set(range(work.tokens - 20, work.tokens + 1))
    for fit, (_, _, density) in zip(expected, fits[::times], strict=False):
        # Random candidates' differ from the start's, and blocks are taken as wide as one of their columns needs.
        assert density == pytest.approx(fit.density, abs=1e-6 if kind == "eep" else 1.0)
        assert 0 < fit.density <= 1
    layers = len(outline.layers)
    assert passes[0] == layers + candidates * work.layer_passes
