"""What a plan makes of counts: memory of a worker, what fits where, and hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import find_model, load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.estimate.counts import phase_counts
from moevolve.search.estimate.devices import GPUS, Device, find_gpus
from moevolve.search.estimate.estimate import estimate
from moevolve.search.estimate.memory import worker_memory
from moevolve.search.estimate.workload import Prompts
from moevolve.search.genomes.registry import costs_of, make_space
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.outline import outline_model


def lab_config(name: str, **changes: Any) -> RunConfig:
    data: dict[str, Any] = {
        "name": "lab",
        "model": {"path": find_model(name), "dtype": "bfloat16", "device": "cuda"},
        "tasks": [{"name": "boolq"}],
        "genome": {"experts": 4, "groups": 1},
        "phases": [{"kind": "prune", "evaluations": 200}, {"kind": "merge", "evaluations": 100}],
        "workers": {"count": 4, "num_gpus": 1},
    }
    for key, value in changes.items():
        data[key] = data.get(key, {}) | value if isinstance(value, dict) else value
    return RunConfig.model_validate(data)


def report(config: RunConfig, *gpus: Device, examples: int = 256) -> Any:
    return estimate(config, gpus or (GPUS["h100"],), prompts=Prompts(160, 8, examples))


def test_running_text_is_planned_in_windows() -> None:
    """Of lengths that were given, those of windows are the task's."""
    found = report(lab_config("mixtral-8x7b", tasks=[{"name": "wikitext2"}], final={"rerank": 0}), examples=40)
    searched = next(split for split in found.splits if split.split == "search")
    assert (searched.examples, searched.tokens) == (40, 40 * 2048)


def test_memory_of_a_mixtral_with_originals_here_and_there() -> None:
    config = lab_config("mixtral-8x7b")
    found, outline = report(config), outline_model(config.model)
    here, there = found.memory["device"], found.memory["host"]
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    assert outline.experts_bytes == experts
    cached = 2 * 32 * 8 * 128 * 2
    rows = 4096 // 160
    # Decoding goes on from copies, beside what the batch has cached.
    kept = (rows * 160 + rows * (160 + 7)) * cached
    assert [item.device for item in here.items[1:5]] == [experts, experts // 2, 0, kept]
    assert [item.device for item in there.items[1:5]] == [0, 0, experts // 32, kept]
    assert here.device - there.device == experts + experts // 2 - experts // 32
    assert (here.experts, there.experts) == (0, experts)
    assert here.host == 0
    # 1.75 and 0.875 GiB per layer become 2 and 1.
    assert there.host == 32 * 3 * 2**30
    assert here.loading == outline.weight_bytes
    # One layer is there twice while it is pinned.
    assert there.loading == outline.weight_bytes - experts + there.host + experts // 32
    assert not found.devices[0].kept_layers, "all are on the device"
    pruning = report(lab_config("mixtral-8x7b", phases=[{"kind": "prune", "evaluations": 50}])).memory
    assert [pruning[place].items[2].device for place in ("device", "host")] == [0, 0], "nothing is merged"


def test_what_fits_where() -> None:
    gpus = find_gpus("a100-40g, h100,H200")
    fits = [each.fits for each in report(lab_config("mixtral-8x7b"), *gpus).devices]
    assert fits[0] == {"device": False, "host": True}
    assert fits[1] == {"device": False, "host": True}
    assert fits[2] == {"device": True, "host": True}
    two = lab_config("mixtral-8x7b", workers={"num_gpus": 2})
    assert report(two, *find_gpus("h100")).devices[0].fits["device"]


@pytest.mark.parametrize(
    ("gpu", "experts", "kept"),
    [("a100-40g", 4, (10, 22)), ("h100", 8, (24, 24))],
)
def test_experts_of_some_layers_stay_on_the_device(gpu: str, experts: int, kept: tuple[int, int]) -> None:
    """Mixtral's layers are 2.82 GB of experts each; what is free beside weights and passes holds so many."""
    config = lab_config("mixtral-8x7b", genome={"experts": experts}, model={"originals": "host"})
    config = config.model_copy(update={"phases": config.phases[1:]})
    found = report(config, GPUS[gpu]).devices[0]
    assert found.kept_layers == {"full model": kept[0], "merge": kept[1]}


def test_hours_are_flops_at_a_share_of_the_peak() -> None:
    config = lab_config("mixtral-8x7b", final={"rerank": 5, "random_baselines": 0})
    found = report(config)
    flops = outline_model(config.model).token_flops
    assert found.evaluation_flops["prune"] == flops * 256 * 160
    # 70 subsets, 100 merged ones and the full model on search; five on dev; the best and the full model on test.
    merged = found.evaluation_flops["merge"]
    assert found.total_flops == 70 * found.evaluation_flops["prune"] + 100 * merged + 256 * 160 * flops * 2 + 6 * merged
    assert found.devices[0].hours == pytest.approx(found.total_flops / (4 * 0.4 * 989e12) / 3600)
    half = estimate(config, (GPUS["h100"],), Prompts(160, 8, 256), utilisation=0.2).devices[0]
    assert half.hours == pytest.approx(2 * found.devices[0].hours)
    single = report(lab_config("mixtral-8x7b", model={"dtype": "float32"}, final={"rerank": 5, "random_baselines": 0}))
    assert single.devices[0].hours == pytest.approx(found.devices[0].hours * 989 / 67)


def test_hours_scale_with_workers_and_prompts() -> None:
    one = report(lab_config("mixtral-8x7b")).devices[0]
    many = report(lab_config("mixtral-8x7b", workers={"count": 64}), examples=128).devices[0]
    assert many.workers == 8, "the window keeps no more busy"
    assert many.hours == pytest.approx(one.hours / 2 / 2)


def test_subsets_bound_how_many_pruning_candidates_differ() -> None:
    config = lab_config("mixtral-8x7b")
    outline = outline_model(config.model)
    counts = phase_counts(config, costs_of(make_space(config.genome, outline.facts), outline))
    assert [(each.individuals, each.different) for each in counts] == [(200, 70), (100, 100)]


def test_prompts_longer_than_the_model_are_refused() -> None:
    config = lab_config("qwen1.5-moe-a2.7b")
    with pytest.raises(UserError, match=r"boolq.*9007 tokens.*8192 positions"):
        estimate(config, (GPUS["h100"],), prompts=Prompts(9000, 8, 10))


def test_a_worker_on_a_part_of_a_gpu_has_a_part_of_it() -> None:
    whole, half = (
        report(lab_config("qwen1.5-moe-a2.7b", workers={"num_gpus": n, "count": c})).devices[0]
        for n, c in ((1, 2), (0.5, 2))
    )
    assert half.memory_bytes * 2 == whole.memory_bytes
    assert half.hours == pytest.approx(2 * whole.hours)


def test_worker_memory_of_a_tiny_model_is_what_is_loaded(tiny: Any, tmp_path: Path) -> None:
    resident = ResidentModel.load(ModelConfig(str(tiny.model), device="cpu"))
    config = load_run_config(tiny.write_run(tmp_path / "run.yaml", "memory"))
    outline = outline_model(config.model)
    costs = costs_of(make_space(config.genome, outline.facts), outline)
    found = worker_memory(config, outline, costs, (), on_gpu=False, place="device")
    loaded = sum(each.nbytes for each in (*resident.model.parameters(), *resident.model.buffers()))
    assert sum(item.device for item in found.items[:2]) == loaded
    assert found.items[2].device == outline.experts_bytes * 2 // outline.facts.experts
    assert (found.host, found.loading) == (0, 0)
