"""What is printed: text that others wrote, as it is and without effect on a terminal, and the table of a search."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text
from store_samples import decided, evaluation, individual, search, split

from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.fitness.scoring import Answer
from moevolve.evaluators.metrics import scale_of
from moevolve.evaluators.scales import SCALES
from moevolve.search.cli.models import _mark
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


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal with colours gets of tables."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    written = io.StringIO()
    shown = console._Console(markup=False, highlight=False, emoji=False, width=200, file=written)
    monkeypatch.setattr(console, "output", shown)
    return written


def test_colours_that_are_meant_stay(terminal: io.StringIO) -> None:
    percent = SCALES["percent"]
    marks: list[str | Text] = [_mark(1.0, percent), _mark(0.0, percent), _mark(0.25, percent)]
    console.print_table(NASTY, "[bold]heading[/] |  |  | ", [[NASTY, *marks]])
    shown = terminal.getvalue()
    assert "\x1b[32mright\x1b[0m" in shown and "\x1b[31mwrong\x1b[0m" in shown and "  25.0" in shown
    assert shown.count(SHOWN) == 2 and "\x1b]" not in shown and "[bold]heading[/]" in shown


def test_tasks_stand_out_in_the_final_table(terminal: io.StringIO) -> None:
    tasks = (NASTY, "rte")
    scores = tuple(Score(task, "search", 0.5) for task in tasks)
    full, best = Entry("full model", None, scores, 10, 10), Entry("best found", "odd:0", scores, 5, 5)
    print_final_table(FinalTable("odd", tasks, (), (full, best), "odd:0", False, (), 10, 4), "sqlite:///odd.db")
    shown = terminal.getvalue()
    assert f"\x1b[1m{SHOWN}" in shown and "\x1b[1mrte" in shown
    assert "draws" not in shown


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


def test_where_nothing_is_generated_the_way_to_answers_is_said(
    in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, said in ((None, True), ("an answer", False)):
        answer = Answer(text=text, outcome=0.5, logprobs=())
        row = AnsweredRow(0, "question", ("gold",), (), (answer, answer))
        found = Answers("chats@kl", "test", "kl", ("full", "odd:0"), 1, (1.0, 0.5), (row,))
        monkeypatch.setattr("moevolve.ask", lambda *_, found=found, **__: found)
        assert ("--task chats@generate" in in_process("answers", "odd:0", "--task", "chats@kl").stdout) == said


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
    return FinalTable("wide", tasks, (), entries, "wide:7", True, (), 4_000_000, 4)


def test_words_and_numbers_are_whole_however_narrow_the_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [["a-search-of-quite-some-length:12", "keep 4 of 8, widths 12, repaired", "12.5 GiB", "51.0\n48.8 - 53.3"]]
    for width in (20, 80, 200):
        monkeypatch.setattr(console.output, "width", width)
        console.print_table(None, "individual | genome | >memory of it | >test", rows, (0,))
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= max(width, 80)
        words = " ".join(lines).split()
        assert {"a-search-of-quite-some-length:12", "repaired", "12.5", "GiB", "51.0", "53.3", "memory"} < set(words)
        assert ("keep 4 of 8, widths 12, repaired" in "\n".join(lines)) == (width == 200)


def headings(lines: list[str]) -> list[str]:
    return re.split(r"  +", lines[1].strip())


def test_one_task_needs_no_block(capsys: pytest.CaptureFixture[str]) -> None:
    """Active parameters have a column where tokens skip some."""
    for active in (3_000_000, 2_000_000):
        print_final_table(report(("rte",), active), STORE)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("wide on rte: score in %") and lines[0].endswith("deviation)"), "the title is a line"
        skipping = ["active"] if active < 3_000_000 else []
        assert headings(lines) == ["model", "search", "dev", "test", "parameters", *skipping, "memory"]
        assert not any("secret" in line for line in lines) and lines.count("") == 0
        assert "  moevolve best --task rte --store 'postgresql://ada:***@host/moevolve?connect_timeout=5'" in lines
        assert any("75 %    50 %" in line for line in lines) == bool(skipping)


def test_the_title_names_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for fitness, title in (("generate", "score in %"), ("agreement", "agreement with the full model in %")):
        scale = scale_of(FITNESSES[fitness].metric)
        found = report(("rte",), 3_000_000)
        entries = tuple(
            replace(entry, scores=tuple(replace(score, scale=scale) for score in entry.scores))
            for entry in found.entries
        )
        print_final_table(replace(found, entries=entries), STORE)
        assert capsys.readouterr().out.startswith(f"wide on rte: {title}, with 95 % interval")


def test_several_tasks_are_blocks_of_the_same_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """A contestant has no line in the block of a task that it wasn't scored on."""
    tasks = ("rte", "a-task-with-a-long-name", "boolq@kl")
    whole = report(tasks, 3_000_000)
    full, draws, best = whole.entries
    fewer = replace(draws, scores=tuple(score for score in draws.scores if score.task != "boolq@kl"))
    print_final_table(replace(whole, entries=(full, fewer, best)), STORE)
    lines = capsys.readouterr().out.splitlines()
    assert headings(lines) == ["model", "search", "dev", "test", "parameters", "memory"]
    table = lines[3 : lines.index("Next:")]
    firsts = [line.split("  ")[0].strip() for line in table if line and line[0] != " "]
    assert firsts == [
        *("rte", "full model", "random masks, 3 draws", "best found", "wide:7"),
        *("a-task-with-a-long-name", "full model", "random masks, 3 draws", "best found", "wide:7"),
        *("boolq@kl", "full model", "best found", "wide:7"),
    ]
    assert [line.strip() for line in table].count("") == 2
    assert max(map(len, table)) <= 100
    assert any("moevolve best --search wide" in line for line in lines)


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
