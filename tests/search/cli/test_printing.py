"""What is printed: text that others wrote, as it is and without effect on a terminal, and the table of a search."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_samples import decided, evaluation, individual, search, split

from moevolve.evaluators.fitness.scoring import Answer
from moevolve.search.cli.output import console
from moevolve.search.cli.output.final_table import print_final_table
from moevolve.search.cli.output.progress import print_line
from moevolve.search.interface.answers import AnsweredRow, Answers
from moevolve.search.interface.progress import line_observer
from moevolve.search.loop.final_table import Entry, FinalTable
from moevolve.search.loop.scores import Score
from moevolve.store.records import Progress
from moevolve.store.repository import Store

NASTY = "no file [/tmp/model] [red] :boom:\x1b]0;owned\x07\x9b2J"
SHOWN = "no file [/tmp/model] [red] :boom:\ufffd]0;owned\ufffd\ufffd2J"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell is folded."""
    monkeypatch.setattr(console.output, "width", 140)


@pytest.fixture
def store(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'nasty.db'}"
    with Store.open(url) as opened:
        opened.create_search(search("odd"), [split()])
        good = individual(0, summary=NASTY)
        bad = individual(1, parents=[0], operator=NASTY, summary=NASTY)
        opened.record(
            "id-odd",
            [decided(good, 0.5), replace(decided(bad, None), failure=NASTY)],
            [evaluation(0, 0.5), replace(evaluation(1, None), failure=NASTY)],
        )
        opened.set_status("id-odd", "interrupted", NASTY)
    return url


def test_listings_show_stored_text_as_it_is(store: str, in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.output, "width", 500)  # no cell is folded
    for command in ("searches", "best", "show odd:1", "lineage odd:1"):
        done = in_process(*command.split(), "--store", store)
        assert done.returncode == 0, done.stderr
        assert not any(control in done.stdout for control in "\x1b\x07\x9b"), command
        assert SHOWN in done.stdout, command


def test_answers_are_shown_as_they_are(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model, a task or its rows say."""
    said = Answer(text=NASTY, outcome=0.0, logprobs=())
    row = AnsweredRow(0, NASTY, (NASTY,), (), (said, said))
    found = Answers(NASTY, "dev", "generate", ("full", "odd:0"), 1, (0.0, 0.0), (row,))
    monkeypatch.setattr("moevolve.ask", lambda *_, **__: found)
    monkeypatch.setattr(console.output, "width", 500)
    for options in ((), ("--whole",)):
        done = in_process("answers", "odd:0", "--task", "rte", *options)
        assert done.returncode == 0 and done.stdout.count(SHOWN) == 5, done.stderr
        assert not any(control in done.stdout for control in "\x1b\x07\x9b")


def test_a_search_after_a_pilot_prints_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    observer = line_observer(print_line, "shrink")
    for total in (4, 20):
        observer.on_stage("evaluating")
        for done in range(total + 1):
            observer.on_progress(Progress(done, total, "prune", None, 1.0, 0, 0, done, None, None))
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("shrink: evaluating") == 2 and "shrink: prune 4/4 full 100.0" in lines
    own = [line for line in lines if "/20" in line]
    assert [own[0], own[-1]] == ["shrink: prune 0/20 full 100.0", "shrink: prune 20/20 full 100.0"] and len(own) == 11


STORE = "postgresql://ada:secret@host/moevolve?connect_timeout=5"


def report(tasks: tuple[str, ...], active: int) -> FinalTable:
    def scores(*splits: str) -> tuple[Score, ...]:
        return tuple(Score(task, split, 0.5, 0.375, 0.625) for split in splits for task in tasks)

    entries = (
        Entry("full model", None, scores("search", "test"), 4_000_000, 4_000_000),
        Entry("random masks, 3 draws", None, scores("search", "test"), 3_000_000, active, draws=3),
        Entry("best found", "wide:7", scores("search", "test", "dev"), 3_000_000, active),
    )
    return FinalTable("wide", tasks, (), entries, "wide:7", True, 4_000_000, 4)


def test_a_final_table_has_a_block_for_each_task_and_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    print_final_table(report(("rte", "boolq@kl"), 2_000_000), STORE)
    shown = capsys.readouterr().out
    assert [shown.count(label) for label in ("full model", "random masks, 3 draws")] == [2, 2]
    assert "secret" not in shown and "postgresql://ada:***@host/moevolve?connect_timeout=5" in shown


INTERRUPTED_TWICE = """
import atexit, os, signal
from moevolve.search.cli.output.console import exit_with_message
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), print("ended in order")))  # as Ray's end, interrupted
with exit_with_message("interrupted; it can go on", ValueError):
    raise KeyboardInterrupt
"""


def test_a_second_interruption_while_everything_ends_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_TWICE], check=False, capture_output=True, text=True)
    assert done.stdout == "ended in order\n" and "interrupted; it can go on" in done.stderr
