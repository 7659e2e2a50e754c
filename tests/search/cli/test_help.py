"""What users see first: groups of commands, examples, `-h`, the version, and listings."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from moevolve.search.cli.app import GROUPS


def test_help_has_groups_and_short_options(in_process: Any) -> None:
    shown = in_process("-h").stdout
    places = [shown.index(f"─ {title} ─") for title in GROUPS]
    assert places == sorted(places)
    assert in_process("--version").stdout == f"moevolve {version('moevolve')}\n"
    assert in_process("--help").stdout == shown


def test_help_shows_examples_that_are_commands(in_process: Any) -> None:
    for name in ("shrink", "launch", "show", "watch", "best", "export"):
        shown = in_process(name, "-h").stdout
        _, _, examples = shown.partition("Examples:")
        lines = [line.strip() for line in examples.splitlines() if line.strip()]
        assert lines and all(line.startswith(f"moevolve {name} ") and len(line) < 78 for line in lines), lines


def test_a_misspelt_command_is_answered_by_similar_ones(in_process: Any) -> None:
    assert "'launch'" in in_process("launsh").stderr
