"""The guard: what it calls a loop, JSON or a call, and which candidates it names."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from known_experts import ENDS, GERMAN, SPARE, TOOLS, known_split, save_known_model, without

from moevolve.evaluators.fitness.base import SHORT_ANSWER
from moevolve.evaluators.types import Example
from moevolve.search.loop.scores import Score
from moevolve.search.shrink import guard
from moevolve.search.shrink.findings import TaskCheck, advice
from moevolve.search.shrink.guard import (
    Probe,
    check_edit,
    checks_table,
    faults_of,
    general_set,
    structure_of,
)
from moevolve.search.shrink.loops import Loops, counted
from moevolve.search.shrink.record import Checks
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.worker import EvaluationWorker

HOUR = 3600.0
SMALL = 1
"""Bytes of a candidate that fits everywhere."""
GOOD = TaskCheck("chats", 16, 0, 1, structured=16, broken=1, agreement=0.8, perplexity=1.6, recovery=0.9)
LOOPS = Loops(16, 512, full=0, shrunk=1, low=-0.1, high=0.2, p=0.5)


@pytest.mark.parametrize(
    ("answer", "structure"),
    [
        ('{"a": 1}', "json"),
        ('Here it is:\n```json\n["red", "green"]\n```', "json"),
        ('<tool_call>\n{"name": "weather", "arguments": {"place": 7}}\n</tool_call>', "call"),
        ('[{"name": "weather", "parameters": {}}]', "call"),
        ('{"name": "Mara", "age": 31}', "json"),
        ('{"name": "weather", "arguments": {"place": ', None),
        ("[TOOL_CALLS] [see below", None),
        ("<tool_call>\n<function=weather>\n<parameter=place>\nLyon\n</parameter>\n</function>\n</tool_call>", "call"),
        ("<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Lyon</arg_value>\n</tool_call>", "call"),
        ("<tool_call>now\n</tool_call>", "call"),
        ('<minimax:tool_call>\n<invoke name="weather">\n<parameter name="a">b</parameter>\n</invoke>', "call"),
        (
            '<｜DSML｜invoke name="now">\n<｜DSML｜parameter name="a">b</｜DSML｜parameter>\n</｜DSML｜invoke>',
            "call",
        ),
        ('<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>', "call"),
        ('<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', "call"),
        ("<tool_call>\n<function=weather>\n<parameter=place>\nLyon", None),
        ('<think>\nPerhaps {"a": 1}?\n</think>\n\nIt rains.', None),
        ('<think>\nNo brace.\n</think>\n\n{"a": 1}', "json"),
        ("a set {} of nothing", None),
        ("no braces at all", None),
    ],
)
def test_json_and_calls_are_found_in_an_answer(answer: str, structure: str | None) -> None:
    assert structure_of(answer) == structure


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ('{"a": 1}', "json"),
        ('```json\n["red"]\n```', "json"),
        ('Let me look. <tool_call>{"name": "weather", "arguments": {"place": 7}}</tool_call>', "call"),
        ('<think>No brace.</think>\n{"a": 1}', "json"),
        ("It is in [1].", None),
        ("def first(row):\n    return row[0] or [1, 2]", None),
        ("[see below", None),
    ],
)
def test_an_expected_answer_is_json_only_as_a_whole(reference: str, expected: str | None) -> None:
    assert guard.expected_of(Example("asked", (reference,))) == expected
    assert guard.expected_of(Example("asked", ())) is None


def test_every_loss_is_named_and_a_good_candidate_passes() -> None:
    assert faults_of(GOOD) == ()
    assert faults_of(replace(GOOD, structured=0, broken=0, recovery=None)) == ()
    assert faults_of(replace(GOOD, prompts=6, structured=6)) == (), "a single answer of few is no fault"
    assert len(faults_of(replace(GOOD, prompts=6, structured=6, broken=2))) == 1
    assert faults_of(replace(GOOD, broken=8, loops_full=None)) == (), "the full model may not have answered so either"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"broken": 5}, "lost 5 of the full model's 16 answers with JSON or tool calls"),
        ({"perplexity": 8.25}, "has 8.2 times the full model's perplexity, more than 3 times"),
        ({"perplexity": None}, "far more than the full model's perplexity"),
        ({"recovery": 0.2}, "keeps 20 % of the full model's score, less than 50%"),
        ({"recovery": 0.4, "scale": "perplexity"}, "has 2.50 times the full model's perplexity on `test`, more than 2"),
        ({"broken": 9, "loops_full": None}, "lost 9 of 16 expected answers with JSON or tool calls"),
    ]
    for loss, said in wrong:
        bad = replace(GOOD, **loss)
        (fault,) = faults_of(bad)
        assert said in fault
        assert faults_of(replace(bad, known=False)) == (), "what the full model doesn't know can't be lost"
    graded = replace(GOOD, perplexity=13.5, graded=True)
    assert faults_of(graded) == (), "its score says what it lost, and of more rows"
    assert faults_of(replace(graded, recovery=0.4)) and faults_of(replace(graded, perplexity=None))
    (said,) = faults_of(replace(GOOD, recovery=None, unscored="out of memory"))
    assert said == "can't be compared with the full model on `test`: out of memory"
    lost = replace(GOOD, task="general german", general=True, faults=("has 8.2 times",))
    assert advice([GOOD, replace(lost, faults=())]) == [], "the first is no text that the data lacks"
    (said,) = advice([GOOD, lost])
    assert "general german: the data has no such text" in said and "--data FILE" in said
    table = checks_table(Checks("s:1", HOUR, (GOOD,), LOOPS))
    assert "| chats | 16 | 1 (full model 0) | 1 of 16 | 80.0 % | 1.60x | 90.0 % |" in table
    alone = checks_table(Checks("s:1", HOUR, (replace(GOOD, loops_full=None),), counted([False] * 15 + [True], 512)))
    assert "| chats | 16 | 1 | 1 of 16 | 80.0 % |" in alone and "The full model did not answer" in alone
    nothing = checks_table(Checks("s:1", HOUR, (replace(GOOD, prompts=0, loops_full=None),), None))
    assert "| chats | 0 | - | 1 of 16 |" in nothing and "loops, broken JSON and lost calls are unknown" in nothing


def test_a_winner_without_a_score_on_test_is_a_fault() -> None:
    def model(failure: str | None, score: float = 0.5) -> Any:
        found = Score("chats", "test", None if failure else score, failure=failure)
        return SimpleNamespace(score=lambda task, split: found if (task, split) == ("chats", "test") else None)

    def why(best: str | None, full: str | None, task: str = "chats") -> str | None:
        table: Any = SimpleNamespace(best=model(best), full=model(full))
        return guard.recovery_of(table, task)[1]

    assert why("out of memory", None) == why("out of memory", "lost") == "out of memory"
    assert why(None, "lost") == "lost" and why(None, None) is None
    assert why("out of memory", None, "texts") is None, "a task that isn't scored on test"
    nothing: Any = SimpleNamespace(best=model(None), full=model(None, score=0.0))
    assert guard.recovery_of(nothing, "chats") == (None, "the full model's own score is 0"), "any would be as much"


def test_a_task_that_names_its_fitness_is_compared_by_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    texts = replace(known_split("english"), window=64)

    def prepared(subject: Any, name: str, split: str) -> Any:
        asked.append(name)
        return replace(texts, fitness=name.partition("@")[2])

    monkeypatch.setattr(guard, "prepared_split", prepared)
    subject: Any = SimpleNamespace(config=SimpleNamespace(tasks=[SimpleNamespace(name="texts@perplexity")]))
    table: Any = SimpleNamespace(tasks=["texts"], best=None, full=None)
    (probe,) = guard._held_out(subject, table)
    assert asked == ["texts@perplexity", "texts@agreement"] and probe.split.fitness == "agreement"
    assert probe.split.window is None, "rows of a task that reads windows may be single lines"
    joined = "\n\n".join(each.prompt for each in probe.split.examples)
    assert joined == texts.running_text and all(len(each.prompt) >= 500 for each in probe.split.examples[:-1])


@pytest.fixture(autouse=True)
def _as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_PROMPTS", 530)


@pytest.fixture
def longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers in which a loop shows."""
    monkeypatch.setattr(guard, "_LONG", 32)
    monkeypatch.setattr(guard, "_SHORT", 32)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """The model whose experts are known."""
    folder = tmp_path_factory.mktemp("known")
    save_known_model(folder)
    return ModelConfig(str(folder), device="cpu")


@pytest.fixture(scope="module")
def worker(known: ModelConfig) -> EvaluationWorker:
    return EvaluationWorker(known, EngineConfig())


@pytest.fixture(scope="module")
def layered(known: ModelConfig) -> EvaluationWorker:
    """A worker whose experts stay on the disk, so that only a candidate answers."""
    return EvaluationWorker(replace(known, expert_offload="disk"), EngineConfig())


def faults(worker: EvaluationWorker, edit: Edit) -> dict[str, tuple[str, ...]]:
    """The faults of a candidate, by the domains that have some; loops are one of the domains with most of them."""
    probes = [Probe(known_split(name), TaskCheck(name)) for name in ("english", "german", "calls")]
    checks, loops = check_edit(worker, edit, probes, HOUR, SMALL)
    assert loops is not None and loops.prompts == 24 and sum(check.loops for check in checks) == loops.shrunk
    assert loops.full == (None if worker.resident.one_layer_at_a_time else 0)
    assert all((check.loops_full is None) == (loops.full is None) for check in checks)
    if loops.full == 0:
        assert [check.structured for check in checks] == [0, 0, 8]
    if isinstance(edit, IdentityEdit):
        assert all((check.agreement, check.perplexity) == pytest.approx((1, 1)) for check in checks)
    found = {check.task: each for check in checks if (each := faults_of(check))}
    if loops.fault is not None:
        found[max(checks, key=lambda check: check.loops).task] = (loops.fault,)
    return found


def test_answers_are_as_long_as_time_and_the_models_positions_allow(
    worker: EvaluationWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_LONG", 512)
    monkeypatch.setattr(guard, "_SHORT", 48)
    splits = [known_split(name) for name in ("english", "german")]
    assert worker.resident.model.config.max_position_embeddings < 512
    for positions, seconds, tokens in ((4096, 1e9, 512), (300, 1e9, 293), (4096, 0.0, 48), (20, 1e9, 48)):
        monkeypatch.setattr(worker.resident.model.config, "max_position_embeddings", positions)
        found = guard._affordable(worker, [IdentityEdit()], splits, seconds)
        assert found == (tokens, 16), "the longest prompt has a BOS and six words"
    (first, *others) = splits[0].examples
    long = replace(splits[0], examples=(replace(first, references=("word1 " * 600,)), *others))
    monkeypatch.setattr(worker.resident.model.config, "max_position_embeddings", 4096)
    monkeypatch.setattr(worker._engine, "_prompts", replace(worker._engine._prompts, context=4096))
    assert guard._affordable(worker, [IdentityEdit()], [long], 1e9) == (601, 8), "as long as the data's, and a BOS"


@pytest.mark.parametrize(
    ("affordable", "expected"),
    [
        (1e9, (512, 530)),
        (530 * 200, (200, 530)),
        (530 * 64, (128, 265)),  # a loop shows
        (16 * 100, (100, 16)),
        (16 * 20, (48, 16)),
    ],
)
def test_all_prompts_come_before_long_answers_and_these_before_all_prompts_where_loops_would_not_show(
    worker: EvaluationWorker, monkeypatch: pytest.MonkeyPatch, affordable: float, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(guard, "_LONG", 512)
    monkeypatch.setattr(guard, "_SHORT", 48)
    monkeypatch.setattr(worker.resident.model.config, "max_position_embeddings", 4096)
    monkeypatch.setattr(guard, "_asked", lambda _, edits, splits: ([()], 16 * 48.0))  # a second for a token
    split = known_split("english")
    many = replace(split, examples=split.examples * 100)
    assert guard._affordable(worker, [IdentityEdit()], [many], affordable) == expected


def test_a_candidate_is_made_as_seldom_as_both_models_can_take_turns(
    worker: EvaluationWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a repair: one for its scores and the length of answers, then one for all answers."""
    applied: list[str] = []
    apply = ResidentModel.apply

    def counted(model: ResidentModel, edit: Edit) -> None:
        if edit.phenotype_hash != model.applied.phenotype_hash:
            applied.append(edit.phenotype_hash)
        apply(model, edit)

    monkeypatch.setattr(ResidentModel, "apply", counted)
    worker.resident.revert()
    edit = without(SPARE, noise=0.1, seed=2)
    probes = [Probe(known_split(name), TaskCheck(name)) for name in ("english", "german", "calls")]
    check_edit(worker, edit, probes, HOUR, SMALL)
    assert applied.count(edit.phenotype_hash) == 2


def test_the_time_of_answers_is_counted_without_loading_and_repairing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: clock))

    class Slow:
        """A worker that takes a minute to change its model, and a second for every token of an answer."""

        here = "none"

        def has(self, edit: Edit) -> bool:
            return self.here == edit.phenotype_hash

        def answer(self, edit: Edit, *splits: Any) -> Any:
            nonlocal clock
            clock += 60.0 * (not self.has(edit)) + sum(len(each.examples) * each.max_new_tokens for each in splits)
            self.here = edit.phenotype_hash
            return self.here

    worker, edit, split = Slow(), without(SPARE), guard.free(known_split("english"), 5)
    rows = len(split.examples)
    both = [IdentityEdit().phenotype_hash, edit.phenotype_hash]
    for _ in range(2):
        assert guard._asked(worker, [IdentityEdit(), edit], [split]) == (both, 2 * 5.0 * rows)  # type: ignore[arg-type]
    assert clock == 3 * (60.0 + SHORT_ANSWER + 1) + 4 * 5.0 * rows


@pytest.mark.usefixtures("longer")
def test_an_untouched_model_and_a_good_candidate_pass(worker: EvaluationWorker, layered: EvaluationWorker) -> None:
    assert faults(worker, IdentityEdit()) == {}
    assert faults(worker, without(SPARE, noise=0.1, seed=2)) == faults(layered, without(SPARE, noise=0.1, seed=2)) == {}


@pytest.mark.parametrize(
    ("expert", "domain", "said", "alone"),
    [
        (
            ENDS,
            "english",
            "repeats itself in 8 of 24 answers, the full model in 0 (p = 0.0039)",
            "repeats itself in 8 of 24 answers, more than 5% (p = 1.4e-05)",
        ),
        (GERMAN, "german", "times the full model's perplexity", "times the full model's perplexity"),
        (
            TOOLS,
            "calls",
            "lost 8 of the full model's 8 answers with JSON or tool calls",
            "lost 8 of 8 expected answers with JSON or tool calls",
        ),
    ],
)
@pytest.mark.usefixtures("longer")
def test_the_domain_of_a_lost_expert_is_named(
    worker: EvaluationWorker, layered: EvaluationWorker, expert: int, domain: str, said: str, alone: str
) -> None:
    for each, sentence in ((worker, said), (layered, alone)):
        found = faults(each, without(expert))
        assert list(found) == [domain]
        (fault,) = found[domain]
        assert sentence in fault


def test_a_candidate_that_does_not_fit_on_the_device_answers_nothing(layered: EvaluationWorker) -> None:
    probes = [Probe(known_split(name), TaskCheck(name)) for name in ("german", "calls")]
    checks, loops = check_edit(layered, without(SPARE), probes, HOUR, 1 << 60)
    assert loops is None and [(check.prompts, check.structured) for check in checks] == [(0, 0)] * 2
    assert all(check.perplexity == pytest.approx(1) for check in checks), "texts are compared layer by layer"


@pytest.mark.usefixtures("longer")
def test_code_that_is_continued_has_no_answers_to_lose(worker: EvaluationWorker) -> None:
    """A list in it would pass for JSON."""
    continued = Probe(replace(known_split("calls"), positions="text"), TaskCheck("calls"))
    (check,), _ = check_edit(worker, IdentityEdit(), [continued], HOUR, SMALL)
    assert (check.prompts, check.structured) == (8, 0)


def test_the_general_set_has_five_domains_with_answers() -> None:
    domains = {probe.check.task.removeprefix("general "): probe.split for probe in general_set()}
    assert list(domains) == ["questions", "code", "json", "german", "spanish"]
    for name, split in domains.items():
        assert len(split.examples) == 6 and all(example.references[0] for example in split.examples)
        found = {structure_of(example.references[0]) for example in split.examples}
        assert found == {"json"} if name == "json" else "call" not in found
    assert len({split.fingerprint for split in domains.values()}) == 5
