"""What is wrong with a request is said before anything is loaded, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands_here import refusal
from demo_chats import write_chats

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingGroups
from moevolve.search.shrink.amounts import kept_experts
from moevolve.search.shrink.goal import Amount
from moevolve.store.repository import Store

DEMO, FINE, DENSE = (str(Path(__file__).parents[3] / "configs" / "demo" / name) for name in ("model", "fine", "dense"))
WRONG = {
    "a share of 0": (["--task", "demo-kin", "--experts", "0%"], "--experts 0%: give a number such as 8, or a share"),
    "no share": (["--task", "demo-kin", "--neurons", "abc"], "--neurons abc: give a share such as 12.5%"),
    "an unknown task": (["--task", "demo-kim", "--experts", "50%"], "did you mean demo-kin"),
    "no file": (["--data", "none.jsonl", "--experts", "50%"], "none.jsonl: no such file"),
    "two tasks of one name": (
        ["--task", "demo-kin", "--task", "demo-kin", "--experts", "50%"],
        "a task is named twice in demo-kin",
    ),
    "a misspelt key": (
        ["--task", "demo-kin", "--experts", "50%", "--set", "genome.expert=3"],
        "genome.expert: unknown key (did you mean `experts`?)",
    ),
}
# Models, and amounts that their config.json rules out.
UNSUITABLE = {
    "more experts than there are": (DEMO, ["--experts", "40"], "did you mean 40%? Otherwise give a share"),
    "all experts": (DEMO, ["--experts", "8"], "--experts 8 keeps all 8 experts"),
    "too few to choose from": (FINE, ["--experts", "1"], "this model can keep: 2, 3, 4,"),
    "experts by a setting": (
        DEMO,
        ["--experts", "50%", "--set", "genome.experts=9"],
        "more than the model's 8 experts",
    ),
    "a dense model's share": (DEMO, ["--active", "50%", "--custom-code"], "is a mixture of experts already"),
    "narrower beside shared experts": (FINE, ["--neurons", "25%"], "other parts' width follows from theirs"),
    "narrower without a repair": (DEMO, ["--neurons", "25%", "--repair", "none"], "narrower experts require a repair"),
    "experts of a dense model": (DENSE, ["--experts", "50%"], "this model is dense, and --experts is for mixtures"),
    "code that isn't allowed": (DENSE, ["--active", "50%"], "add --custom-code"),
}
# Stores that can't be used, in a folder with an older one.
STORES = {
    "sqlite:///.": ". is a folder, not a store",
    f"sqlite:///{__file__}": "file is not a database",
    "sqlite:///older.db": "older.db has schema version moevolve_v0, which this moevolve",
    "sqlite:///none/store.db": "folder none of the store store.db does not exist; create it first",
    "postgresql://nobody@127.0.0.1:1/none": "Connection refused",
}
CHECK = """
import json, sys
from moevolve.search.cli.app import main
for arguments in json.loads(sys.argv.pop()):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as end:
        print(end.code, *(name in sys.modules for name in ("torch", "transformers", "ray")), file=sys.stderr)
"""


def test_nothing_is_loaded_for_a_wrong_request(tmp_path: Path) -> None:
    shrinks = [(DEMO, *each) for each in WRONG.values()]
    shrinks += [(model, ["--task", "demo-kin", *arguments], said) for model, arguments, said in UNSUITABLE.values()]
    shrinks += [(DEMO, ["--task", "demo-kin", "--experts", "4", "--store", url], said) for url, said in STORES.items()]
    commands = [["shrink", model, *arguments] for model, arguments, _ in shrinks]
    Store.open(f"sqlite:///{tmp_path / 'older.db'}").close()
    with closing(sqlite3.connect(tmp_path / "older.db")) as older, older:
        older.execute("UPDATE alembic_version SET version_num = 'moevolve_v0'")
    command = [sys.executable, "-c", CHECK, json.dumps(commands)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=True)
    *answers, rest = done.stderr.split("2 False False False\n")
    assert not rest
    for (*_, said), answer in zip(shrinks, answers, strict=True):
        assert said in " ".join(answer.split()), answer
    assert [path.name for path in tmp_path.iterdir()] == ["older.db"]


def test_a_task_without_rows_to_check_the_winner_on_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"row {number}"} for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"source": {"files": {"search": "rows.jsonl"}}, "prompt": "{{ text }}", "fitness": "perplexity"}
    (tmp_path / "texts.yaml").write_text(json.dumps(task | {"splits": {"search": {"from": "search"}}}))
    said = refusal("shrink", DEMO, "--task", "texts.yaml", "--experts", "50%", "-o", "small")
    assert "no `test` split" in said and len(list(tmp_path.iterdir())) == 2


@pytest.mark.usefixtures("worker_here")
def test_a_request_that_the_model_cannot_meet_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--experts 50: did you mean 50%?" in refusal("shrink", DEMO, "--task", "demo-kin", "--experts", "50")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("worker_here")
@pytest.mark.parametrize("kept", [("--experts", "4"), ("--keep-score", "90%"), ("--experts", "4", "--time", "1d")])
def test_a_full_disk_is_told_before_the_model_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_200_000))
    said = refusal("shrink", DEMO, "--task", "demo-kin", *kept, "-o", "small")
    assert "MB needed, 1.2 MB free at" in said and "choose another place" in said
    assert not list(tmp_path.iterdir())


def test_a_number_that_may_be_a_share_is_answered_by_it() -> None:
    with pytest.raises(UserError, match=r"--experts 50: did you mean 50%\? Otherwise give"):
        kept_experts(Amount("experts", "50", number=50), 8, RoutingGroups())
    with pytest.raises(UserError, match="--experts 6: give"):
        kept_experts(Amount("experts", "6", number=6), 16, RoutingGroups(4, 2, 2))


@pytest.mark.usefixtures("worker_here")
def test_roles_that_no_template_writes_are_told(tmp_path: Path, in_process: Any) -> None:
    write_chats(tmp_path / "chats.jsonl", 100)
    rows = map(json.loads, (tmp_path / "chats.jsonl").read_text().splitlines())
    system = {"role": "system", "content": "Be brief."}
    lines = [json.dumps({"messages": [system, *row["messages"]]}) + "\n" for row in rows]
    (tmp_path / "chats.jsonl").write_text("".join(lines))
    amount = ("--data", "chats.jsonl", "--experts", "4", "--repair", "none", "--force")
    done = in_process("shrink", DEMO, *amount, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "chats: the model has no chat template, so that turns and system prompts" in done.stderr
