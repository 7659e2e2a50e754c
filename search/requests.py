"""What can be asked of a store, a server or this machine: one frozen record per request.

A parameter's type, default, range and description are stated here and nowhere else. Functions of the package
`moevolve`, options of commands (`search/cli/_requests.py`) and the HTTP API (`search/server/api/requests.py`) are made
from these fields. Positional fields are arguments of commands; the others are options.
`search/service/use_cases.py` says what answers each request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo

from moevolve.evaluators.errors import UserError

if TYPE_CHECKING:  # the answers, which the records' bases name
    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.operations.analyse import Analysis
    from moevolve.search.operations.answers import Answers
    from moevolve.search.operations.evaluate import Evaluation
    from moevolve.search.operations.import_eep import Imported
    from moevolve.search.operations.prompts import AskedRow
    from moevolve.store.records import BestRow, Control, IndividualDetail, LineageGraph, SearchRecord, SearchSummary
    from moevolve.workers.contract.card import ExportReport
    from moevolve.workers.profiling.report import ProfileReport

AnswerT_co = TypeVar("AnswerT_co", covariant=True)
R = TypeVar("R", bound="Request[Any]")
LONGEST_NAME = 200
"""Characters of a search's name: it is part of file names and URLs."""


class Request(Generic[AnswerT_co]):
    """A request that is answered by an `AnswerT_co`.

    Attributes:
        needs_one: parameters at least one of which has to be given, where none alone is required.
    """

    needs_one: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class Flag:
    """How the command line has a parameter, where that isn't an option of the parameter's name.

    Attributes:
        name: of the option, with its dashes; None takes the parameter's.
        metavar: what `--help` shows in the place of a value.
        kind: type of what is typed, where typer doesn't know the parameter's.
    """

    name: str | None = None
    metavar: str | None = None
    kind: Any = None


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def record(cls: type[R]) -> type[R]:
    """Make a class a frozen record whose values are checked when it is made."""
    made: Any = pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
    checked: type[R] = made
    return checked


def fields_of(kind: type[Request[Any]]) -> Mapping[str, FieldInfo]:
    """The parameters of a request, positional ones first."""
    fields: Mapping[str, FieldInfo] = kind.__pydantic_fields__  # type: ignore[attr-defined]
    return fields


def annotation_of(field: FieldInfo) -> Any:
    """A parameter's type with its range."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def default_of(field: FieldInfo, missing: Any) -> Any:
    """A parameter's default, `missing` if it has to be given."""
    return missing if field.is_required() else field.get_default(call_default_factory=True)


@contextmanager
def refused_in_a_line() -> Iterator[None]:
    """Say in one line which of a request's values are wrong.

    Raises:
        UserError: in the place of pydantic's error.
    """
    try:
        yield
    except ValidationError as error:
        raise UserError(in_a_line(error.errors())) from None


def in_a_line(errors: Iterable[Any]) -> str:
    """What pydantic found wrong, each fault after the name of its parameter."""
    return "; ".join(f"{'.'.join(map(str, each['loc'])) or 'request'}: {each['msg']}" for each in errors)


def path_fields(path: str) -> list[str]:
    """Names of the parameters that stand in an HTTP path, as `{name}`."""
    return re.findall(r"{(\w+)}", path)


ScoredSplit = Literal["search", "dev", "test"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
SearchRef = Annotated[str, Field(max_length=LONGEST_NAME, description="Name or id of the search.")]
IndividualRef = Annotated[
    str,
    Field(max_length=LONGEST_NAME + 20, description="The individual as SEARCH:INDEX, for example demo:137."),
    Flag(metavar="INDIVIDUAL"),
]
Overrides = Mapping[str, Any] | Sequence[str]
"""Settings by dotted path, or `KEY=VALUE` lines as the command line has them."""
SETTINGS = Flag("--set", "KEY=VALUE", list[str])
Individual = Annotated[
    str,
    Field(description="The individual as SEARCH:INDEX, or `full` for the unedited model."),
    Flag(metavar="INDIVIDUAL|full"),
]
Task = Annotated[str, Field(description="Any task, or NAME@FITNESS; also one that the search did not use.")]
Split = Annotated[ScoredSplit, Field(description="Split of the task.")]
WhoseModel = Annotated[str | None, Field(description="With `full`, the search whose model is meant.")]
ModelPath = Annotated[
    str | None,
    Field(description="The search's checkpoint (folder or hub id), if it isn't where the store says."),
    Flag(metavar="PATH"),
]
HeldOn = Annotated[
    Device | None,
    Field(
        description="Where to hold the model. The search's device is taken if this is left out, or the CPU if that was "
        "a GPU and there is none."
    ),
]
HeldAs = Annotated[Dtype | None, Field(description="Dtype of the parameters, the search's if this is left out.")]
Loading = Annotated[
    Overrides, Field(description="Change settings of the search's `model.*` or `engine.*` for this once."), SETTINGS
]
Address = Annotated[
    str | None,
    Field(description="Ray cluster to join (`auto` or host:port). Ray is started on this machine if it is left out."),
]
Count = Annotated[int | None, Field(ge=0, lt=2**31)]


@record
class SearchesRequest(Request["list[SearchSummary]"]):
    """List all searches of the store, oldest first."""


@record
class SearchRequest(Request["SearchRecord"]):
    """Look up one search."""

    search: SearchRef


@record
class ControlRequest(Request["Control"]):
    """Look up who runs a search, where it stands, and what is asked of it."""

    search: SearchRef


@record
class StandingsRequest(Request["FinalTable"]):
    """Look up a search's winner and final table, as far as they are measured."""

    search: SearchRef


@record
class BestRequest(Request["list[BestRow]"]):
    """List the best configurations per task.

    Raises:
        StoreError: there is no such store, task or search.
    """

    _: KW_ONLY
    task: Annotated[
        str | None, Field(max_length=200, description="Rank for this task. Every task is ranked if this is left out.")
    ] = None
    experts: Annotated[Count, Field(description="List only configurations with this many experts, or blocks.")] = None
    active: Annotated[Count, Field(description="List only configurations with this many active experts.")] = None
    search: Annotated[
        str | None, Field(max_length=LONGEST_NAME, description="List only individuals of this search (name or id).")
    ] = None
    by: Annotated[
        ScoredSplit,
        Field(description="Split whose score ranks. `dev` falls back to `search` for what was not re-ranked."),
    ] = "dev"
    limit: Annotated[int, Field(ge=1, le=1000, description="List at most this many configurations per task.")] = 10


@record
class ShowRequest(Request["IndividualDetail"]):
    """Show everything that the store knows of one individual.

    Raises:
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef


@record
class LineageRequest(Request["LineageGraph"]):
    """Show where an individual comes from: its ancestors, back to those without parents.

    Raises:
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef
    _: KW_ONLY
    descendants: Annotated[bool, Field(description="Follow children instead of ancestors.")] = False
    depth: Annotated[int | None, Field(ge=0, le=10_000, description="Follow at most this many generations.")] = None


@record
class PlotRequest(Request[bytes]):
    """Draw a search: score over evaluations, and what was searched of one individual (matrices, masks ...)."""

    search: SearchRef
    _: KW_ONLY
    individual: Annotated[
        str | None,
        Field(max_length=LONGEST_NAME + 20, description="Draw this individual's genome instead of the best one's."),
    ] = None
    form: Annotated[Literal["svg", "png", "pdf"], Field(description="Format of the picture.")] = "svg"


@record
class ReportRequest(Request[bytes]):
    """Make a page about a search: scores, figures, lineage, cost, how to do it again. Nothing is evaluated."""

    search: SearchRef
    _: KW_ONLY
    limit: Annotated[int, Field(ge=1, le=1000, description="List this many of the best individuals.")] = 5


@record
class PauseRequest(Request["Control"]):
    """Ask a running search to give its workers back and wait; `resume` lets it go on where it runs.

    What its workers were evaluating is evaluated again; no individual changes by that.

    Raises:
        StoreError: there is no such store or search, or no process runs it.
    """

    search: SearchRef


@record
class StopRequest(Request["Control"]):
    """Ask a running search to end, as Ctrl-C does at its terminal; `resume` continues it.

    Raises:
        StoreError: there is no such store or search, or no process runs it.
    """

    search: SearchRef


@record
class CancelRequest(Request["Control"]):
    """End a search for good, whether it is running or not; what it evaluated stays in the store.

    Raises:
        StoreError: there is no such store or search.
        UserError: the search is finished or cancelled already.
    """

    search: SearchRef


@record
class ResumeRequest(Request["FinalTable | None"]):
    """Continue a search from the store: the population comes out as if it had never stopped.

    The answer is how it ended; None if it was paused, and goes on where it runs.

    Raises:
        UserError: model, tasks or settings are not what the search was launched with.
        StoreError: there is no such store or search, another process runs it, or it was cancelled.
        PoolError: no worker can be had; try again.
    """

    search: SearchRef
    _: KW_ONLY
    overrides: Annotated[
        Overrides, Field(description="Change settings. Only `workers.*` and `final.*` may change."), SETTINGS
    ] = ()
    address: Address = None


@record
class RetryRequest(ResumeRequest):
    """Evaluate individuals again that failed by fault of workers or of time, and all that was made in their sight.

    The answer is how it ended; None if there is nothing to retry.

    Raises:
        UserError, StoreError, PoolError: as `resume`.
    """


@record
class ScaleRequest(Request["Control"]):
    """Ask a running search to have more or fewer workers, or another priority; no individual changes by that.

    Raises:
        StoreError: there is no such store or search, or no process runs it.
        UserError: nothing is asked for.
    """

    needs_one = ("workers", "priority")
    search: SearchRef
    workers: Annotated[
        int | None, Field(ge=1, le=100_000, description="How many workers the search is to have from now on.")
    ] = None
    _: KW_ONLY
    priority: Annotated[
        int | None,
        Field(ge=-1000, le=1000, description="Searches that share a cluster get workers in the order of priority."),
    ] = None


@record
class EvaluateRequest(Request["Evaluation"]):
    """Score an individual, or the full model, on one split of a task, in this process. The result is stored.

    Under other settings the store has another evaluation.

    Raises:
        UserError: there is no such task or split, a setting can't be changed like that, or the model can't be had.
        StoreError: there is no such store, search or individual.
    """

    individual: Individual
    _: KW_ONLY
    task: Task
    split: Split = "test"
    search: WhoseModel = None
    model: ModelPath = None
    overrides: Loading = ()


@record
class AnswersRequest(Request["Answers"]):
    """Show prompts, right answers, and what the full model and individuals answer, side by side. Nothing is stored.

    Raises:
        UserError: there is no such task or split, individuals are of different models, or one can't be run.
        StoreError: there is no such store or individual.
    """

    individuals: Annotated[
        Sequence[str],
        Field(min_length=1, description="SEARCH:INDEX of individuals of one model, or `full` alone."),
        Flag(metavar="INDIVIDUAL...|full"),
    ]
    _: KW_ONLY
    task: Task
    split: Split = "test"
    limit: Annotated[
        int | None, Field(ge=1, description="Show at most this many rows. Without `only`, no more than these are run.")
    ] = 10
    only: Annotated[
        Literal["differing", "wrong", "lost", "gained"] | None,
        Field(
            description="Show only rows where an individual says something else than the full model; isn't wholly "
            "right; is worth less than the full model; is worth more. The whole split is run."
        ),
    ] = None
    search: WhoseModel = None
    model: ModelPath = None
    device: HeldOn = None
    dtype: HeldAs = None


@record
class PromptsRequest(Request["list[AskedRow]"]):
    """Show what a model is asked and what is scored of its answers, chat template and special tokens included.

    No weights are needed, and nothing is run.

    Raises:
        UserError: there is no such task or split, or the model's config or tokenizer can't be had.
        StoreError: there is no such store or individual.
    """

    individual: Individual
    _: KW_ONLY
    task: Task
    split: Split = "test"
    limit: Annotated[int | None, Field(ge=1, description="Show at most this many rows.")] = 10
    search: WhoseModel = None
    model: ModelPath = None


@record
class AnalyseRequest(Request["Analysis"]):
    """Count which experts a task's prompts activate, with which weights and which together, before and after.

    Raises:
        UserError: there is no such task or split, or the individual can't be run.
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef
    _: KW_ONLY
    task: Task
    split: Split = "dev"
    tokens: Annotated[
        int | None, Field(ge=1, description="Stop after about this many tokens. All are run if this is left out.")
    ] = None
    model: ModelPath = None


@record
class ExportRequest(Request["ExportReport"]):
    """Write an individual as a checkpoint that `transformers` loads; verified layer by layer, from its files.

    Raises:
        ExportError: the checkpoint failed its verification; its files are kept as `DIRECTORY.unverified`.
        UserError: the folder is taken, the model can't be had, or the form can't express the individual.
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef
    directory: Annotated[str | Path, Field(description="New folder of the checkpoint."), Flag(metavar="DIR", kind=Path)]
    _: KW_ONLY
    form: Annotated[
        Literal["stock", "native"] | None,
        Field(
            description="Write a plain `transformers` checkpoint, or one with its own modelling code. `stock` is taken "
            "where it is exact if this is left out."
        ),
    ] = None
    model: ModelPath = None
    device: HeldOn = None
    dtype: HeldAs = None


@record
class ImportEepRequest(Request["list[Imported]"]):
    """Store coefficient files as individuals, one search per file, ready to be shown, evaluated and exported.

    No weights are needed before an individual is run: name them then, with `model`. Without a run configuration its
    originals stay on the host, in the checkpoint's dtype, and prompts for a Mixtral are wrapped as the authors do it.

    Raises:
        UserError: a file can't be read or doesn't fit the model. The store is left alone then.
        StoreError: the store can't be opened.
    """

    files: Annotated[
        Sequence[str | Path],
        Field(min_length=1, description="The EEP authors' coefficient files (.pth)."),
        Flag(metavar="FILE...", kind=list[Path]),
    ]
    _: KW_ONLY
    experts_of: Annotated[
        str,
        Field(description="What they are for: a checkpoint, a folder with its config.json, or a run configuration."),
        Flag(metavar="MODEL_OR_CONFIG"),
    ]
    active: Annotated[
        int | None, Field(ge=1, description="Experts per token, the model's number if this is left out.")
    ] = None
    router_space: Annotated[
        Literal["probs", "logits"], Field(description="What the router mappings are applied to.")
    ] = "probs"
    overrides: Annotated[
        Overrides,
        Field(description="Change settings of `model.*` or `engine.*` that the individuals are evaluated with."),
        SETTINGS,
    ] = ()


def _sizes(given: Any) -> Any:
    """Batch sizes as the command line has them, `1,8,32`, or as they are."""
    if not isinstance(given, str):
        return given
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--batch-sizes: {given!r} are not whole numbers from 1 on, such as 1,8,32")
    return sorted({int(part) for part in parts})


@record
class ProfileRequest(Request["ProfileReport"]):
    """Measure size, memory and speed of models as plain `transformers` runs them, beside the full model.

    Individuals are exported to a temporary folder (TMPDIR) first. Nothing is stored.

    Raises:
        UserError: a folder is none, models are of different searches' models, or can't be profiled like that.
        StoreError: there is no such store, search or individual.
        ProfileError: a model's process died, or an export isn't what was measured.
    """

    models: Annotated[
        Sequence[str],
        Field(min_length=1, description="Individuals (SEARCH:INDEX), `full`, and folders of checkpoints."),
        Flag(metavar="INDIVIDUAL|full|DIR..."),
    ]
    _: KW_ONLY
    batch_sizes: Annotated[
        Sequence[Annotated[int, Field(ge=1)]],
        BeforeValidator(_sizes),
        Field(min_length=1, description="Sequences at once, ascending: 1,8,32 if this is left out."),
        Flag(metavar="N,N...", kind=str),
    ] = (1, 8, 32)
    prompt_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            description="Length of arbitrary prompts. Half of the model's positions, at most 512, if this is left out.",
        ),
    ] = None
    new_tokens: Annotated[
        int | None,
        Field(
            ge=1, description="Decoding steps after the prompt. The task's limit, or 32 without one, if it is left out."
        ),
    ] = None
    task: Annotated[str | None, Field(description="Run this task's prompts instead of arbitrary tokens.")] = None
    split: Split = "test"
    repeats: Annotated[int, Field(ge=1, description="Timed runs per batch size; medians count.")] = 5
    device: Annotated[Device, Field(description="Where to run the models.")] = "auto"
    threads: Annotated[
        int | None, Field(ge=1, description="Threads of torch on the CPU, torch's own number if this is left out.")
    ] = None
    search: WhoseModel = None
    model: ModelPath = None
    trust_remote_code: Annotated[bool, Field(description="Let modelling code in a checkpoint's folder run.")] = False
    dtype: HeldAs = None
    apart: Annotated[
        bool | None,
        Field(
            description="Hold one model in memory at a time (drift isn't shared), or all of them. All are held where "
            "there is ample room if this is left out."
        ),
        Flag("--apart/--together"),
    ] = None
