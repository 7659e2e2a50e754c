"""A fitness that is defined here and registered by one line works everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import MIXTRAL, save_tiny_model

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.base import Fitness
from moevolve.evaluators.fitness.engine import Engine
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import Floats, PreparedSplit
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.profiling.prompts import PromptMeter
from moevolve.workers.worker import EvaluationWorker

WORDS = ("red", "blue", "green", "cat", "dog", "bird", "is", "the", "a", "which")
NEW_TOKENS = 6
STOP = "dog"
LAYERS, EXPERTS = 2, 4


def brevity_of(answer: str) -> float:
    return 1 / (1 + len(answer.split(STOP, maxsplit=1)[0].split()))


class Brevity(Fitness):
    """Shorter greedy answers score higher; no labels are needed."""

    name = "brevity"
    metric = "mean"
    reads = "generation"
    needs_references = False
    tie_break = "logarithm"

    def outcomes(self, engine: Engine, split: PreparedSplit) -> tuple[Floats, Floats]:
        texts = engine.generate(split, self.decided(split)).texts
        outcomes = np.array([brevity_of(text) for text in texts])
        return outcomes, np.log(outcomes)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FITNESSES, Brevity.name, Brevity())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny random Mixtral."""
    directory = tmp_path_factory.mktemp("model")
    sizes = MIXTRAL | {"num_hidden_layers": LAYERS, "num_local_experts": EXPERTS, "initializer_range": 0.5}
    save_tiny_model(directory, "mixtral", WORDS, seed=2, **sizes)
    return directory


WriteTask = Callable[..., Path]


@pytest.fixture
def write_prompts(write_task: WriteTask) -> WriteTask:
    """Write a task without answers, with changes."""
    rows = [{"text": " ".join(WORDS[(3 * i + j) % len(WORDS)] for j in range(1 + i % 4))} for i in range(12)]
    plain = {"prompt": "{{ text }}", "labels": None, "answer": None, "choices": None, "matching": {"stop": [STOP]}}

    def write(stem: str = "prompts", **changes: object) -> Path:
        return write_task(stem, rows, **(plain | {"max_new_tokens": NEW_TOKENS} | changes))

    return write


def pruning(seed: int) -> EepEdit:
    """Two of the four experts of every layer."""
    rng = np.random.default_rng(seed)
    kept = np.stack([np.eye(EXPERTS, dtype=np.float32)[rng.permutation(EXPERTS)[:2]] for _ in range(LAYERS)])
    return EepEdit(kept, kept, 2)


def test_tasks_name_it(write_prompts: WriteTask, write_task: WriteTask) -> None:
    task = load_task(write_prompts(fitness="brevity"))
    assert (task.labelled, task.resolved_positions) == (False, "text")
    split = prepare_split(task, "search")
    assert (split.fitness, split.metric, len(split.examples)) == ("brevity", "mean", 4)
    with pytest.raises(UserError, match=r"fitness: unknown fitness `short`; known: .*, brevity$"):
        load_task(write_prompts(fitness="short"))
    labelled = load_task(f"{write_task()}@brevity")
    assert labelled.name == "small@brevity"
    assert prepare_split(labelled, "dev").examples[0].references


def test_a_worker_scores_it(write_prompts: WriteTask, model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    split = prepare_split(load_task(write_prompts(fitness="brevity")), "test")
    worker = EvaluationWorker(ModelConfig(str(model), device="cpu"), EngineConfig(batch_tokens=24))
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    expected = []
    for example in split.examples:
        ids = torch.tensor([tokenizer(example.prompt)["input_ids"]])
        made = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        expected.append(brevity_of(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)))
    reply = worker.evaluate(EvaluationRequest(IdentityEdit(), (split.ref,)), (split,))
    assert reply.failure is None
    (found,) = reply.results.values()
    np.testing.assert_allclose(found.outcomes, expected, rtol=1e-6)
    assert found.score == pytest.approx(np.mean(expected))
    assert found.gold_logprob == pytest.approx(np.mean(np.log(expected)))
    assert len(set(expected)) > 1
    scores = set()
    for seed in range(2):
        reply = worker.evaluate(EvaluationRequest(pruning(seed), (split.ref,)), (split,))
        scores.add(reply.results[split.fingerprint].score)
    assert len(scores) > 1


def test_its_tokens_are_counted(write_prompts: WriteTask, model: Path) -> None:
    task = write_prompts(fitness="brevity")
    split = prepare_split(load_task(task), "search")
    counts = PromptMeter(ModelConfig(str(model), device="cpu"), EngineConfig()).counts(split)
    prompts = [1 + len(example.prompt.split()) for example in split.examples]
    assert counts.tokens == sum(prompts) + len(prompts) * NEW_TOKENS
    assert counts.longest == max(prompts) + NEW_TOKENS
