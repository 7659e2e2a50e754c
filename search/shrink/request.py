"""Making a smaller checkpoint of a checkpoint and files of requests: what is asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import override_lines
from moevolve.search.interface.parameters import NewStore, RunSettings
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.running.observer import SILENT, Observer

if TYPE_CHECKING:
    from moevolve.search.shrink.goal import Goal
    from moevolve.search.shrink.result import ShrinkPlan, ShrinkResult


@record
class ShrinkRequest(Request):
    """Make a smaller checkpoint of a mixture of experts or a dense model, for what your files of requests ask for.

    Choose settings for this machine, search, and export the winner with a page of its costs. It is an ordinary
    search in the store. Giving the same request again continues it.

    Raises:
        UserError: a file of requests is malformed, the model can't be had, fits in no way, can't be made so small or
            is that small already, its answers are mostly wrong, the time is too short, or the folder is taken.
        StoreError: the store can't be opened, or the search was cancelled.
        PoolError: no worker can be started; giving the same request again continues the search.
        ExportError: the checkpoint failed its verification, or is larger than asked.
        ProfileError: the process that times the new checkpoint has ended; it is written all the same.
    """

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
    kind: Annotated[
        Literal["tomoe", "factorllm"] | None,
        about(
            "How --active makes experts: overlapping masks of neurons, one per token (`tomoe`, the default), or equal "
            "parts of them, several per token (`factorllm`)."
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

    def goal(self) -> Goal:
        """Read the values of the options, and refuse what would fail after hours of searching.

        Raises:
            UserError: The request is wrong, whatever the model and the data are.
        """
        from moevolve.search.shrink.goal import Goal, named, read_amount, seconds_of

        if not self.data and not self.tasks:
            raise UserError("say what the model is for: --data PATH, or --task NAME")
        if self.metric is not None and not self.data:
            raise UserError(
                f"--metric {self.metric} requires --data; a task names its own function: "
                "matching: {function: FILE.py:NAME}"
            )
        amount = read_amount(
            {
                "experts": self.experts,
                "neurons": self.neurons,
                "size": self.size,
                "keep_score": self.keep_score,
                "active": self.active,
            }
        )
        if self.kind is not None and amount.kind != "active":
            raise UserError(f"--kind {self.kind} requires --active")
        if amount.kind == "keep_score" and self.dry_run:
            raise UserError("--keep-score finds the size by searching, which --dry-run leaves out; give one of them")
        if self.time is not None and self.evaluations is not None:
            raise UserError("--time and --evaluations both set the number of candidates; give one of them")
        model, overrides = Path(self.model), override_lines(self.overrides)
        stem = model.stem if model.suffix == ".gguf" else model.resolve().name if model.exists() else model.name
        folder = Path(self.output or f"{stem}-{amount.text.strip().replace('%', 'pct')}")
        name, store = named(folder, overrides)
        given = self.store if isinstance(self.store, str) or self.store is None else self.store.url
        asked = self.arguments() | {"output": folder.resolve()}
        del asked["store"]
        return Goal(
            model=self.model,
            amount=amount,
            name=name,
            folder=folder,
            files=folder.resolve().with_name(f"{folder.resolve().name}.shrink"),
            store=given or store,
            open_store=None if self.store is None or isinstance(self.store, str) else self.store,
            data=tuple(map(Path, self.data)),
            columns=self.columns,
            metric=self.metric,
            tasks=tuple(self.tasks),
            kind=self.kind,
            repair=self.repair,
            custom_code=self.custom_code,
            seed=self.seed,
            evaluations=self.evaluations,
            overrides=overrides,
            time=self.time,
            seconds=None if self.time is None else seconds_of(self.time),
            guard=None if self.guard_time is None else seconds_of(self.guard_time, "--guard-time"),
            force=self.force,
            dry_run=self.dry_run,
            asked=json.loads(json.dumps(asked, default=str)),
        )

    def answer(self, *, observer: Observer = SILENT) -> ShrinkResult | ShrinkPlan:
        begun = time.monotonic()
        goal = self.goal()
        goal.announce(observer.on_note)
        observer.on_stage("starting")
        # What takes seconds to import comes last: what is wrong in a request is reported at once.
        from moevolve.search.shrink.record import known_record, known_store
        from moevolve.search.shrink.settings import refuse_wrong_settings

        refuse_wrong_settings(goal)
        with known_store(goal) as store:
            known_record(goal, store)

        from moevolve.search.shrink.shrink import shrink

        return shrink(goal, observer, begun)


def refuse_wrong(request: ShrinkRequest) -> None:
    """Raise UserError if a request contradicts itself or the model's config.json."""
    from moevolve.search.shrink.settings import refuse_wrong_settings

    refuse_wrong_settings(request.goal())
