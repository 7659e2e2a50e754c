"""Tasks of lm-evaluation-harness on the resident model have the outcomes of lm-eval's own evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import yaml

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.scoring import run_split
from moevolve.evaluators.harness.tasks import load_harness
from moevolve.evaluators.preparation.prepare import prepare_split
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.engine.engine import GenerationEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

lm_eval = pytest.importorskip("lm_eval")

CHOICE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "gold",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True},
    ],
}
LIKELY: dict[str, Any] = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": " {{options[0]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}
WRITTEN: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{made}}",
    "generation_kwargs": {"until": ["w7", " w9"], "max_gen_toks": 5, "do_sample": False},
    "filter_list": [
        {"name": "whole", "filter": [{"function": "take_first"}]},
        {"name": "last", "filter": [{"function": "regex", "regex_pattern": r"(w\d+)$"}, {"function": "take_first"}]},
    ],
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TESTED = 12
"""Test documents."""
KINDS = {"choice": CHOICE, "likely": LIKELY, "written": WRITTEN}
# Every choice has a prompt of its own.
BLANKS: dict[str, Any] = CHOICE | {
    "doc_to_text": "gold",
    "doc_to_choice": "{{openings}}",
    "doc_to_target": "{{question}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}

Write = Callable[..., str]
Engines = Callable[..., GenerationEngine]


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer that adds `<s>` by itself, so that lm-eval's own model class adds it, too."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    copied = PreTrainedTokenizerFast(
        tokenizer_object=type(tiny_tokenizer.backend_tokenizer).from_str(tiny_tokenizer.backend_tokenizer.to_str()),
        **{f"{name}_token": getattr(tiny_tokenizer, f"{name}_token") for name in ("pad", "bos", "eos", "unk")},
    )
    copied.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return copied


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("mixtral", seed=12)


@pytest.fixture
def engine_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Engines:
    return lambda batch_tokens=4096, **more: GenerationEngine(
        model, tokenizer, EngineConfig(batch_tokens=batch_tokens, **more)
    )


def documents(count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def text(most: int) -> str:
        return " ".join(f"w{token}" for token in rng.integers(4, 97, size=int(rng.integers(1, most))))

    return [
        {
            "question": text(9),
            "options": [text(4) for _ in range(3)],
            "openings": [text(6) for _ in range(2)],
            "gold": int(rng.integers(2)),
            "made": text(3),
        }
        for _ in range(count)
    ]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write an lm-eval task with local documents, and return its name; keyword arguments change keys of its YAML."""

    def make(
        kind: str = "choice", stem: str = "mine", counts: tuple[int, int, int] = (8, 10, TESTED), **changes: Any
    ) -> str:
        sources = dict(zip(("training", "validation", "test"), counts, strict=True))
        for seed, (source, count) in enumerate(sources.items()):
            lines = [json.dumps(document) + "\n" for document in documents(count, seed)]
            (tmp_path / f"{source}.jsonl").write_text("".join(lines))
        task = {
            "task": "mine",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {source: f"{source}.jsonl" for source in sources if sources[source]}},
            **{f"{source}_split": source for source in sources if sources[source]},
            **(BLANKS if kind == "blanks" else KINDS[kind]),
            **changes,
        }
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(task))
        load_harness.cache_clear()
        return f"lm_eval:{tmp_path}/mine.yaml"

    return make


def by_lm_eval(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, name: str) -> list[dict[str, Any]]:
    """Samples of a task from lm-eval's own model class."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    path = name.removeprefix("lm_eval:")
    config = yaml.safe_load(Path(path).read_text())
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"]["data_files"] = {key: str(Path(path).parent / file) for key, file in files.items()}
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
    with pytest.MonkeyPatch.context() as patch:  # it would describe the machine, by programs that take a second
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _: None)
        found = lm_eval.simple_evaluate(
            model=theirs,
            tasks=[config],
            task_manager=TaskManager(include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    return found["samples"][config["task"]]


METRICS = {
    "choice": ["acc", "acc_norm", "exact_match"],
    "likely": ["acc"],
    "blanks": ["acc"],
    "written": ["exact_match,whole", "exact_match,last"],
}


@pytest.mark.parametrize("kind", METRICS)
def test_outcomes_are_lm_evals_own(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, engine_of: Engines, write: Write, kind: str
) -> None:
    name = write(kind)
    if kind in ("likely", "written"):  # let some answers be right: what the model makes of its prompts
        answer_some(Path(name.removeprefix("lm_eval:")).parent, engine_of(), kind)
    theirs = sorted(by_lm_eval(model, tokenizer, name), key=lambda sample: sample["doc_id"])
    for asked in METRICS[kind]:
        metric, _, filtered = asked.partition(",")
        expected = [float(sample[metric]) for sample in theirs if sample["filter"] == (filtered or "none")]
        split = prepare_split(load_task(f"{name}#{asked}"), "test")
        assert (split.fitness, split.task, len(split.examples)) == ("lm_eval", f"lm_eval:mine#{asked}", TESTED)
        for batch_tokens in (1, 60) if asked == METRICS[kind][0] else (4096,):
            result = run_split(engine_of(batch_tokens), split)
            assert result.outcomes.tolist() == expected
            assert result.score == pytest.approx(np.mean(expected))
            assert result.gold_logprob < 0
        if asked != "exact_match":
            assert 0 < result.score < 1, "nothing is compared otherwise"


def answer_some(folder: Path, engine: GenerationEngine, kind: str) -> None:
    """Make the greedy answers of every second test document correct."""
    from moevolve.evaluators.types import Example, Matching

    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    examples = tuple(Example(row["question"], ()) for row in rows)
    length = 2 if kind == "likely" else 5
    split = PreparedSplit("t", "test", "generate", "mean", Matching("exact", ()), length, " ", examples)
    made = engine.generate(split, lambda *_: False).texts
    for i, (row, text) in enumerate(zip(rows, made, strict=True)):
        if i % 2 and text.strip():
            row["options"][0] = text.strip()
            row["made"] = text.split("w7")[0].split(" w9")[0] if i % 4 == 1 else text.split()[-1]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load_harness.cache_clear()


def test_gold_logprobs_are_of_right_answers_per_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, engine_of: Engines, write: Write
) -> None:
    split = prepare_split(load_task(write("choice")), "test")
    expected = []
    for document in documents(TESTED, 2):
        prompt = tokenizer(document["question"])["input_ids"]
        answer = tokenizer(document["options"][document["gold"]], add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logs = model(torch.tensor([[*prompt, *answer]])).logits[0].double().log_softmax(dim=-1)
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        expected.append(np.mean([float(logs[place, token]) for place, token in zip(places, answer, strict=True)]))
    _, gold = engine_of(60).judged(split)
    np.testing.assert_allclose(gold, expected, atol=2e-5)


def test_other_kinds_of_fitness_read_the_same_documents(engine_of: Engines, write: Write) -> None:
    name = write("choice")
    own = prepare_split(load_task(name), "dev")
    for fitness in ("rank", "perplexity", "kl", "agreement"):
        split = prepare_split(load_task(f"{name}@{fitness}"), "dev")
        assert (split.task, split.examples, split.harness) == (f"lm_eval:mine@{fitness}", own.examples, None)
        engine = engine_of()
        if fitness in ("kl", "agreement"):
            engine.remember(split)
        assert 0 < run_split(engine, split).score <= 1
    assert prepare_split(load_task(f"{name}@agreement"), "dev").positions == "answer"
    with pytest.raises(UserError, match="judged by it"):
        load_task(f"{name}@generate")


def test_a_worker_needs_no_data_but_the_same_task(engine_of: Engines, write: Write, tmp_path: Path) -> None:
    split = prepare_split(load_task(write("choice")), "search")
    for path in tmp_path.glob("*.jsonl"):
        path.unlink()
    load_harness.cache_clear()
    assert 0 <= run_split(engine_of(), split).score <= 1
    assert split.harness is not None
    with pytest.raises(UserError, match=r"lm-eval is .* on this worker, but 0\.1 on the driver"):
        engine_of().judged(replace(split, harness=replace(split.harness, version="0.1")))
    path = tmp_path / "mine.yaml"
    path.write_text(path.read_text() + "description: other\n")
    with pytest.raises(UserError, match="isn't the same file as on the driver"):
        engine_of().judged(split)
    path.unlink()
    with pytest.raises(UserError, match="this worker has no such file"):
        engine_of().judged(split)


def test_continuations_beyond_the_context_are_refused(
    tiny_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast, write: Write
) -> None:
    engine = GenerationEngine(tiny_model("mixtral", max_position_embeddings=2), tokenizer, EngineConfig())
    with pytest.raises(UserError, match="leave no room for a prompt in the model's context of 2"):
        engine.judged(prepare_split(load_task(write("choice")), "test"))
