"""Answers of individuals beside their full model's: whole texts, what they are worth, and which rows are shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import moevolve
from moevolve.evaluators.errors import UserError
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import HarnessTask
from moevolve.search.cli.app import app
from moevolve.search.config.run import TaskSection
from moevolve.search.interface.answers import Answers
from moevolve.search.interface.checkpoints.export import CheckpointRequest
from moevolve.search.running.candidates import _section_of, find_candidate
from moevolve.store.repository import Store
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest
from moevolve.workers.worker import EvaluationWorker


@pytest.fixture(scope="module")
def found(all_kinds: str, tiny: Any) -> Answers:
    """All that three models write on the tiny search's `test` split."""
    return moevolve.answers(all_kinds, ["eep:0", "full", "eep:20"], task=f"{tiny.task}@generate", limit=None)


@pytest.mark.parametrize("threads", [None, 2])
def test_models_run_with_the_threads_of_their_search_unless_others_are_given(
    all_kinds: str, tiny: Any, monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    counts: list[int] = []
    stages: list[str] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)

    class Written(Exception):
        """Ends an export where it would write."""

    def write(*_: Any) -> None:
        raise Written

    monkeypatch.setattr(CheckpointRequest, "write", write)
    task, observer = f"{tiny.task}@generate", moevolve.Observer(on_stage=stages.append)
    moevolve.answers(all_kinds, ["eep:0"], task=task, limit=1, threads=threads, observer=observer)
    moevolve.evaluate(all_kinds, "eep:0", tasks=task, split="dev", threads=threads, observer=observer)
    with pytest.raises(Written):
        moevolve.export(all_kinds, "eep:0", "never", threads=threads, observer=observer)
    with Store.open(all_kinds) as store:
        own = find_candidate(store, "eep:0").config.engine.threads
    assert counts == [own if threads is None else threads] * 3
    for said in ("eep:0 answers 1 rows", "loading the model", "scoring ", "writing the checkpoint"):
        assert any(stage.startswith(said) for stage in stages)


def test_a_task_of_the_search_has_other_fitnesses_by_its_name_as_by_its_path(
    found: Answers, all_kinds: str, tiny: Any
) -> None:
    for name in (str(tiny.task), load_task(str(tiny.task)).name):
        section = TaskSection(name=str(tiny.task), counts={"test": 2})
        found_section = _section_of(SimpleNamespace(tasks=[section]), f"{name}@generate")  # type: ignore[arg-type]
        assert found_section == section.model_copy(update={"name": f"{tiny.task}@generate"}), "with its own rows"
    named = moevolve.answers(all_kinds, ["eep:0"], task=f"{load_task(str(tiny.task)).name}@generate", limit=None)
    assert [row.answers[1].text for row in named.rows] == [row.answers[1].text for row in found.rows]
    assert (named.task, named.fitness) == (found.task, "generate")


def test_outcomes_are_those_that_scoring_stores(found: Answers, all_kinds: str, tiny: Any) -> None:
    assert found.models == ("full", "eep:0", "eep:20")
    for place, name in enumerate(found.models):
        scored = moevolve.evaluate(all_kinds, name, tasks=f"{tiny.task}@generate", search="eep")
        (record,) = scored.models[0].records
        outcomes = np.frombuffer(record.outcomes or b"", dtype="<f4")
        assert [row.answers[place].outcome for row in found.rows] == outcomes.tolist()
        assert found.scores[place] == record.score
    assert found.examined == len(found.rows) and [row.row for row in found.rows] == list(range(found.examined))


def test_a_score_that_cannot_be_had_is_told_with_its_reason(
    all_kinds: str, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = str(tiny.task)

    def fail(worker: EvaluationWorker, request: EvaluationRequest, _: object) -> EvaluationReply:
        own = request.fingerprints if isinstance(request.edit, IdentityEdit) else ()
        return EvaluationReply(request.ticket, {}, "logits are not finite", 0.1, "w", failed_on=own)

    monkeypatch.setattr(EvaluationWorker, "evaluate", fail)
    ended = moevolve.evaluate(all_kinds, "full", tasks=task, split="dev", search="eep", overrides=["engine.threads=3"])
    (record,) = ended.models[0].records
    assert (record.score, record.failure) == (None, "logits are not finite")
    with pytest.raises(UserError, match=r"eep:0 can't be scored on .* \(test\): logits are not finite"):
        moevolve.evaluate(all_kinds, "eep:0", tasks=f"{task}@perplexity")


def test_texts_are_what_transformers_generates_to_the_end(found: Answers, tiny: Any) -> None:
    """Exact matching is settled at the first wrong word; the answers go on to their last token all the same."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.model)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny.model)
    for row in found.rows[:4]:
        ids = torch.tensor([[1, *tokenizer(row.prompt, add_special_tokens=False).input_ids]])
        whole = model.generate(
            ids, do_sample=False, max_new_tokens=load_task(str(tiny.task)).max_new_tokens, pad_token_id=0
        )
        text = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert row.answers[0].text == text.strip()


def test_only_the_rows_that_are_asked_for(found: Answers, all_kinds: str, tiny: Any) -> None:
    def kept(only: Any, limit: int | None = None) -> list[int]:
        some = moevolve.answers(all_kinds, ["eep:0", "eep:20"], task=f"{tiny.task}@generate", only=only, limit=limit)
        assert some.examined == found.examined and some.scores == found.scores
        return [row.row for row in some.rows]

    answers = [row.answers for row in found.rows]
    outcomes = np.array([[answer.outcome for answer in each] for each in answers])
    texts = [{answer.text for answer in each} for each in answers]
    wrong = np.flatnonzero((outcomes[:, 1:] < 1).any(axis=1)).tolist()
    assert kept("wrong", limit=2) == wrong[:2]
    assert kept("differing") == [row for row, said in enumerate(texts) if len(said) > 1]


def test_rows_by_number(found: Answers, all_kinds: str, tiny: Any) -> None:
    task = f"{tiny.task}@generate"
    some = moevolve.answers(all_kinds, ["eep:0", "eep:20"], task=task, rows=[5, 2, 5], limit=1)
    assert some.examined == 2 and some.rows == (found.rows[2], found.rows[5])
    few = moevolve.answers(all_kinds, ["eep:0"], task=task, limit=3)
    assert few.examined == 3, "without a condition no more rows are run than shown"
    assert [row.prompt for row in few.rows] == [row.prompt for row in found.rows[:3]]
    assert [row.answers for row in few.rows] == [row.answers[:2] for row in found.rows[:3]]
    beyond = found.examined
    with pytest.raises(UserError, match=f"has {beyond} rows, counted from 0; {beyond} isn't one"):
        moevolve.answers(all_kinds, ["eep:0"], task=task, rows=[0, beyond])


@pytest.mark.parametrize(("fitness", "logprobs"), [("rank", 4), ("agreement", 0)])
def test_other_fitnesses(all_kinds: str, tiny: Any, fitness: str, logprobs: int) -> None:
    """Ranked choices have their likelihoods; what only compares predictions has no text."""
    task = str(tiny.task) + ("@agreement" if fitness == "agreement" else "")
    one = moevolve.answers(all_kinds, ["eep:3"], task=task, limit=4)
    assert one.fitness == fitness
    for row in one.rows:
        for answer in row.answers:
            assert len(answer.logprobs) == logprobs
            assert answer.text == (row.choices[int(np.argmax(answer.logprobs))] if logprobs else None)
        assert fitness != "agreement" or row.answers[0].outcome == pytest.approx(1, abs=1e-6)


def test_the_command_prints_answers_and_ranked_choices(all_kinds: str, tiny: Any) -> None:
    for task in (f"{tiny.task}@generate", str(tiny.task)):
        done = CliRunner().invoke(app, ["answers", "eep:0", "--task", task, "--store", all_kinds, "--limit", "2"])
        assert done.exit_code == 0 and "eep:0" in done.output
    with pytest.raises(UserError, match="eep:0 and nanomoe:0 are of different models"):
        moevolve.answers(all_kinds, ["eep:0", "nanomoe:0"], task=str(tiny.task))


def test_the_first_rows_of_a_split_that_a_harness_judges(all_kinds: str) -> None:
    with Store.open(all_kinds) as store:
        section = cast("Any", find_candidate(store, "eep:0").config).tasks[0]
    split = section.prepared("test")
    count = len(split.examples)
    numbered = tuple(str(row) for row in range(count))
    judged = HarnessTask("", "", "", "", "", numbered, tuple((number,) for number in numbered))
    head = type(split)(**{**vars(split), "harness": judged}).head(2)
    assert head.harness is not None and head.harness.documents == ("0", "1")
    assert head.harness.contexts == (("0",), ("1",)) and head.examples == split.examples[:2]
    assert head.fingerprint != split.fingerprint


@pytest.mark.parametrize("ask", ["answers", "evaluate", "analyse"])
def test_an_unknown_task_is_refused_before_the_model_is_described(
    ask: str, all_kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moevolve.search.running.candidates.facts_for", lambda *_: pytest.fail("it takes seconds"))
    with pytest.raises(UserError, match="unknown task `boolk`; did you mean boolq"):
        getattr(moevolve, ask)(all_kinds, "eep:0", **{"tasks" if ask == "evaluate" else "task": "boolk"})
