"""Bad input: one line that names it, exit code 2, no traceback, and a store that is left alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands_here import refusal

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import load_run_config
from moevolve.search.running import launch as launching
from moevolve.search.running.launch import register, set_up_new
from moevolve.search.running.set_up import set_up
from moevolve.store.repository import Store

CONFIGS = Path(__file__).parents[3] / "configs"
LOW_RANK = {
    "genome": {"kind": "nanomoe", "variant": "low_rank", "rank": 2, "layers": "*.q_proj"},
    "phases": [{"kind": "tune", "evaluations": 4, "initial": 2}],
}


@pytest.fixture
def launch(tiny: Any, tmp_path: Path) -> Callable[..., str]:
    """Launch a changed tiny run that must be refused before the store exists."""

    def run(*arguments: str, **changes: Any) -> str:
        store = tmp_path / "store.db"
        path = tiny.write_run(tmp_path / "run.yaml", "bad", store=f"sqlite:///{store}", **changes)
        message = refusal("launch", path, *arguments)
        assert not store.exists()
        return message

    return run


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"colour": "red"}, ["run.yaml", "colour", "unknown key"]),
        ({"genome": {"kind": "eep", "experts": 5}}, ["genome.experts", "5", "4"]),
        ({"genome": {"kind": "eep", "experts": 2, "groups": 9}}, ["genome.groups", "9", "4"]),
        ({"tasks": ["boolk"]}, ["boolk", "boolq"]),
        ({"tasks": ["boolq@bleu"]}, ["boolq@bleu", "bleu", "perplexity, kl"]),
        ({"model": {"path": "/nowhere/model"}}, ["/nowhere/model"]),
        ({"model": {"path": str(CONFIGS / "demo" / "dense")}}, ["llama"]),
        ({"engine": {"chat_template": "chatty"}}, ["engine.chat_template", "chatty", "none, auto, mixtral"]),
        ({"phases": [{"kind": "tune", "evaluations": 9}]}, ["phases.0.kind: a tune phase", "use prune or merge"]),
        (LOW_RANK | {"strategy": "nevergrad:CMA"}, ["nevergrad:CMA", "no coordinates", "evolution"]),
    ],
)
def test_launch_names_what_is_wrong(launch: Callable[..., str], changes: dict[str, Any], named: list[str]) -> None:
    message = launch(**changes)
    for word in named:
        assert word in message


@pytest.mark.usefixtures("worker_here")
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_experts_per_tok": 9}, "in its config num_experts_per_tok is 9, but a layer has 4 experts; correct"),
        ({"num_attention_heads": 0}, "can't make a model from its config: integer division or modulo by zero"),
    ],
)
def test_a_model_that_no_library_opens_is_named_with_the_librarys_words(
    tiny: Any, in_process: Any, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    target = tmp_path / "model"
    shutil.copytree(tiny.model, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    store, model = f"sqlite:///{tmp_path / 'store.db'}", {"path": str(target), "device": "cpu"}
    refused = in_process("launch", tiny.write_run(tmp_path / "run.yaml", "bad", store=store, model=model))
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith(f"error: model {target}: ") and said in refused.stderr
    if "correct config.json" not in refused.stderr:
        log = Path(refused.stderr.rpartition("(traceback: ")[2].rstrip(")\n"))
        assert "Traceback" in log.read_text()


@pytest.mark.parametrize("changes", [{"tasks": ["boolk"]}, {"final": {"held_out": ["boolk"]}}])
def test_a_wrong_task_is_named_before_the_model_is_described(
    changes: dict[str, Any], tiny: Any, tmp_path: Path
) -> None:
    config = load_run_config(tiny.write_run(tmp_path / "run.yaml", "bad", **changes))
    with pytest.raises(UserError, match="unknown task `boolk`"):
        set_up(config, "bad-1", lambda *_: pytest.fail("torch would be imported"))


def test_a_name_is_text_whatever_yaml_would_read_in_it(launch: Callable[..., str]) -> None:
    assert "run.yaml: window: " in launch("--name", "2", "--set", "window=0")


def test_a_search_that_is_there_is_not_changed(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    path = tiny.write_run(tmp_path / "run.yaml", "again", store=url)
    settings = load_run_config(path)
    with Store.open(url) as store:
        register(set_up_new(settings), store)
    monkeypatch.setattr(launching, "set_up_new", None)  # the model isn't described for that
    assert "resume again" in refusal("launch", path)
    message = refusal("launch", path, "--or-resume", "--set", "seed=9")
    for words in ("--or-resume: search again", "other settings than", "--name", "`moevolve resume again`"):
        assert words in message
    for change in ("name=other", "seed=9"):
        message = refusal("resume", "again", "--store", url, "--set", change)
        assert "only `workers`, `final` and `loggers` may change" in message


def test_a_study_knows_before_it_runs_where_its_tables_cannot_go(tiny: Any, tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    base = {key: value for key, value in tiny.run_data("x", store=f"sqlite:///{store}").items() if key != "name"}
    path = tmp_path / "compare.yaml"
    path.write_text(yaml.safe_dump({"name": "sides", "base": base, "methods": {"search": {}}}))
    assert "can't be written; give the path of a file" in refusal("study", path, "-o", tmp_path)
    assert "the folder" in refusal("study", path, "-o", tmp_path / "none" / "table.md")
    assert "genome: unknown key" in refusal("study", path, "--set", "genome.experts=2")
    assert refusal("launch", path).endswith("run it with `moevolve study`")
    run = tiny.write_run(tmp_path / "run.yaml", "one", store=f"sqlite:///{store}")
    assert refusal("study", run).endswith("run it with `moevolve launch`")
    assert not store.exists()


def test_a_malformed_line_is_named_with_its_number(launch: Callable[..., str], tiny: Any, tmp_path: Path) -> None:
    lines = (tiny.folder / "pick.jsonl").read_text().splitlines()
    lines[6] = lines[6][:-3]
    (tmp_path / "pick.jsonl").write_text("\n".join(lines))
    (tmp_path / "pick.yaml").write_text(tiny.task.read_text())
    message = launch(tasks=[str(tmp_path / "pick.yaml")])
    assert "pick.jsonl" in message and "7" in message


def test_questions_about_what_is_not_there(tmp_path: Path) -> None:
    assert "none.db" in refusal("best", "--store", f"sqlite:///{tmp_path / 'none.db'}")
    assert not (tmp_path / "none.db").exists()
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    Store.open(url).close()
    assert "ghost" in refusal("show", "ghost:1", "--store", url)
    assert "ghost" in refusal("lineage", "ghost:1", "--store", url)
    assert "ghost" in refusal("resume", "ghost", "--store", url)
    assert "ghost" in refusal("plot", "ghost", "-o", tmp_path / "x.png", "--store", url)
    assert "nonsense" in refusal("show", "nonsense", "--store", url)
    assert "--search" in refusal("evaluate", "full", "--task", "boolq", "--store", url)


def test_coefficient_files_that_are_none(tiny: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    (tmp_path / "junk.pth").write_bytes(b"junk")
    for path in (tmp_path / "missing.pth", tmp_path / "junk.pth"):
        assert path.name in refusal("import-eep", path, "--experts-of", tiny.model, "--store", url)
    assert not (tmp_path / "store.db").exists()


def test_main_prints_one_line_and_exits_with_2(tiny: Any, tmp_path: Path, in_process: Any) -> None:
    refused = in_process("launch", tiny.write_run(tmp_path / "run.yaml", "bad", colour="red"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
    assert in_process("launch", "--no-such-flag").returncode == 2


LONG, LOOP, BELOW = "x" * 300, "loop/x", "file/x"


@pytest.mark.parametrize(
    "command",
    [
        *(("launch", f"{path}.yaml") for path in (LONG, LOOP, BELOW)),
        *(("shrink", path, "--data", "file", "--experts", "2") for path in (LONG, LOOP, BELOW, f"{LONG}.gguf")),
        *(("shrink", "m", "--data", path, "--experts", "2", "-o", "small") for path in (LONG, LOOP, f"{BELOW}.jsonl")),
        *(("shrink", "m", "--task", f"{LONG}.yaml", "--experts", "2", "-o", path) for path in ("small", LONG, LOOP)),
        *(("searches", "--store", f"sqlite:///{path}.db") for path in (LONG, LOOP)),
        *(("export", "a:1", path) for path in (LONG, BELOW)),
        *(("apply", path, "model", "small") for path in (LONG, LOOP, BELOW)),
        ("profile", LONG),
        ("plan", "file", "--model", LONG),
        ("study", "file", "-o", LONG),
        ("recipe", "a:1", "-o", LONG),
    ],
    ids=lambda command: f"{command[0]} {max(command, key=len)[-30:]}",
)
def test_paths_that_no_file_can_have_are_refused_in_one_line(
    command: tuple[str, ...], in_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    refused = in_process(*command)
    error = refused.stderr.splitlines()[-1]
    assert refused.returncode == 2 and error.startswith("error: ") and "Traceback" not in refused.stderr
