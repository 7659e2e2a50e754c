"""Candidates that share passes: the same numbers as one by one, faults that stay with whose they are, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import digest
from family_samples import SETTINGS as MORE_SETTINGS
from family_samples import make_family_edit

from moevolve.evaluators.early_stopping import Floor
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.actor import EvaluationWorker, WorkerFault
from moevolve.workers.config import EngineConfig, ModelConfig, engine_fingerprint
from moevolve.workers.edits.base import IdentityEdit
from moevolve.workers.edits.eep import EepEdit
from moevolve.workers.edits.experts import LayerExperts
from moevolve.workers.forward import Forward, PassRequest
from moevolve.workers.messages import EvaluationReply, EvaluationRequest

# Each routes in a way of its own; the others route like one of them.
FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
LIKE_THEM = ("qwen3_moe", "olmoe", "glm4_moe")
KINDS = ("prune", "crossed", "mapped", "merged", "both", "mixed")
SIZE = 3
EXAMPLES = 8
WORDS = ("the", "quick", "brown", "fox", "over", "dog", "which", "is", "larger", "a", "b")

Requests = tuple[EvaluationRequest, ...]
Company = Callable[..., Requests]
Workers = Callable[..., EvaluationWorker]


def split_of(fitness: str, **changes: Any) -> PreparedSplit:
    """Eight prompts of 2 to 12 tokens in several batches; answers of 1 to 3 tokens, choices of 1 to 2."""
    rng = np.random.default_rng(5)

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS, size=count))

    examples = tuple(
        Example(words(int(rng.integers(2, 13))), (words(1 + i % 3),), ("a", "b fox", "the")) for i in range(EXAMPLES)
    )
    if fitness == "rank":
        examples = tuple(replace(example, references=("a",)) for example in examples)
    metric = "geometric_mean" if fitness in ("perplexity", "kl", "agreement") else "accuracy"
    return PreparedSplit("t", "search", fitness, metric, Matching(), 3, " ", examples, **changes)  # type: ignore[arg-type]


SPLITS = tuple(split_of(fitness) for fitness in ("generate", "rank", "perplexity", "kl", "agreement"))


@pytest.fixture(scope="module")
def workers(model_config: Callable[..., ModelConfig]) -> Workers:
    """Workers by family and settings of the engine, kept for the module."""
    made: dict[tuple[Any, ...], EvaluationWorker] = {}

    def get(family: str, population: int, memory_mb: int = 64, reuse_bytes: int = 0, **model: str) -> EvaluationWorker:
        key = (family, population, memory_mb, reuse_bytes, *sorted(model.items()))
        if key not in made:
            engine = EngineConfig(batch_tokens=64, population=population, population_memory_mb=memory_mb)
            made[key] = EvaluationWorker(model_config(family, **model), engine, reuse_bytes=reuse_bytes)
        return made[key]

    return get


@pytest.fixture
def company(make_edit: Callable[..., EepEdit]) -> Company:
    """Requests for some edits of a family, by kind."""

    def make(family: str, *kinds: str, splits: tuple[PreparedSplit, ...] = SPLITS) -> Requests:
        space = "logits" if family == "gpt_oss" else "probs"
        make_one = make_family_edit if family in MORE_SETTINGS else make_edit
        edits = [make_one(family, kind, space=space, seed=seed) for seed, kind in enumerate(kinds)]
        keys = tuple(split.fingerprint for split in splits)
        return tuple(EvaluationRequest(f"{i}", edit, keys) for i, edit in enumerate(edits))

    return make


def numbers(reply: EvaluationReply) -> list[Any]:
    """All of a reply that isn't about time or place."""
    results = [
        (one.task_fingerprint, one.result.score, one.result.gold_logprob, one.result.outcomes.tolist())
        for one in reply.results
    ]
    return [reply.ticket, results, reply.failure, reply.stopped]


def each_alone(worker: EvaluationWorker, requests: Requests, splits: Any = SPLITS) -> list[Any]:
    return [numbers(worker.evaluate(request, splits)) for request in requests]


def together(worker: EvaluationWorker, requests: Requests, splits: Any = SPLITS) -> list[Any]:
    return [numbers(reply) for reply in worker.evaluate_many(requests, splits)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_candidate_gets_what_it_gets_alone(workers: Workers, company: Company, family: str) -> None:
    """On a CPU and these models bit for bit what a population of 1 gets."""
    splits = SPLITS if family == "mixtral" else SPLITS[:2]
    check_all(workers, company(family, *KINDS, "prune", "mixed", splits=splits), family, splits)


@pytest.mark.parametrize("family", LIKE_THEM)
def test_families_that_route_like_others(workers: Workers, company: Company, family: str) -> None:
    splits = SPLITS[:1]
    check_all(workers, company(family, "prune", "mixed", "mixed", splits=splits), family, splits)


def check_all(workers: Workers, requests: Requests, family: str, splits: tuple[PreparedSplit, ...]) -> None:
    found = together(workers(family, SIZE), requests, splits)
    assert found == each_alone(workers(family, 1), requests, splits)
    assert len({str(numbers[1:]) for numbers in found}) == len(requests)
    assert all(len(results) == len(splits) for _, results, *_ in found)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_blocks_that_run_on_all_tokens_at_once(
    workers: Workers, company: Company, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """What devices do where rows stand alone: the same but for rounding."""
    splits = SPLITS[:2]
    requests = company(family, *KINDS, splits=splits)
    expected = each_alone(workers(family, 1), requests, splits)
    monkeypatch.setattr(LayerExperts, "rows_stand_alone", True)
    found = together(workers(family, SIZE), requests, splits)
    for one, other in zip(found, expected, strict=True):
        for (_, score, logprob, outcomes), (_, score_1, logprob_1, outcomes_1) in zip(one[1], other[1], strict=True):
            assert (score, logprob) == pytest.approx((score_1, logprob_1), abs=1e-5)
            np.testing.assert_allclose(outcomes, outcomes_1, atol=1e-5)


@pytest.mark.parametrize("kind", ["prune", "mixed"])
def test_company_and_place_change_nothing(workers: Workers, company: Company, kind: str) -> None:
    worker, splits = workers("mixtral", SIZE), SPLITS[:2]
    requests = company("mixtral", kind, kind, kind, kind, splits=splits)
    alone = each_alone(worker, requests, splits)
    assert together(worker, requests[:2], splits) == alone[:2]
    assert together(worker, requests[::-1], splits) == alone[::-1]
    assert together(worker, (requests[2], requests[0]), splits) == [alone[2], alone[0]]


def test_passes_are_shared_and_nothing_stays_behind(
    workers: Workers, company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers("mixtral", SIZE)
    resident = worker.resident
    before = digest(resident), resident.expert_pointers()
    own = [module.__dict__.get("forward") for module in resident.model.modules()]
    rows: list[int] = []
    run = Forward.run

    def watched(self: Forward, request: PassRequest) -> torch.Tensor:
        if type(self) is Forward:
            rows.append(len(request.ids))
            assert resident.expert_pointers() == before[1], "pruning candidates have no weights of their own"
        return run(self, request)

    monkeypatch.setattr(Forward, "run", watched)
    splits = (SPLITS[1],)
    requests = company("mixtral", "prune", "prune", "mapped", splits=splits)
    worker.evaluate(replace(requests[0], edit=IdentityEdit()), splits)
    plain, rows = rows, []
    together(worker, requests, splits)
    assert rows == [count * SIZE for count in plain]
    monkeypatch.undo()
    together(worker, company("mixtral", "merged", "both", "mixed"))
    assert (digest(resident), resident.expert_pointers()) == before
    assert [module.__dict__.get("forward") for module in resident.model.modules()] == own


def test_other_edits_and_other_companies_run_apart(workers: Workers, company: Company) -> None:
    splits = SPLITS[:2]
    prune, merge, narrow = company("mixtral", "prune", "merged", "prune", splits=splits)
    edit: Any = narrow.edit
    narrow = replace(narrow, edit=replace(edit, active=1))
    full = EvaluationRequest("full", IdentityEdit(), prune.splits)
    requests = (prune, full, merge, narrow)
    found = together(workers("mixtral", SIZE), requests, splits)
    assert found == each_alone(workers("mixtral", 1), requests, splits)


@pytest.mark.parametrize("kind", ["prune", "mixed"])
def test_originals_on_the_host(workers: Workers, company: Company, kind: str) -> None:
    splits = SPLITS[:2]
    requests = company("mixtral", kind, kind, kind, splits=splits)
    expected = each_alone(workers("mixtral", 1), requests, splits)
    assert together(workers("mixtral", SIZE, originals="host"), requests, splits) == expected


def test_reused_states_of_others_play_no_part(workers: Workers, company: Company) -> None:
    splits = SPLITS[::2]
    requests = company("mixtral", "prune", "prune", "mixed", "mixed", splits=splits)
    expected = each_alone(workers("mixtral", 1), requests, splits)
    worker = workers("mixtral", SIZE, reuse_bytes=1 << 24)
    full = EvaluationRequest("full", IdentityEdit(), requests[0].splits)
    for _ in range(2):
        assert numbers(worker.evaluate(full, splits)) == numbers(workers("mixtral", 1).evaluate(full, splits))
        assert together(worker, requests, splits) == expected


def test_merged_experts_stay_within_their_bound(workers: Workers, company: Company) -> None:
    splits = SPLITS[:1]
    requests = company("mixtral", "both", "both", "both", "prune", "prune", "prune", splits=splits)
    tight = workers("mixtral", SIZE, memory_mb=0)
    population = tight._population
    assert population is not None
    assert [population.width(request.edit) for request in requests] == [1] * 3 + [SIZE] * 3
    assert population.parties([request.edit for request in requests]) == [[0], [1], [2], [3, 4, 5]]
    assert together(tight, requests, splits) == each_alone(workers("mixtral", 1), requests, splits)
    one = 4 * sum(t.nbytes // 6 for layer in tight.resident.layers for t in layer.expert_tensors().values())
    population._memory = 2 * one
    assert [population.width(request.edit) for request in requests[:1]] == [2]
    population._memory = 2 * one - 1
    assert [population.width(request.edit) for request in requests[:1]] == [1]


def test_each_is_stopped_by_its_own_floor(workers: Workers, company: Company) -> None:
    splits = SPLITS[:2]
    requests = company("mixtral", "prune", "prune", "prune", splits=splits)
    keys = requests[0].splits
    floors = (
        None,
        Floor(0.99, keys, (1.0, 1.0), (1.0, 1.0), (EXAMPLES, EXAMPLES)),
        Floor(0.0, keys, (1.0, 1.0), (1.0, 1.0), (EXAMPLES, EXAMPLES)),
    )
    requests = tuple(replace(request, floor=floor) for request, floor in zip(requests, floors, strict=True))
    replies = workers("mixtral", SIZE).evaluate_many(requests, splits)
    expected = [workers("mixtral", 1).evaluate(request, splits) for request in requests]
    assert [numbers(reply) for reply in replies] == [numbers(reply) for reply in expected]
    assert [reply.stopped for reply in replies] == [False, True, False]
    bounds = [reply.partial and reply.partial.result.bound for reply in (replies[1], expected[1])]
    assert bounds[0] == bounds[1] is not None


def test_a_fault_stays_with_its_candidate(workers: Workers, company: Company) -> None:
    """Weights that explode, an edit for another model, values that aren't finite: the others don't notice."""
    splits = SPLITS[:1]
    requests = company("mixtral", *["both"] * 6, splits=splits)
    edits: list[Any] = [request.edit for request in requests]
    edits[1] = replace(edits[1], expert_merging=edits[1].expert_merging * np.float32(1e30))
    edits[3] = replace(edits[3], router_mapping=edits[3].router_mapping * np.float32("nan"))
    edits[4] = EepEdit(edits[4].router_mapping[:2], edits[4].expert_merging[:2], 2)
    requests = tuple(replace(request, edit=edit) for request, edit in zip(requests, edits, strict=True))
    found = together(workers("mixtral", SIZE), requests, splits)
    assert found == each_alone(workers("mixtral", 1), requests, splits)
    assert [failure is not None for *_, failure, _ in found] == [False, True, False, True, True, False]
    assert "finite" in found[1][2] and "finite" in found[3][2] and "3 of 6" in found[4][2]


class Picky(Exception):
    pass


def test_who_breaks_a_shared_pass_is_found(workers: Workers, company: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = SPLITS[:1]
    requests = company("mixtral", "prune", "prune", "prune", splits=splits)
    worker = workers("mixtral", SIZE)
    expected = each_alone(worker, requests, splits)
    last = worker.resident.layers[-1]
    guilty: Any = requests[1].edit
    bad = guilty.router_mapping[-1].argmax(axis=1)
    original = last.experts.forward

    def picky(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        if set(bad.tolist()) <= set(chosen.flatten().tolist()):
            raise Picky("these experts together")
        return original(hidden, chosen, weights)

    monkeypatch.setitem(last.experts.__dict__, "forward", picky)
    found = together(worker, requests, splits)
    assert found[0] == expected[0] and found[2] == expected[2]
    assert found[1][2] == "Picky: these experts together"


def test_memory_that_runs_out_blames_the_worker(
    workers: Workers, company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers("mixtral", SIZE)
    requests = company("mixtral", "prune", "prune", splits=SPLITS[:1])

    def no_room(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(Forward, "run", no_room)
        with pytest.raises(WorkerFault, match="memory"):
            worker.evaluate_many(requests, SPLITS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(EvaluationWorker, "_score", no_room)
        with pytest.raises(WorkerFault, match="memory"):
            worker.evaluate_many(requests, SPLITS[:1])
    assert worker.evaluate_many(requests, SPLITS[:1])[0].failure is None


def test_only_a_population_changes_the_fingerprint() -> None:
    model = ModelConfig("somewhere")
    plain = engine_fingerprint(model, EngineConfig())
    assert plain == "e832076c5670fe7d8a7f367eb5caf1f203faec076c9289c62cb871069bd85293"
    for population in (1, "auto"):
        assert engine_fingerprint(model, EngineConfig(population=population, population_memory_mb=7)) == plain
    others = [
        EngineConfig(population=2),
        EngineConfig(population=4),
        EngineConfig(population=4, population_memory_mb=7),
    ]
    assert len({plain, *(engine_fingerprint(model, engine) for engine in others)}) == 4
