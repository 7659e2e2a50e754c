"""The parameters of a request to shrink a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Annotated, Literal

from moevolve.search.interface.parameters import NewStore, RunSettings
from moevolve.search.interface.request import Flag, Request, about, record


@record
class ShrinkParameters(Request):
    """What is asked for, as it was given."""

    needs_one = ("data", "tasks")
    model: Annotated[str, about("The checkpoint: a folder, a GGUF file or a hub id."), Flag(metavar="MODEL")]
    _: KW_ONLY
    active: Annotated[
        str | None,
        about(
            "Share of a dense model's feed-forward neurons that a token uses, such as 50%: it becomes a mixture of "
            "experts, which needs --custom-code."
        ),
    ] = None
    experts: Annotated[str | None, about("Experts to keep per MoE layer: a number, or a share such as 50%.")] = None
    neurons: Annotated[
        str | None,
        about(
            "Share of the neurons to keep, such as 12.5%: of a dense model, or of all experts together, where the "
            "number of experts that share them is searched. Not of quantised checkpoints."
        ),
    ] = None
    size: Annotated[
        str | None,
        about(
            "Largest size of the new weight files, such as 16GiB: as many neurons as fit are kept, or as many experts "
            "where they can't be narrower."
        ),
    ] = None
    keep_score: Annotated[
        str | None,
        about(
            "Share of the full model's score to keep, such as 99%: the fewest experts (or neurons of a dense model) "
            "that keep it on `dev` with a confidence of 95 % are searched for."
        ),
    ] = None
    data: Annotated[
        Sequence[str | Path],
        about(
            "File of requests, which becomes a task; repeatable. JSON, JSONL, CSV or parquet of chats, of prompts, or "
            "of prompts with answers; a .txt or .md file, or a folder of such; or the id of a data set of the hub."
        ),
        Flag("--data", "PATH", list[Path]),
    ] = ()
    columns: Annotated[
        str | None,
        about("What columns are, if their names don't tell: prompt=question,answer=response,ignore=notes."),
        Flag(metavar="NAME=COLUMN,..."),
    ] = None
    metric: Annotated[
        str | None,
        about("Function that scores an answer, given the expected one as well, from 0 to 1."),
        Flag(metavar="FILE.py:FUNCTION"),
    ] = None
    tasks: Annotated[Sequence[str], about("An existing task, by name or path; repeatable."), Flag("--task")] = ()
    output: Annotated[
        str | Path | None,
        about("New folder of the checkpoint; default: named after MODEL and what is kept."),
        Flag("--output -o", "DIR", Path),
    ] = None
    evaluations: Annotated[int | None, about("Candidates to try; default: the preset's number.", ge=4)] = None
    time: Annotated[
        str | None,
        about(
            "Time for everything, such as 2h: a few candidates are measured first, and as many are tried as there is "
            "time for. Not with --evaluations."
        ),
    ] = None
    repair: Annotated[
        Literal["none", "auto"] | None,
        about(
            "Repair what is kept (`auto`), or only leave experts out (`none`), so that a quantised checkpoint is "
            "copied byte for byte. Default: repair, except for quantised checkpoints."
        ),
    ] = None
    custom_code: Annotated[
        bool,
        about(
            "Allow a checkpoint that needs the code beside it (trust_remote_code), for --active, or for narrower "
            "experts in a few families. Default: what servers load."
        ),
    ] = False
    seed: Annotated[int, about("Seed of the search.", ge=0)] = 0
    overrides: RunSettings = ()
    store: NewStore = None
    guard_time: Annotated[
        str | None,
        about(
            "Longest time in which the models answer held-out prompts; default: a tenth of --time, or without it a "
            "quarter of the search's time."
        ),
    ] = None
    force: Annotated[
        bool,
        about(
            "Go on although the full model's answers are mostly wrong or --time is too short, and export a winner "
            "beyond these limits."
        ),
    ] = False
    dry_run: Annotated[
        bool,
        about(
            "Only write the run and task files. With --time a few candidates are measured even so. Not with "
            "--keep-score."
        ),
    ] = False
