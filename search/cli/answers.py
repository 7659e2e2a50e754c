"""`answers`: what models say to a task's prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

import moevolve
from moevolve.search.cli._console import output, percent, print_json, print_table
from moevolve.search.cli._options import (
    DEFAULT_STORE,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    StoreOption,
)

if TYPE_CHECKING:
    from moevolve import Answers
    from moevolve.evaluators.fitness.transcript import Answer
    from moevolve.search.service.answers import AnsweredRow

_LONGEST = 480
"""Characters of a prompt that are shown without `--whole`: as many of its beginning as of its end."""


def answers(
    individuals: Annotated[
        list[str], typer.Argument(metavar="INDIVIDUAL...|full", help="SEARCH:INDEX of one model, or the unedited one.")
    ],
    task: Annotated[str, typer.Option("--task", help="Whose prompts to run; any task, or NAME@FITNESS.")],
    split: Annotated[Literal["search", "dev", "test"], typer.Option("--split", help="Which split.")] = "test",
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="Most rows to show; without --only no more are run.")
    ] = 10,
    only: Annotated[
        Literal["differing", "wrong", "lost", "gained"] | None,
        typer.Option(
            "--only",
            help="Rows where an individual says something else than the full model; isn't wholly right; is worth less "
            "than the full model; is worth more. The whole split is run.",
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Show long prompts from beginning to end.")] = False,
    prompts: Annotated[
        bool,
        typer.Option(
            "--prompts", help="Show what the model is asked and what is scored, special tokens included; run nothing."
        ),
    ] = False,
    search: Annotated[str | None, typer.Option("--search", help="Whose full model (with `full`).")] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show prompts, right answers, and what the full model and individuals answer, side by side. Nothing is stored."""
    if prompts:
        _show_prompts(individuals[0], task, split, limit, whole, search, model, store, as_json)
        return
    found = moevolve.answers(
        *individuals,
        task=task,
        store=store,
        split=split,
        limit=limit,
        only=only,
        search=search,
        model=model,
        device=device,
        dtype=dtype,
    )
    if as_json:
        print_json(found)
        return
    scores = ", ".join(f"{name} {percent(value)}" for name, value in zip(found.models, found.scores, strict=True))
    title = f"{found.task} ({found.split}), {found.fitness}, first {found.examined} rows: {scores}"
    if not found.rows:
        output.print(f"{title}; no row is {only}", soft_wrap=True)
        return
    cells = [list(_row(row, found, whole)) for row in found.rows]
    ends = [sum(map(len, cells[: place + 1])) - 1 for place in range(len(cells))]
    columns = [("row", True), ("", False), ("", False), ("text", False)]
    print_table(title, columns, [line for lines in cells for line in lines], ends)


def _show_prompts(
    individual: str,
    task: str,
    split: Literal["search", "dev", "test"],
    limit: int,
    whole: bool,
    search: str | None,
    model: str | None,
    store: str,
    as_json: bool,
) -> None:
    found = moevolve.prompts(individual, task, store=store, split=split, limit=limit, search=search, model=model)
    if as_json:
        print_json(found)
        return
    rows: list[list[str | Text]] = [
        [str(row.row), row.prompt if whole else _elided(row.prompt), "\n".join(row.choices) or row.gold or "-"]
        for row in found
    ]
    print_table(f"{task} ({split})", [("row", True), ("asked", False), ("scored", False)], rows, list(range(len(rows))))


def _row(row: AnsweredRow, found: Answers, whole: bool) -> Iterator[list[str | Text]]:
    """A row's lines: the prompt, the accepted answers, and one per model."""
    yield [str(row.row), "prompt", "", row.prompt if whole else _elided(row.prompt)]
    yield ["", "right", "", " | ".join(row.references) or "-"]
    for name, answer in zip(found.models, row.answers, strict=True):
        yield ["", name, _mark(answer.outcome), _said(answer, row.choices)]


def _said(answer: Answer, choices: tuple[str, ...]) -> str:
    if not answer.logprobs:
        return "-" if answer.text is None else answer.text
    best = max(answer.logprobs)
    pairs = zip(answer.logprobs, choices, strict=True)
    return "\n".join(f"{'>' if value == best else ' '} {value:8.3f}  {choice}" for value, choice in pairs)


def _mark(outcome: float) -> Text:
    said, style = {1.0: ("right", "green"), 0.0: ("wrong", "red")}.get(outcome, (percent(outcome), ""))
    return Text(said, style)


def _elided(text: str) -> str:
    half = _LONGEST // 2
    left_out = len(text) - 2 * half
    if left_out <= half // 4:
        return text
    return f"{text[:half]} [... {left_out:,} characters ...] {text[-half:]}"
