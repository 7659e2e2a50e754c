"""Requests that look up what a store holds, and show it as a picture or a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, InstanceOf

from moevolve.search.config.run import LONGEST_NAME
from moevolve.search.requests.parameters import IndividualRef, ScoredSplit, SearchRef, SizeUnit
from moevolve.search.requests.record import Flag, Request, about, record
from moevolve.search.results.expert_usage import Analysis
from moevolve.store.records import CourseAxis, SearchStatus

if TYPE_CHECKING:  # the answers
    from moevolve.search.loop.final_table import FinalTable
    from moevolve.search.requests.answers import GenomeView, Pareto, TradeOffs
    from moevolve.search.requests.tables import Rows
    from moevolve.search.results.contrast import Contrast
    from moevolve.search.results.effects import Effects
    from moevolve.store.records import BestRow, Control, IndividualDetail, LineageGraph, SearchRecord, SearchSummary

Count = Annotated[int | None, Field(ge=0, lt=2**31)]


SearchOrder = Literal["oldest", "newest", "name", "best", "dev", "test"]
"""The scores put the highest first: the best on `search`, or the winner's on `dev` or `test`."""


@record
class SearchesRequest(Request["Rows[SearchSummary]"]):
    """List the searches of the store."""

    _: KW_ONLY
    text: Annotated[
        str | None, about("List only searches with this in name, tags, note, model or genome.", max_length=200)
    ] = None
    status: Annotated[SearchStatus | None, about("List only searches with this status.")] = None
    tag: Annotated[str | None, about("List only searches with this tag.", max_length=LONGEST_NAME)] = None
    task: Annotated[str | None, about("List only searches with this task.", max_length=200)] = None
    archived: Annotated[bool, about("List the archived searches instead."), Flag("--archived")] = False
    sort: Annotated[
        SearchOrder,
        about(
            "Order: by age, by name, or the highest score first (`best` on the split search; the winner's "
            "on `dev` or `test`)."
        ),
    ] = "oldest"


@record
class LabelRequest(Request["SearchRecord"]):
    """Tag a search, note something on it, or archive it; nothing of what it found changes.

    Raises:
        StoreError: there is no such store or search.
        UserError: nothing is to be changed.
    """

    needs_one = ("tags", "note", "archived")
    search: SearchRef
    _: KW_ONLY
    tags: Annotated[
        str | None,
        about("Its tags, separated by blanks; empty removes all.", max_length=500, pattern=r"^[^\x00-\x1f\x7f]*$"),
    ] = None
    note: Annotated[str | None, about("Its note; empty removes it.", max_length=4000, pattern=r"^[^\x00]*$")] = None
    archived: Annotated[bool | None, about("Whether listings leave it out."), Flag("--archive/--restore")] = None


@record
class SearchRequest(Request["SearchRecord"]):
    """Look up one search."""

    search: SearchRef


@record
class ControlRequest(Request["Control"]):
    """Look up which process runs a search, how far it is, and which state users ask for."""

    search: SearchRef


@record
class FinalTableRequest(Request["FinalTable"]):
    """Look up a search's winner and its final table, as far as they are measured."""

    search: SearchRef


@record
class ContrastRequest(Request["Contrast"]):
    """Show searches beside each other: their courses, the settings that differ, their winners' scores and paired tests.

    Searches that differ only in the seed are a group, whose mean and range are shown. Nothing is evaluated.

    Raises:
        StoreError: there is no such store or search.
    """

    searches: Annotated[
        Sequence[Annotated[str, Field(max_length=LONGEST_NAME)]],
        about("Names or ids of the searches; tests are against the first.", min_length=1, max_length=64),
        Flag(metavar="SEARCH...", kind=list[str]),
    ]
    _: KW_ONLY
    by: Annotated[
        CourseAxis, about("What courses are shown over: evaluated individuals, or hours in which the search ran.")
    ] = "evaluations"


@record
class EffectsRequest(Request["Effects"]):
    """Estimate what moved the score in a search: operators, layers, experts and settings, with 95 % intervals.

    Scores are explained by a sum over what genomes choose, fitted by Bayesian linear regression. Nothing is evaluated.

    Raises:
        StoreError: there is no such store or search.
        UserError: the search was stored without the facts of its model.
    """

    search: SearchRef
    _: KW_ONLY
    limit: Annotated[int, about("List at most this many options, the surest ones first.", ge=1, le=1000)] = 20
    genes: Annotated[
        bool, about("List the varying settings and sizes of each individual, too, for a chart."), Flag("--genes")
    ] = False


@record
class BestRequest(Request["Rows[BestRow]"]):
    """List the best configurations per task.

    Raises:
        StoreError: there is no such store, task or search.
    """

    _: KW_ONLY
    task: Annotated[str | None, about("Task to rank for; all if left out.", max_length=200)] = None
    experts: Annotated[Count, about("List only configurations with this many experts, or blocks.")] = None
    active: Annotated[Count, about("List only configurations with this many active experts.")] = None
    search: Annotated[str | None, about("List only individuals of this search.", max_length=LONGEST_NAME)] = None
    by: Annotated[
        ScoredSplit,
        about("Split whose scores rank. `dev` falls back to `search` for individuals that were not re-ranked."),
    ] = "dev"
    limit: Annotated[int, about("List at most this many configurations per task.", ge=1, le=1000)] = 10


@record
class ParetoRequest(Request["Pareto"]):
    """List the configurations that no other one beats in both score and size, with models to compare them with.

    Raises:
        StoreError: there is no such store, task or search.
    """

    task: Annotated[str, about("Task of the scores.", max_length=200)]
    _: KW_ONLY
    split: Annotated[ScoredSplit, about("Split of the scores.")] = "search"
    search: Annotated[str | None, about("List only individuals of this search.", max_length=LONGEST_NAME)] = None
    size: Annotated[
        SizeUnit,
        about(
            "What sizes are: parameters; bytes of the weights in the dtype of the search (the newest one "
            "with the task, if none is named); or FLOPs per token, two for each parameter that a token uses."
        ),
    ] = "parameters"
    candidates: Annotated[bool, about("Count all candidates by size and score, too."), Flag("--candidates")] = False


@record
class TradeOffsRequest(Request["TradeOffs"]):
    """List the individuals of a search that no other one beats on all tasks, to choose among them.

    Raises:
        StoreError: there is no such store or search.
    """

    search: SearchRef
    _: KW_ONLY
    split: Annotated[ScoredSplit, about("Split of the scores.")] = "search"


@record
class ShowRequest(Request["IndividualDetail"]):
    """Show everything that the store has on one individual.

    Raises:
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef


@record
class GenomeRequest(Request["GenomeView"]):
    """Show an individual's genome in columns: what it keeps of each layer, and its settings.

    Raises:
        StoreError: there is no such store or individual.
        UserError: the search was stored without the facts of its model.
    """

    individual: IndividualRef
    _: KW_ONLY
    against: Annotated[
        str | None,
        about("Show the differences from this individual, too.", max_length=LONGEST_NAME + 20),
        Flag(metavar="INDIVIDUAL"),
    ] = None


@record
class LineageRequest(Request["LineageGraph"]):
    """Show the ancestors of an individual, back to those without parents.

    Raises:
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef
    _: KW_ONLY
    descendants: Annotated[bool, about("Follow children instead of ancestors.")] = False
    depth: Annotated[int | None, about("Follow at most this many generations.", ge=0, le=10_000)] = None


@record
class _Drawing(Request[Any]):
    search: SearchRef
    _: KW_ONLY
    individual: Annotated[
        str | None, about("Draw this individual's genome instead of the best one's.", max_length=LONGEST_NAME + 20)
    ] = None


@record
class PlotRequest(_Drawing, Request[bytes]):
    """Draw a search: scores over evaluations, and the searched parameters of one individual (matrices, masks ...)."""

    _: KW_ONLY
    form: Annotated[Literal["svg", "png", "pdf"], about("Format of the picture.")] = "svg"


@record
class PlotFileRequest(_Drawing, Request[None]):
    """Draw a search: scores over evaluations, and the searched parameters of one individual (matrices, masks ...).

    Raises:
        UserError: there is nothing to draw yet, or the file can't be written.
        StoreError: there is no such store, search or individual.
    """

    path: Annotated[Path, about("Picture to write (.png, .svg, .pdf)."), Flag("-o --output")]


@record
class ReportRequest(Request[bytes]):
    """Make a page about a search: scores, figures, lineage, cost, how to repeat it. Nothing is evaluated."""

    search: SearchRef
    _: KW_ONLY
    limit: Annotated[int, about("List this many of the best individuals.", ge=1, le=1000)] = 5


@record
class ReportFileRequest(ReportRequest):
    """Write a page about a search: scores, figures, lineage, cost, how to repeat it. Nothing is evaluated.

    The answer is the final table as the page has it; its `gaps` are the missing measurements.

    Raises:
        UserError: the analysis is of another search, or the file can't be written.
        StoreError: there is no such store or search.
    """

    path: Annotated[Path, about("HTML file to write."), Flag("-o --output", "FILE")]
    _: KW_ONLY
    analysis: Annotated[
        Path | InstanceOf[Analysis] | None,
        about(
            "Folder that `analyse -o` wrote, to show too. Python also takes an analysis itself; a server takes neither."
        ),
        Flag("--analysis", "DIR", Path),
    ] = None
