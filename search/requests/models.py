"""Requests that load a model: scores, answers, analyses, checkpoints, profiles; and the import of coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from moevolve.evaluators.errors import UserError
from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.requests.parameters import (
    SETTINGS,
    ExportForm,
    IndividualOrFull,
    IndividualRef,
    ModelDevice,
    ModelDtype,
    ModelPath,
    ModelSettings,
    Mtp,
    Overrides,
    PadExperts,
    Requantise,
    SearchOfFull,
    Split,
    Task,
)
from moevolve.search.requests.record import Flag, Request, about, record
from moevolve.workers.contract.settings import Device

if TYPE_CHECKING:  # the answers
    from moevolve.search.requests.answers import Answers, AskedRow, Evaluation, Imported, Outcomes
    from moevolve.search.results.expert_usage import Analysis
    from moevolve.workers.contract.card import ExportReport
    from moevolve.workers.profiling.report import ProfileReport

AnswerFilter = Literal["differing", "lost", "gained", "wrong", "both_wrong"]
Only = Annotated[
    AnswerFilter | None,
    about(
        "Only rows where an individual answers otherwise than the model it is compared with "
        "(`differing`), scores below (`lost`) or above it (`gained`), isn't fully right (`wrong`), or neither is "
        "(`both_wrong`). `answers` then runs the whole split, unless rows are named."
    ),
]


@record
class EvaluateRequest(Request["Evaluation"]):
    """Score an individual, or the full model, on one split of a task, in this process. The result is stored.

    Under other settings it is another evaluation, stored beside the first.

    Raises:
        UserError: there is no such task or split, a setting can't be changed like that, or the model can't be loaded.
        StoreError: there is no such store, search or individual.
    """

    individual: IndividualOrFull
    _: KW_ONLY
    task: Task
    split: Split = "test"
    search: SearchOfFull = None
    model: ModelPath = None
    overrides: ModelSettings = ()


@record
class AnswersRequest(Request["Answers"]):
    """Show prompts, right answers, and the answers of the full model and of individuals. Nothing is stored.

    Raises:
        UserError: there is no such task or split, individuals are of different models, or one can't be run.
        StoreError: there is no such store or individual.
    """

    individuals: Annotated[
        Sequence[str],
        about("SEARCH:INDEX of individuals of one model, or `full` alone.", min_length=1),
        Flag(metavar="INDIVIDUAL...|full"),
    ]
    _: KW_ONLY
    task: Task
    split: Split = "test"
    limit: Annotated[
        int | None, about("Show at most this many rows. Without `only`, no more than these are run.", ge=1)
    ] = 10
    only: Only = None
    rows: Annotated[
        Sequence[Annotated[int, Field(ge=0)]],
        about("Run these rows of the split, counted from 0, and all of them; repeatable."),
        Flag("--row", "N", list[int]),
    ] = ()
    search: SearchOfFull = None
    model: ModelPath = None
    device: ModelDevice = None
    dtype: ModelDtype = None


@record
class OutcomesRequest(Request["Outcomes"]):
    """Show on which rows an individual and another model are right, from stored evaluations. Nothing is run.

    Prompts and right answers are read from the task's data; where those can't be had, only the outcomes are shown.

    Raises:
        UserError: one of the two wasn't scored on the split, or its outcomes weren't kept.
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef
    _: KW_ONLY
    task: Task
    split: Split = "test"
    against: Annotated[
        str,
        about(
            "The model to compare with: `full`, or another individual as SEARCH:INDEX.", max_length=LONGEST_NAME + 20
        ),
    ] = "full"
    only: Only = None
    limit: Annotated[int, about("Show at most this many rows.", ge=1, le=1000)] = 25
    offset: Annotated[int, about("Leave this many of the rows out that would come first.", ge=0)] = 0


@record
class PromptsRequest(Request["list[AskedRow]"]):
    """Show prompts as the model reads them and the answers that are scored, chat template and special tokens included.

    No weights are needed, and nothing is run.

    Raises:
        UserError: there is no such task or split, or the model's config or tokenizer can't be had.
        StoreError: there is no such store or individual.
    """

    individual: IndividualOrFull
    _: KW_ONLY
    task: Task
    split: Split = "test"
    limit: Annotated[int | None, about("Show at most this many rows.", ge=1)] = 10
    search: SearchOfFull = None
    model: ModelPath = None


@record
class AnalyseRequest(Request["Analysis"]):
    """Count which experts a task's prompts activate, how strongly, and which together, before and after.

    Raises:
        UserError: there is no such task or split, or the individual can't be run.
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef
    _: KW_ONLY
    task: Task
    split: Split = "dev"
    tokens: Annotated[int | None, about("Stop after about this many tokens. All are run if left out.", ge=1)] = None
    model: ModelPath = None


@record
class ExportRequest(Request["ExportReport"]):
    """Write an individual as a checkpoint, and verify its files: copied ones byte by byte, others layer by layer.

    Raises:
        ExportError: the checkpoint failed its verification; its files are kept as `DIRECTORY.unverified`.
        UserError: the folder exists, the model can't be loaded, or the form can't express the individual.
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef
    directory: Annotated[str | Path, about("New folder of the checkpoint."), Flag(metavar="DIR", kind=Path)]
    _: KW_ONLY
    form: ExportForm = None
    mtp: Mtp = None
    requantise: Requantise = False
    pad_experts: PadExperts = None
    model: ModelPath = None
    device: ModelDevice = None
    dtype: ModelDtype = None


@record
class ImportEepRequest(Request["list[Imported]"]):
    """Store the EEP authors' coefficient files as individuals, one search per file.

    They can be shown, evaluated and exported. No weights are needed before an individual is run; `model` names them
    then. Without a run configuration the original experts stay on the host, in the checkpoint's dtype, and prompts for
    a Mixtral are in the authors' template.

    Raises:
        UserError: a file can't be read or doesn't fit the model. The store is left alone then.
        StoreError: the store can't be opened.
    """

    files: Annotated[
        Sequence[str | Path],
        about("The EEP authors' coefficient files (.pth).", min_length=1),
        Flag(metavar="FILE...", kind=list[Path]),
    ]
    _: KW_ONLY
    experts_of: Annotated[
        str,
        about("The model: a checkpoint, a folder with its config.json, or a run configuration."),
        Flag(metavar="MODEL_OR_CONFIG"),
    ]
    active: Annotated[int | None, about("Experts per token, the model's number if left out.", ge=1)] = None
    router_space: Annotated[
        Literal["probs", "logits"], about("Whether the router mappings apply to the router's probabilities or logits.")
    ] = "probs"
    overrides: Annotated[
        Overrides,
        about("Change settings of `model.*` or `engine.*` that the individuals are evaluated with."),
        SETTINGS,
    ] = ()


def _parsed_sizes(given: Any) -> Any:
    """Parse batch sizes that the command line gives as `1,8,32`."""
    if not isinstance(given, str):
        return given
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--batch-sizes: {given!r} are not whole numbers from 1 on, such as 1,8,32")
    return sorted({int(part) for part in parts})


@record
class ProfileRequest(Request["ProfileReport"]):
    """Measure size, memory and speed of models as plain `transformers` runs them, and compare with the full model.

    Individuals are exported to a temporary folder (TMPDIR) first. Nothing is stored.

    Raises:
        UserError: a folder has no checkpoint, individuals are of different models, or a model can't be profiled so.
        StoreError: there is no such store, search or individual.
        ProfileError: a model's process died, or an export failed its verification.
    """

    models: Annotated[
        Sequence[str],
        about("Individuals (SEARCH:INDEX), `full`, and folders of checkpoints.", min_length=1),
        Flag(metavar="INDIVIDUAL|full|DIR..."),
    ]
    _: KW_ONLY
    batch_sizes: Annotated[
        Sequence[Annotated[int, Field(ge=1)]],
        BeforeValidator(_parsed_sizes),
        about("Numbers of sequences per batch; 1,8,32 if left out.", min_length=1),
        Flag(metavar="N,N...", kind=str),
    ] = (1, 8, 32)
    prompt_tokens: Annotated[
        int | None, about("Length of arbitrary prompts; half of the model's positions, at most 512, if left out.", ge=1)
    ] = None
    new_tokens: Annotated[
        int | None, about("Decoding steps after the prompt; the task's limit, or 32 without a task, if left out.", ge=1)
    ] = None
    task: Annotated[str | None, about("Run this task's prompts instead of arbitrary tokens.")] = None
    split: Split = "test"
    repeats: Annotated[int, about("Timed runs per batch size, of which the median is reported.", ge=1)] = 5
    device: Annotated[Device, about("Where to run the models.")] = "auto"
    threads: Annotated[int | None, about("CPU threads of torch; torch's default if left out.", ge=1)] = None
    search: SearchOfFull = None
    model: ModelPath = None
    trust_remote_code: Annotated[bool, about("Let modelling code in a checkpoint's folder run.")] = False
    dtype: ModelDtype = None
    apart: Annotated[
        bool | None,
        about(
            "Hold one model in memory at a time (drift isn't shared), or all of them. If this is left out, "
            "all are held where there is ample memory."
        ),
        Flag("--apart/--together"),
    ] = None
    plot: Annotated[
        Path | None,
        about("Picture to write (.png, .svg, .pdf): scores on the task against answers per second."),
        Flag(metavar="FILE"),
    ] = None
