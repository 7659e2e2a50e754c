"""Tasks of lm-evaluation-harness: splits, few-shot examples and errors, without a model."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.harness.files import find_yaml, portable_path, read_config, split_name
from moevolve.evaluators.harness.tasks import load_harness
from moevolve.evaluators.preparation.prepare import prepare_split, prepare_splits
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.types import SPLITS
from moevolve.evaluators.yaml_files import CODE_VARIABLE

pytest.importorskip("lm_eval")

TASK: dict[str, Any] = {
    "task": "small",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write `small.yaml` and its documents, `SOURCE.jsonl`; return its name for `load_task`."""

    def make(counts: dict[str, int] | None = None, **changes: Any) -> str:
        counts = {"training": 30, "validation": 20, "test": 9} if counts is None else counts
        for source, count in counts.items():
            rows = [{"question": f"{source} {i}", "options": ["yes", "no"], "gold": i % 2} for i in range(count)]
            (tmp_path / f"{source}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"dataset_kwargs": {"data_files": {source: f"{source}.jsonl" for source in counts}}}
        task = TASK | files | {f"{source}_split": source for source in counts} | changes
        (tmp_path / "small.yaml").write_text(yaml.safe_dump({k: v for k, v in task.items() if v is not None}))
        load_harness.cache_clear()
        return f"lm_eval:{tmp_path}/small.yaml"

    return make


def questions(name: str, shots: int = 0, counts: dict[str, int] | None = None) -> dict[str, list[str]]:
    """Split -> its documents' questions, or those of the few-shot examples (`shots` in all)."""
    found = {}
    for split, value in prepare_splits(load_task(name).with_counts(counts or {})).items():
        texts = [[line[3:] for line in e.prompt.split("\n") if line.startswith("Q: ")] for e in value.examples]
        assert all(len(text) == shots + 1 for text in texts)
        found[split] = [text[-1] for text in texts] if not shots else [shot for text in texts for shot in text[:-1]]
    return found


@pytest.mark.parametrize(
    ("counts", "sizes", "sources"),
    [
        ({"training": 30, "validation": 20, "test": 9}, (15, 10, 10, 9), ("validation", "test")),
        ({"training": 31, "test": 9}, (0, 16, 15, 9), ("training", "test")),
        ({"training": 30, "validation": 20}, (0, 15, 15, 20), ("training", "validation")),
        ({"validation": 20}, (0, 6, 6, 8), ("validation", "validation")),
        ({"training": 700, "test": 5}, (94, 256, 256, 5), ("training", "test")),
    ],
)
def test_splits_come_from_the_documents_and_share_none(
    write: Write, counts: dict[str, int], sizes: tuple[int, ...], sources: tuple[str, str]
) -> None:
    found = questions(name := write(counts))
    assert tuple(len(found.get(split, ())) for split in SPLITS) == sizes
    assert all(question.startswith("training ") for question in found.get("calibration", ()))
    every = [question for group in found.values() for question in group]
    assert len(set(every)) == len(every)
    for split, source in zip(("search", "dev", "test"), (sources[0], *sources), strict=True):
        assert all(question.startswith(f"{source} ") for question in found[split])
    assert found["search"] != sorted(found["search"]), "shuffled"
    if len(every) < 30:
        load_harness.cache_clear()
        assert questions(name) == found, "the same every time"


def test_documents_to_measure_on_ask_nothing_that_others_ask(write: Write, tmp_path: Path) -> None:
    name = write({"training": 40, "validation": 20, "test": 9}, num_fewshot=1)
    lines = (tmp_path / "training.jsonl").read_text().splitlines()
    lines[:9] = (tmp_path / "test.jsonl").read_text().splitlines()
    (tmp_path / "training.jsonl").write_text("\n".join(lines) + "\n")
    prepared = prepare_splits(load_task(name))
    asked = {split: [e.prompt.split("Q: ")[-1] for e in value.examples] for split, value in prepared.items()}
    assert 11 <= len(asked["calibration"]) < 20, "half of the training documents, less those of the test"
    assert all(question.startswith("training ") for question in asked["calibration"])
    assert prepared["calibration"].harness is None, "nothing is judged there"
    assert all(example.references for example in prepared["calibration"].examples)
    assert prepare_split(load_task(name), "calibration").fingerprint == prepared["calibration"].fingerprint


def test_documents_are_set_aside_of_a_task_without_others(write: Write) -> None:
    task = load_task(write({"validation": 24}))
    whole, prepared = prepare_splits(task), prepare_splits(task.with_calibration())
    search = prepared["search"]
    assert (*search.examples, *prepared["calibration"].examples) == whole["search"].examples
    assert search.harness is not None and len(search.harness.documents) == len(search.examples) == 6
    assert (prepared["dev"], prepared["test"]) == (whole["dev"], whole["test"])


def test_a_document_becomes_an_example(write: Write) -> None:
    task = load_task(write())
    split = prepare_split(task, "test")
    assert (task.name, split.task, split.fitness, split.metric) == ("lm_eval:small",) * 2 + ("lm_eval", "mean")
    example = split.examples[1]
    assert (example.prompt, example.references, example.choices) == ("Q: test 1\nA:", ("no",), ("yes", "no"))
    assert split.harness is not None
    assert json.loads(split.harness.documents[1]) == {"question": "test 1", "options": ["yes", "no"], "gold": 1}
    fewer = task.with_counts({"search": 3})
    assert len(prepare_split(fewer, "search").examples) == 3
    with pytest.raises(UserError, match="is in both `search` and `dev`"):
        prepare_split(task.with_counts({"search": 11}), "search")


def test_fewshot_examples_are_in_none_of_the_splits(write: Write) -> None:
    counts = {"training": 90, "test": 9}
    few = {"search": 20, "dev": 20}
    shots, asked = (questions(write(counts, num_fewshot=number), number, few) for number in (2, 0))
    used = {shot for group in shots.values() for shot in group}
    assert all(shot.startswith("training ") for shot in used)
    assert len(used) > 20, "documents have examples of their own"
    assert not used & {question for group in asked.values() for question in group}
    load_harness.cache_clear()
    with pytest.raises(UserError, match="2 few-shot examples are asked for, but only 0 documents"):
        prepare_split(load_task(write({"training": 30, "test": 9}, num_fewshot=2)), "test")
    apart = questions(write(num_fewshot=2, fewshot_split="training"), shots=2)
    assert all(shot.startswith("training ") for group in apart.values() for shot in group)


def test_the_fingerprint_knows_version_file_and_documents_but_no_folder(write: Write, tmp_path: Path) -> None:
    def fingerprint(**changes: Any) -> str:
        return prepare_split(load_task(write(**changes)), "test").fingerprint

    own = fingerprint()
    others = {
        fingerprint(description="D."),
        fingerprint(counts={"training": 30, "validation": 20, "test": 10}),
        fingerprint(metric_list=[{"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True}]),
    }
    assert len(others | {own}) == 4
    name = write()
    split = prepare_split(load_task(name), "test")
    assert split.harness is not None
    assert replace(split, harness=replace(split.harness, version="0")).fingerprint != own
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in (*tmp_path.glob("*.jsonl"), tmp_path / "small.yaml"):
        shutil.copy(path, elsewhere)
    assert prepare_split(load_task(f"lm_eval:{elsewhere}/small.yaml"), "test").fingerprint == own


def test_servers_import_no_functions_but_lm_evals_own(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path, ran = write(), tmp_path / "small.yaml", tmp_path / "ran"
    (tmp_path / "helpers.py").write_text(f"open({str(ran)!r}, 'w').close()\ndef text(document): return ''\n")
    monkeypatch.setenv(CODE_VARIABLE, "refuse")
    assert load_task(name).name == "lm_eval:small", "it has none"
    plain = path.read_text()
    for tag in ("!function", "!<!function>", "!%66unction"):
        (tmp_path / "base.yaml").write_text(f"doc_to_text: {tag} helpers.text\n")
        path.write_text(f"include: base.yaml\n{plain}")
        for named in (path, tmp_path / "base.yaml"):
            named.write_text(named.read_text().replace("task: small\n", "") + "task: small\n")
            load_harness.cache_clear()
            with pytest.raises(UserError, match=r"\.yaml: !function: servers don't run programs for others"):
                load_task(f"lm_eval:{named}")
    assert not ran.exists()
    monkeypatch.delenv(CODE_VARIABLE)
    load_task(f"lm_eval:{path}")
    assert ran.exists()
    monkeypatch.setenv(CODE_VARIABLE, "refuse")
    assert callable(read_config(find_yaml("copa"))["doc_to_text"])


def test_functions_beside_the_file_count(write: Write, tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("def text(doc):\n    return 'one ' + doc['question']\n")
    name = write()
    path = tmp_path / "small.yaml"
    plain = path.read_text()
    path.write_text(plain.replace("doc_to_text: 'Q: {{question}}\n\n  A:'", "doc_to_text: !function helpers.text"))
    assert "!function" in path.read_text()
    first = prepare_split(load_task(name), "test")
    assert first.examples[0].prompt == "one test 0"
    assert first.harness is not None
    assert '"function": "text"' in first.harness.config
    (tmp_path / "helpers.py").write_text("def text(doc):\n    return 'one '  + doc['question']\n")
    load_harness.cache_clear()
    second = prepare_split(load_task(name), "test")
    assert second.examples == first.examples
    assert second.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output_type": "loglikelihood_rolling", "metric_list": None}, "likelihood of whole texts"),
        ({"unsafe_code": True}, "runs code that the model writes"),
        ({"doc_to_image": "x"}, "images or sound"),
        ({"repeats": 3}, "samples several answers"),
        ({"generation_kwargs": {"temperature": 0.7}}, "sampling or beams"),
        ({"task": ["arc_easy"], "group": "g"}, "a group of tasks"),
        ({"metric_list": [{"metric": "mcc"}]}, "none of its metrics (mcc) is a mean over documents"),
        ({"metric_list": [{"metric": "acc", "aggregation": "mean", "hf_evaluate": True}]}, "none of its metrics"),
        ({"doc_to_text": "{{nothing}}"}, "lm-eval can't load it: 'nothing' is undefined"),
        ({"counts": {"validation": 2}}, "too few to be divided"),
    ],
)
def test_what_can_not_be_run_is_refused_in_one_line(write: Write, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_task(write(**changes))
    assert said in str(caught.value)
    assert str(caught.value).startswith("lm_eval:")
    assert "\n" not in str(caught.value)


def test_metrics_are_chosen_by_name(write: Write) -> None:
    metrics = [
        {"metric": "mcc", "aggregation": "matthews_corrcoef", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ]
    name = write(metric_list=metrics)
    assert "acc_norm of multiple_choice" in load_task(name).description
    other = load_task(f"{name}#acc@kl")
    assert (other.name, other.fitness) == ("lm_eval:small#acc@kl", "kl")
    with pytest.raises(UserError, match="`mcc` is no metric of it that is a mean over documents; acc_norm, acc are"):
        load_task(f"{name}#mcc")
    with pytest.raises(UserError, match="no filter `strict`; it has: none"):
        load_task(f"{name}#acc,strict")


def test_no_code_from_the_hub_is_asked_for(write: Write, tmp_path: Path) -> None:
    import evaluate

    files = {"data_files": {"test": "test.jsonl"}, "trust_remote_code": True}
    write(dataset_kwargs=files, training_split=None, validation_split=None)
    assert read_config(tmp_path / "small.yaml")["dataset_kwargs"] == {
        "data_files": {"test": str(tmp_path / "test.jsonl")}
    }
    assert evaluate.config.HF_EVALUATE_OFFLINE is True


def test_tasks_are_found_by_name(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert portable_path(find_yaml("arc_easy")) == "arc/arc_easy.yaml"
    assert split_name("lm_eval:a#b,c") == ("lm_eval:", "a", "#b,c")
    assert split_name("a.yaml") == ("", "a.yaml", "")
    write()
    assert load_task(f"lm_eval:{tmp_path}/small.yaml").name == "lm_eval:small"
    with pytest.raises(UserError, match=r"lm_eval:.*/nowhere\.yaml: no such file"):
        load_task(f"lm_eval:{tmp_path}/nowhere.yaml")
    load_harness.cache_clear()
    monkeypatch.setattr("moevolve.evaluators.harness.files.version", absent)
    with pytest.raises(UserError, match=r"pip install 'moevolve\[lm-eval\]'"):
        load_task(f"lm_eval:{tmp_path}/small.yaml")
