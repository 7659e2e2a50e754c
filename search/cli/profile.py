"""`profile`: what models cost to hold and to run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer
from rich.text import Text

import moevolve
from moevolve.search.cli._console import errors, plain, print_json, told_in_a_line
from moevolve.search.cli._options import DEFAULT_STORE, DtypeOption, JsonOption, ModelOption, StoreOption
from moevolve.search.cli.output.profile import print_profile


def profile(
    models: Annotated[
        list[str],
        typer.Argument(metavar="INDIVIDUAL|full|DIR...", help="SEARCH:INDEX, the unedited model, a checkpoint folder."),
    ],
    batch_sizes: Annotated[str, typer.Option("--batch-sizes", metavar="N,N...", help="Sequences at once.")] = "1,8,32",
    prompt_tokens: Annotated[
        int | None,
        typer.Option("--prompt-tokens", min=1, help="Default: half of the model's positions, at most 512."),
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option("--new-tokens", min=1, help="Decoding steps after the prompt; default: the task's limit, or 32."),
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Run this task's prompts instead of arbitrary tokens.")
    ] = None,
    split: Annotated[Literal["search", "dev", "test"], typer.Option("--split", help="Of the task.")] = "test",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed runs per batch size; medians count.")] = 5,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where to run.")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Of torch on the CPU; default: its own.")
    ] = None,
    search: Annotated[str | None, typer.Option("--search", help="Whose full model (with `full`).")] = None,
    model: ModelOption = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let modelling code in a checkpoint's folder run.")
    ] = False,
    dtype: DtypeOption = None,
    apart: Annotated[
        bool | None,
        typer.Option(
            "--apart/--together",
            help="One model in memory at a time (drift isn't shared), or all; default: all where there is ample room.",
        ),
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Measure size, memory and speed of models as plain `transformers` runs them, beside the full model.

    Individuals are exported to a temporary folder (TMPDIR) first. Nothing is stored.
    """
    sizes = _parse_sizes(batch_sizes)
    # A lost terminal sends SIGHUP, after which there must be as little left behind as after Ctrl-C.
    signals = (signal.SIGTERM, signal.SIGHUP)
    interrupted = "interrupted; nothing was stored or left behind"
    with told_in_a_line(interrupted, moevolve.ProfileError, signals=signals), _stages() as on_stage:
        report = moevolve.profile(
            *models,
            store=store,
            batch_sizes=sizes,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            task=task,
            split=split,
            repeats=repeats,
            device=device,
            threads=threads,
            search=search,
            model=model,
            trust_remote_code=trust_remote_code,
            apart=apart,
            dtype=dtype,
            on_stage=on_stage,
        )
    if as_json:
        print_json(report)
    else:
        print_profile(report)


def _parse_sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise moevolve.UserError(f"--batch-sizes: {text!r} are not whole numbers from 1 on, such as 1,8,32")
    return tuple(sorted({int(part) for part in parts}))


@contextmanager
def _stages() -> Iterator[Callable[[str], None]]:
    """Shows what is happening on a terminal, and nothing elsewhere."""
    if not errors.is_terminal:
        yield lambda _: None
        return
    with errors.status("starting") as status:
        yield lambda stage: status.update(Text(plain(stage)))
