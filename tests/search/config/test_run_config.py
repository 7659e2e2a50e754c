"""Configurations: what is refused and how the message reads, overrides, hashes, and the stored form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.config import Source
from moevolve.evaluators.tasks.datasets import Table, load_table
from moevolve.evaluators.types import SPLITS
from moevolve.search.config.files import apply_override, load_run_config, parse_run_config, parse_stored_config
from moevolve.search.config.run import RunConfig, TaskSection
from moevolve.search.genomes.contract.phases import MergePhase
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.registry import KINDS
from moevolve.store.errors import DamagedError
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.methods.repair.edit import RepairSettings

PLAIN: dict[str, Any] = {
    "name": "rte-4",
    "model": {"path": "some/model"},
    "tasks": ["rte"],
    "genome": {"experts": 4},
    "phases": [{"kind": "prune", "evaluations": 40}, {"kind": "merge", "evaluations": 160}],
}

PRUNING: dict[str, Any] = {"kind": "prune", "evaluations": 8, "initial": 4}
MENDING: dict[str, Any] = {"kind": "repair", "evaluations": 8}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(PLAIN | changes))
    return path


def message_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_run_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("windows: unknown key (did you mean `window`?)", {"windows": 4}),
    ("genome.expert: unknown key (did you mean `experts`?)", {"genome": {"expert": 2}}),
    ("tasks: expected a list, for example [a, b]", {"tasks": "rte"}),
    ("genome: moe is unknown; there are eep, factorllm, tomoe, nanomoe", {"genome": {"kind": "moe"}}),
    ("genome: active 4 is more than the 2 kept experts", {"genome": {"experts": 2, "active": 4}}),
    ("phases.0: initial 31 is more than evaluations 3", {"phases": [{"kind": "prune", "evaluations": 3}]}),
    ("phases.0.repair: expected a mapping of settings", {"phases": [PRUNING | {"repair": "yes please"}]}),
    ("'auto'", {"workers": {"count": "many"}}),
    # Of these, the place is enough.
    ("model: expert_offload", {"model": {"path": "m", "expert_offload": "host", "device_map": "auto"}}),
    ("tasks: a task is named twice", {"tasks": ["rte", "rte"]}),
    ("task_aggregation: ", {"tasks": ["boolq", {"name": "rte", "weight": 2}], "task_aggregation": "worst"}),
    ("phases: a prune phase", {"phases": PLAIN["phases"][::-1]}),
    ("phases.1: crossover_rate: a repair phase has only", {"phases": [PRUNING, MENDING | {"crossover_rate": 1}]}),
    (
        "phases: all repairs of a search",
        {"phases": [PRUNING | {"repair": True}, MENDING | {"repair": {"continuations": 2}}]},
    ),
    ("phases.0.repair.ridge_lambdas: ", {"phases": [PRUNING | {"repair": {"ridge_lambdas": []}}]}),
    ("strategy: nevergrad: is unknown; there are evolution, ", {"strategy": "nevergrad:"}),
    ("phases.0.strategy: grid is unknown", {"phases": [PRUNING | {"strategy": "grid"}]}),
    ("workers: `count`", {"workers": {"count": True}}),
    ("engine.threads", {"name": "huge", "engine": {"threads": "9" * 4000}}),
    ("genome.naee_subsets", {"name": "huge", "genome": {"experts": 2, "naee_subsets": 10**18}}),
]


def test_what_is_wrong_is_named_in_one_line(tmp_path: Path) -> None:
    for finding, changes in REFUSED:
        path = written(tmp_path, **changes)
        message = message_of(path)
        assert message.startswith(f"{path}: ") and finding in message and len(message) < 5000


def test_files_that_hold_no_configuration(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert message_of(missing) == f"{missing}: no such file"
    assert message_of(tmp_path).startswith(f"{tmp_path}: Is a directory; ")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [unclosed\nmodel: {")
    assert message_of(broken) == f"{broken}:2: expected ',' or ']', but got ':'"
    broken.write_text("name: rte-4\nmodel: {path: a}\nwindow: 4\nwindow: 8\n")
    assert message_of(broken) == f"{broken}:4: key `window` given twice"
    broken.write_bytes(b"name: \xff\xfe\x00")
    assert message_of(broken).startswith(f"{broken}:1: not UTF-8 text")
    broken.write_text("- a\n- b\n")
    assert message_of(broken) == f"{broken}: expected a mapping of keys to values at the top"


def test_overrides_replace_add_and_reach_into_lists(tmp_path: Path) -> None:
    config = load_run_config(
        written(tmp_path, tasks=[{"name": "rte"}]),
        (
            "genome.experts=6",
            "phases.1.sigma=0.2",
            "tasks.0.counts.search=16",
            "workers.count=3",
            "genome.groups=per_layer",
            "store=postgresql://u@h/db?a=b",
            "model={path: 'a=b'}",
            "name=other",
            "window=2",
            "window=9",
        ),
    )
    assert config.genome.experts == 6 and config.genome.groups == "per_layer"
    assert isinstance(config.phases[1], MergePhase) and config.phases[1].sigma == 0.2
    assert config.tasks[0].counts == {"search": 16}
    assert (config.workers.count, config.model.path, config.name) == (3, "a=b", "other")
    assert config.store == "postgresql://u@h/db?a=b"
    assert config.window == 9, "the last one wins"


def test_bad_overrides_are_named(tmp_path: Path) -> None:
    for override, finding in {
        "genome.experts": "expected KEY=VALUE",
        "=4": "expected KEY=VALUE",
        "genome..experts=4": "expected KEY=VALUE",
        "phases.7.sigma=1": "phases has no entry '7' (0 to 1)",
        "phases.last.sigma=1": "phases has no entry 'last' (0 to 1)",
        "name.first=x": "name is a plain value, it has no 'first'",
        "genome.experts=[4": "value is not valid YAML",
    }.items():
        message = message_of(written(tmp_path), override)
        assert message.startswith(f"--set {override}: ") and finding in message


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    config = load_run_config(written(folder, model={"path": "../model"}, tasks=["./pick.yaml", "rte"]))
    # A path that begins with a dot is the YAML's business.
    assert config.tasks[0].name == str(folder / "pick.yaml")
    assert config.model.path == str(tmp_path / "model")
    assert config.tasks[1].name == "rte", "a packaged task keeps its name"
    (tmp_path / "near.yaml").touch()
    other = load_run_config(written(folder, tasks=["./pick.yaml@kl", "near.yaml@kl", "rte@kl"]))
    assert [task.name for task in other.tasks] == [f"{folder}/pick.yaml@kl", f"{tmp_path}/near.yaml@kl", "rte@kl"]
    assert load_run_config(written(folder, model={"path": "here"})).model.path == str(tmp_path / "here")
    assert load_run_config(written(folder, model={"path": "org/hub-id"})).model.path == "org/hub-id"


HASHED: dict[str, Any] = {
    "seed": 5,
    "window": 3,
    "genome.experts": 3,
    "genome.router_space": "logits",
    "phases.0.replace_rate": 0.3,
    "phases.0.init": ["reap"],
    "strategy": "surrogate",
    "tasks.0.weight": 2.0,
    "tasks.0.counts": {"search": 8},
    "engine.batch_tokens": 64,
    "model.dtype": "bfloat16",
}
NOT_HASHED: dict[str, Any] = {
    "name": "another",
    "store": "sqlite:///other.db",
    "workers": {"count": 8, "timeout_s": 5},
    "final": {"rerank": 0, "test": False},
}


def test_the_hash_covers_what_determines_the_population() -> None:
    data = PLAIN | {"tasks": [{"name": "rte"}]}
    plain = RunConfig.model_validate(data).config_hash
    for field, value in (HASHED | NOT_HASHED).items():
        changed = deepcopy(data)
        apply_override(changed, f"{field}={json.dumps(value)}")
        assert (RunConfig.model_validate(changed).config_hash == plain) == (field in NOT_HASHED), field
    written_out = data | {"seed": 0, "window": 8, "engine": {"threads": 1}}
    assert RunConfig.model_validate(written_out).config_hash == plain, "these are defaults"


def test_the_hash_is_the_same_from_another_folder() -> None:
    def hashed(model: str, task: str) -> str:
        data = PLAIN | {"model": {"path": model}, "tasks": [{"name": task}]}
        return RunConfig.model_validate(data).config_hash

    first = hashed("/home/me/model", "/home/me/tasks/pick.yaml@rank")
    assert first == hashed("/srv/model", "/srv/pick.yaml@rank")
    others = [
        ("/srv/other", "/srv/pick.yaml@rank"),
        ("/srv/model", "/srv/pick.yaml"),
        ("me/model", "/srv/pick.yaml@rank"),
    ]
    assert first not in {hashed(model, task) for model, task in others}
    harness = [hashed("m", f"lm_eval:/{folder}/own.yaml#acc") for folder in "ab"]
    assert harness[0] == harness[1] != hashed("m", "lm_eval:own.yaml#acc2")


def test_a_stored_configuration_is_without_the_password_of_its_store(tmp_path: Path) -> None:
    config = load_run_config(written(tmp_path, store="postgresql://me:secret@host/db"))
    assert "secret" in config.store and "secret" not in config.canonical_json()
    back = parse_stored_config(config.canonical_json(), config.name)
    assert back.store == "postgresql://me:***@host/db"
    assert back.config_hash == config.config_hash


def test_an_imports_configuration_comes_back_without_phases() -> None:
    config = RunConfig.imported("i", ModelConfig(path="m"), EepSection(experts=2), EngineConfig())
    back = parse_stored_config(config.canonical_json(), config.name)
    assert back == config and back.is_imported
    with pytest.raises(UserError, match=r"^run: tasks: expected 1 or more entries; phases: expected 1"):
        parse_run_config(json.loads(config.canonical_json()), "run")


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_is_stored_with_all_its_defaults(kind: str) -> None:
    """So that another default in the code changes nothing of what an old search resumes as."""
    genome = {"kind": kind, "experts": 4, "active": 2, "rank": 8}
    known = {
        name: value for name, value in genome.items() if name == "kind" or name in KINDS[kind].section.model_fields
    }
    phases = PLAIN["phases"] if kind == "eep" else [{"kind": "tune", "evaluations": 40}]
    config = RunConfig.model_validate(PLAIN | {"tasks": [{"name": "rte"}], "genome": known, "phases": phases})
    text, hashed = config.canonical_json(), config.config_hash
    stored = json.loads(text)
    assert stored["genome"].keys() == KINDS[kind].section.model_fields.keys()
    for section, model in (("engine", EngineConfig), ("model", ModelConfig)):
        assert list(stored[section]) == sorted(field.name for field in fields(model))
    for phase, model in zip(stored["phases"], config.phases, strict=True):
        assert phase.keys() == type(model).model_fields.keys()
    assert stored.keys() == RunConfig.model_fields.keys()
    back = parse_stored_config(text, "lab")
    assert back == config and back.config_hash == hashed and back.canonical_json() == text


def test_a_stored_configuration_of_another_version_is_refused_in_one_line() -> None:
    text = RunConfig.model_validate(PLAIN | {"tasks": [{"name": "rte"}]}).canonical_json()
    refused = r"^stored configuration of search rte-4: "
    with pytest.raises(UserError, match=refused + r"quantum: unknown key$"):
        parse_stored_config(json.dumps(json.loads(text) | {"quantum": True}), "lab")
    for section, setting in (("engine", "threads"), ("genome", "router_space"), (None, "window")):
        data = json.loads(text)
        del (data[section] if section else data)[setting]
        with pytest.raises(UserError, match=refused + "settings are missing"):
            parse_stored_config(json.dumps(data), "lab")
    for damaged in ("{", "7", "[1]"):
        with pytest.raises(DamagedError, match="the configuration of search lab can't be read: it is damaged"):
            parse_stored_config(damaged, "lab")


SPELT = {"ridge_lambdas": [0.5], "neurons": True}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, RepairSettings()),
        (False, None),
        (SPELT, RepairSettings((0.5,), neurons=True)),
    ],
)
def test_a_repair_is_yes_or_no_or_how(value: Any, expected: RepairSettings | None, tmp_path: Path) -> None:
    phases = [PRUNING | {"repair": value}, {"kind": "merge", "evaluations": 3, "repair": value}, MENDING]
    config = load_run_config(written(tmp_path, phases=phases))
    assert [phase.repair for phase in config.phases] == [expected, expected, RepairSettings()]
    back = parse_stored_config(config.canonical_json(), config.name)
    assert back == config and back.config_hash == config.config_hash
    plain = load_run_config(written(tmp_path, phases=[PRUNING, {"kind": "merge", "evaluations": 3}, MENDING]))
    assert (plain.config_hash == config.config_hash) == (expected is None)


def numbers(where: str, schema: Any) -> Iterator[tuple[str, set[str]]]:
    """Every number in a JSON schema, with the keywords that describe it."""
    if isinstance(schema, list):
        schema = dict(enumerate(schema))
    if not isinstance(schema, dict):
        return
    if schema.get("type") in ("integer", "number"):
        yield where, set(schema)
    for key, value in schema.items():
        yield from numbers(f"{where}/{key}", value)


def test_every_number_has_bounds() -> None:
    below, above = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
    for section in (RunConfig, *(kind.section for kind in KINDS.values())):
        found = dict(numbers(section.__name__, section.model_json_schema()))
        assert found
        assert not [where for where, keywords in found.items() if not (keywords & below and keywords & above)]


def test_a_tasks_data_are_read_once_for_all_of_its_splits(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the counts of all splits, whichever is prepared, so that one alone has the rows that it has with others."""
    section = TaskSection(name=str(tiny.task), counts={"search": 9, "dev": 7})
    alone = {split: section.prepared(split, calibrating=True) for split in SPLITS}
    read: list[str] = []

    def counted(source: Source, split: str) -> Table:
        read.append(split)
        return load_table(source, split)

    monkeypatch.setattr("moevolve.evaluators.preparation.prepare.load_table", counted)
    assert section.prepared_splits(SPLITS, calibrating=True) == alone
    assert sorted(read) == ["all", "prompts"]
    assert [len(alone[split].examples) for split in SPLITS] == [63, 9, 7, 21]
    # `dev` begins at row 40, `test` at 60.
    with pytest.raises(UserError, match="is in both `dev` and `test`"):
        TaskSection(name=str(tiny.task), counts={"dev": 30}).prepared("search")
