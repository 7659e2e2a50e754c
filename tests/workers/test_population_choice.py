"""How many candidates should share a pass: what times decide, and measuring on a real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import digest

from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.actor import EvaluationWorker
from moevolve.workers.config import POPULATION_SIZES, EngineConfig, ModelConfig
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.forward import Forward, PassRequest
from moevolve.workers.messages import EvaluationRequest
from moevolve.workers.population_choice import REPEATS, Room, best_size, hardware_of

EXAMPLES = tuple(Example("the quick brown fox over a dog", ("a", "b fox")[i % 2 :]) for i in range(6))
SPLIT = PreparedSplit("t", "search", "generate", "accuracy", Matching(), 3, " ", EXAMPLES)
PASSES = 1 + REPEATS


@pytest.mark.parametrize(
    ("seconds", "size"),
    [
        ((8.0, 4.0, 2.0, 1.0), 8),
        ((8.0, 4.0, 3.9, 3.85), 2),
        ((8.0, 6.0, 4.0, 3.9), 4),
        ((8.0, 7.7, 7.65, 7.7), 1),
        ((8.0, 7.9, 7.61, 7.5), 8),
        ((8.0, 9.0, 10.0, 12.0), 1),
        ((8.0, 9.0, 5.0, 6.0), 4),
        ((8.0, 7.6), 2),
        ((8.0,), 1),
    ],
)
def test_the_smallest_that_is_as_good_as_the_best(seconds: tuple[float, ...], size: int) -> None:
    assert best_size(tuple(zip(POPULATION_SIZES, seconds, strict=False))) == size


@pytest.fixture
def worker(model_config: Callable[..., ModelConfig]) -> EvaluationWorker:
    return EvaluationWorker(model_config("mixtral"), EngineConfig(batch_tokens=40), reuse_bytes=1 << 20)


@pytest.fixture
def request_of(make_edit: Callable[..., EepEdit]) -> Callable[[str], EvaluationRequest]:
    return lambda kind: EvaluationRequest("1", make_edit("mixtral", kind), (SPLIT.fingerprint,))


@pytest.fixture
def positions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of every pass of a model."""
    found: list[int] = []
    run = Forward.run

    def watched(self: Forward, request: PassRequest) -> torch.Tensor:
        if type(self) is Forward:
            found.append(request.ids.numel())
        return run(self, request)

    monkeypatch.setattr(Forward, "run", watched)
    return found


@pytest.mark.parametrize("kind", ["prune", "mixed"])
def test_passes_of_every_size_are_timed(
    worker: EvaluationWorker, request_of: Any, positions: list[int], kind: str
) -> None:
    before = digest(worker.resident)
    longer = replace(SPLIT, examples=tuple(replace(one, prompt=one.prompt * 4) for one in EXAMPLES))
    choice = worker.choose_population(request_of(kind), (SPLIT, longer), 8)
    first, longest, timed = positions[:3]
    assert first < longest
    assert positions == [size * count for size in POPULATION_SIZES for count in (first, longest, *[timed] * PASSES)]
    assert [size for size, _ in choice.seconds] == list(POPULATION_SIZES)
    assert all(0 < taken < 60 for _, taken in choice.seconds)
    assert (choice.size, choice.ended) == (best_size(choice.seconds), "")
    assert digest(worker.resident) == before


def test_a_cpu_needs_no_measuring(worker: EvaluationWorker) -> None:
    assert hardware_of(torch.device("cpu")) == worker.info().hardware == ""


def test_memory_bounds_the_sizes(
    model_config: Callable[..., ModelConfig], request_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = EvaluationWorker(model_config("mixtral"), EngineConfig(population_memory_mb=0))
    choice = worker.choose_population(request_of("mixed"), (SPLIT,), 8)
    assert (choice.size, [size for size, _ in choice.seconds]) == (1, [1])
    assert choice.ended == "engine.population_memory_mb has no room for 2 candidates' experts"

    run = Forward.run

    def small(self: Forward, request: PassRequest) -> torch.Tensor:
        if type(self) is Forward and len(request.ids) > 2:
            raise torch.OutOfMemoryError("no more")
        return run(self, request)

    monkeypatch.setattr(Forward, "run", small)
    choice = worker.choose_population(request_of("prune"), (SPLIT,), 8)
    assert [size for size, _ in choice.seconds] == [1, 2]
    assert choice.ended == "out of memory with 4 candidates"
    choice = worker.choose_population(request_of("prune"), (SPLIT,), 1)
    assert [size for size, _ in choice.seconds] == [1] and "no more than 1 candidates" in choice.ended


def test_a_device_must_have_room_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice what the passes took at most; what the allocator keeps is free for them."""
    device, found = torch.device("cuda", 0), dict[int, bool]()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 130)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50, 200))
    room = Room(device)
    for peak in (100, 140, 141):
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _, peak=peak: peak)
        found[peak] = room.was_ample()
    assert found == {100: True, 140: True, 141: False}
    assert Room(torch.device("cpu")).was_ample()


def test_a_candidate_that_cannot_be_run_leaves_it_at_one(worker: EvaluationWorker, request_of: Any) -> None:
    request = request_of("both")
    misfit = EepEdit(request.edit.router_mapping[:2], request.edit.expert_merging[:2], 2)
    broken = replace(request.edit, expert_merging=request.edit.expert_merging * np.float32(1e30))
    for edit, reason in ((misfit, "layers"), (broken, "finite")):
        choice = worker.choose_population(replace(request, edit=edit), (SPLIT,), 8)
        assert (choice.size, choice.seconds) == (1, ()) and reason in choice.ended
    empty = replace(SPLIT, examples=())
    assert "no prompts" in worker.choose_population(request, (empty,), 8).ended


def test_a_worker_shares_passes_once_it_is_told(
    worker: EvaluationWorker, request_of: Any, positions: list[int]
) -> None:
    request = request_of("prune")
    alone = worker.evaluate(request, (SPLIT,)).results[0].result
    plain = max(positions)
    for size in (2, 4, 1):
        positions.clear()
        worker.share(size)
        found = worker.evaluate(request, (SPLIT,)).results[0].result
        assert (found.score, found.gold_logprob) == (alone.score, alone.gold_logprob)
        if size > 1:
            assert max(positions) == size * plain
    assert max(positions, default=0) <= plain
