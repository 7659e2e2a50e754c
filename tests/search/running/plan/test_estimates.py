"""What a plan makes of counts: memory of a worker, and numbers of prompts and evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import find_model, load_run_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import costs_of, make_space
from moevolve.search.running.plan.counts import TokenCounts
from moevolve.search.running.plan.estimate import estimate
from moevolve.search.running.plan.memory import worker_memory
from moevolve.search.running.plan.workload import Prompts
from moevolve.search.running.set_up import set_up
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


def report(config: RunConfig, examples: int = 256) -> Any:
    return estimate(config, Prompts(160, 8, examples))


def test_running_text_is_planned_in_windows() -> None:
    """Of lengths that were given, those of windows are the task's."""
    found = report(lab_config("mixtral-8x7b", tasks=[{"name": "wikitext2"}], final={"rerank": 0}), examples=40)
    searched = next(split for split in found.splits if split.split == "search")
    assert (searched.examples, searched.tokens) == (40, 40 * 4096)


def test_memory_of_a_mixtral_with_originals_here_and_there() -> None:
    config = lab_config("mixtral-8x7b")
    found, outline = report(config), outline_model(config.model)
    here, there = found.memory["device"], found.memory["host"]
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    assert outline.experts_bytes == experts
    cached = 2 * 32 * 8 * 128 * 2
    # Decoding goes on from copies, beside what the batch has cached.
    kept = 2 * config.engine.batch_tokens * cached
    assert [item.device for item in here.items[1:4]] == [experts, experts // 2, kept]
    # Short answers are generated one layer at a time.
    assert [item.device for item in there.items[1:4]] == [experts // 32, 0, 0]
    # The projections of attention take turns, too; they and what comes of them are powers of two.
    linears = 2 * (4096 + 1024) * 4096 * 2
    assert here.device - there.device == experts + experts // 2 + kept - experts // 32 + 31 * linears
    assert here.host == 0
    # 1.75 and 0.875 GiB per layer become 2 and 1.
    hosted = 32 * 3 * 2**30
    states = sum(item.host for item in there.items if item.title.startswith("states of the texts"))
    assert there.host == hosted + 32 * linears + states
    assert here.loading == outline.weight_bytes
    # One layer is there twice while it is pinned.
    assert there.loading == outline.weight_bytes - experts + hosted + experts // 32
    pruning = report(lab_config("mixtral-8x7b", phases=[{"kind": "prune", "evaluations": 50}])).memory
    assert [pruning[place].items[2].device for place in ("device", "host")] == [0, 0], "nothing is merged"


def test_a_plan_says_what_a_launch_checks(tiny: Any, tmp_path: Path) -> None:
    phases = [{"kind": "prune", "evaluations": 4, "initial": 4, "repair": {"tokens": 300}}]
    config = load_run_config(tiny.write_run(tmp_path / "run.yaml", "same", phases=phases))
    needed = set_up(config, "same").needed
    assert needed is not None
    assert estimate(config).memory["device"] == needed.memory


def test_workers_beyond_the_window_are_said_to_have_no_work() -> None:
    idle = [report(lab_config("mixtral-8x7b", workers={"count": count})).remarks for count in (8, 64)]
    assert idle == [(), ("the run's window keeps 8 of 64 workers busy",)]


def test_prompts_longer_than_the_model_are_refused() -> None:
    config = lab_config("qwen1.5-moe-a2.7b")
    with pytest.raises(UserError, match=r"boolq.*9008 tokens.*8192 positions"):
        estimate(config, Prompts(9000, 8, 10))


def test_worker_memory_of_a_tiny_model_is_what_is_loaded(tiny: Any, tmp_path: Path) -> None:
    resident = ResidentModel.load(ModelConfig(str(tiny.model), device="cpu"))
    config = load_run_config(tiny.write_run(tmp_path / "run.yaml", "memory"))
    outline = outline_model(config.model)
    costs = costs_of(make_space(config.genome, outline.facts), outline)
    found = worker_memory(config, outline, costs, TokenCounts(), "device")
    loaded = sum(each.nbytes for each in (*resident.model.parameters(), *resident.model.buffers()))
    assert sum(item.device for item in found.items[:2]) == loaded
    assert found.items[2].device == outline.experts_bytes * 2 // outline.facts.experts
    assert found.items[-1].title == "the process and its libraries" and (found.host, found.loading) == (0, 0)
