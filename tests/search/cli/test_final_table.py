"""The table that ends a search: a line per contestant, a block per task."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moevolve.search.cli.output.final_table import print_final_table
from moevolve.search.loop.final_table import Entry, FinalTable, Score

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


def shown(capsys: pytest.CaptureFixture[str], tasks: tuple[str, ...], active: int = 3_000_000) -> list[str]:
    print_final_table(report(tasks, active), STORE)
    return capsys.readouterr().out.splitlines()


def headings(lines: list[str]) -> list[str]:
    return [cell.strip() for cell in lines[2].split("┃")[1:-1]]


def test_one_task_needs_no_block(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, ("rte",))
    assert lines[0].startswith("wide on rte: score in %") and lines[0].endswith("deviation)"), "the title is one line"
    assert headings(lines) == ["model", "search", "dev", "test", "parameters", "memory"]
    assert not any("├" in line or "secret" in line for line in lines)
    assert "  moevolve best --task rte --store 'postgresql://ada:***@host/moevolve?connect_timeout=5'" in lines


def test_several_tasks_are_blocks_of_the_same_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, ("rte", "a-task-with-a-long-name", "boolq@kl"))
    assert headings(lines) == ["model", "search", "dev", "test", "parameters", "memory"]
    firsts = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert [name for name in firsts if name] == [
        *("rte", "full model", "random masks, 3 draws", "best found", "wide:7"),
        *("a-task-with-a-long-name", "full model", "random masks, 3 draws", "best found", "wide:7"),
        *("boolq@kl", "full model", "random masks, 3 draws", "best found", "wide:7"),
    ]
    assert sum(line.startswith("├") for line in lines) == 2
    assert max(map(len, lines[1:])) <= 100
    assert any("moevolve best --search wide" in line for line in lines)


def test_a_contestant_has_no_line_in_the_block_of_a_task_it_was_not_scored_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = report(("rte", "held-out"), 3_000_000)
    full, draws, best = both.entries
    alone = replace(draws, scores=tuple(score for score in draws.scores if score.task == "rte"))
    print_final_table(replace(both, entries=(full, alone, best)), STORE)
    firsts = [line.split("│")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [name for name in firsts if name] == [
        *("rte", "full model", "random masks, 3 draws", "best found", "wide:7"),
        *("held-out", "full model", "best found", "wide:7"),
    ]


def test_active_parameters_have_a_column_where_tokens_skip_some(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, ("rte",), active=2_000_000)
    assert headings(lines) == ["model", "search", "dev", "test", "parameters", "active", "memory"]
    assert any("3.00 M │ 2.00 M" in line for line in lines)
    assert any("75 % │   50 %" in line for line in lines)
