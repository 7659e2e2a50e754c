"""Commands that list searches, individuals, lineages and tasks, compare them, and show them as pictures and pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

import moevolve
from moevolve.evaluators.errors import one_line
from moevolve.evaluators.scales import SCALES, scales_title
from moevolve.evaluators.types import SCORED
from moevolve.search.cli._requests import DEFAULT_STORE, JsonOption, StoreOption, shows, takes
from moevolve.search.cli.output.console import output, print_json, print_table
from moevolve.search.cli.output.genome import print_genome
from moevolve.search.genomes.registry import legend, stored_section
from moevolve.search.interface.individuals import LineageRequest
from moevolve.search.interface.rankings import BestRequest, ParetoRequest
from moevolve.search.interface.report import PlotRequest, ReportRequest
from moevolve.search.interface.searches import CompareRequest, EffectsRequest, SearchesRequest
from moevolve.search.server.serve import ServeRequest
from moevolve.search.text import date_time, parameter_count, score_lines

if TYPE_CHECKING:
    from moevolve import (
        BestRow,
        Comparison,
        Effects,
        IndividualDetail,
        LineageGraph,
        Pareto,
        SearchOverview,
        SearchSummary,
    )


# Characters of an error that a cell shows; `show` has all of it.
_LONGEST_REASON = 50


@shows(SearchesRequest)
def searches(found: list[SearchSummary], _: SearchesRequest) -> None:
    rows = [
        [
            row.search.name,
            row.state + (f" ({one_line(row.reason, _LONGEST_REASON)})" if row.reason else ""),
            ", ".join(row.tasks),
            SCALES[row.scale].text(row.best_fitness),
            *map(SCALES[row.mean_scale].text, (row.dev, row.test)),
            "-" if row.size is None else f"{row.size:.1%}",
        ]
        for row in found
    ]
    scores = ">best on search | >winner's dev | >test | >winner's size"
    title = scales_title(scale for row in found for scale in (row.scale, row.mean_scale))
    print_table(title, f"search | status | tasks | {scores}", rows)


@shows(CompareRequest)
def compare(found: Comparison, _: CompareRequest) -> None:
    if found.settings:
        headings = ["setting", *(one.name for one in found.searches)]
        rows = [[row.name, *row.values] for row in found.settings]
        print_table("settings that differ", " | ".join(headings), rows)
    rows = [
        [
            one.name,
            one.status,
            f"{one.individuals:,}",
            f"{one.hours:.2f}",
            SCALES[one.scale].phrase(one.best),
        ]
        for one in found.searches
    ]
    print_table("searches", "search | status | >individuals | >hours | >best on search", rows)
    if not found.models:
        output.print("no search has finished: there are no winners to compare", soft_wrap=True)
        return
    models = [
        [
            "\n".join((model.label, *model.refs)),
            *("-" if (score := model.score(split)) is None else "\n".join(score_lines(score)) for split in SCORED),
            parameter_count(model.parameters),
            "-" if model.corrected is None else f"{model.corrected:.3g}",
            "" if model.test is None else model.test.test,
        ]
        for model in found.models
    ]
    headings = ["winners", *(f">{split}" for split in SCORED), ">parameters", ">p (Holm)", "test"]
    title = scales_title(score.scale for model in found.models for score in model.scores)
    print_table(f"{title}, with 95 % intervals", " | ".join(headings), models)
    output.print(found.note, soft_wrap=True)


@shows(EffectsRequest)
def effects(found: Effects, _: EffectsRequest) -> None:
    scale = SCALES[found.scale]
    rows = [
        [
            f"{each.phase}: {each.operator}",
            f"{each.individuals:,}",
            f"{each.bests:,}",
            f"{each.better} of {each.children}" if each.children else "-",
            scale.change(each.gain),
            "-" if each.low is None or each.high is None else scale.changes(each.low, each.high),
        ]
        for each in found.operators
    ]
    headings = "made by | >individuals | >new bests | >better than parents | >gain over best parent | >95 % interval"
    print_table(f"gains {scale.differences}", headings, rows)


def _differing(genomes: Sequence[str]) -> tuple[list[str], str]:
    """Return what each of some genomes has that not all of them have, and what all have."""
    parts = [genome.split(", ") for genome in genomes]
    shared = [part for part in (parts[0] if len(parts) > 1 else ()) if all(part in each for each in parts)]
    return [", ".join(part for part in each if part not in shared) for each in parts], ", ".join(shared)


def _print_shared(shared: str, genomes: Iterable[str]) -> None:
    """Print what genomes in a table have in common, and what is abbreviated."""
    if shared:
        output.print(f"all of them: {shared}", soft_wrap=True)
    meaning = legend((shared, *genomes))
    if meaning:
        output.print(f"{meaning}; `moevolve show INDIVIDUAL` says more", soft_wrap=True)


@shows(BestRequest)
def best(found: list[BestRow], request: BestRequest) -> None:
    genomes, shared = _differing([row.summary for row in found])
    tasks = {row.task for row in found}
    several = len(tasks) != 1
    rows = [
        [
            row.ref if row.ranked_by == request.split else f"{row.ref}\nby {row.ranked_by}",
            *([row.task] if several else []),
            *map(SCALES[row.scale].text, (row.search_score, row.dev_score, row.test_score)),
            f"{parameter_count(row.parameters)} ({100 * row.parameters / row.parameters_full:.0f} %)",
            genome,
        ]
        for row, genome in zip(found, genomes, strict=True)
    ]
    headings = f"individual{' | task' if several else ''} | >search | >dev | >test | >parameters | genome"
    ranked = f"ranked by {request.split}"
    if any(row.ranked_by != request.split for row in found):
        ranked += ", then by search where that score is missing"
    title = "".join(f"{task}: " for task in tasks if not several) + scales_title(row.scale for row in found)
    print_table(f"{title}; {ranked}", headings, rows)
    _print_shared(shared, genomes)


@shows(ParetoRequest)
def pareto(found: Pareto, _: ParetoRequest) -> None:
    scale = SCALES[found.scale]
    genomes, shared = _differing([row.summary for row in found.front])
    rows = [
        [row.ref, scale.text(row.score), parameter_count(getattr(row, found.size)), genome]
        for row, genome in zip(found.front, genomes, strict=True)
    ]
    if found.full is not None and found.front:
        whole = parameter_count(getattr(found.front[0], f"{found.size}_full"))
        rows.append(["full model", scale.text(found.full), whole, ""])
    headings = f"individual | >{found.split} | >{found.size.replace('_', ' ')} | genome"
    print_table(f"{found.task}: {scale.title}", headings, rows, [len(found.front) - 1])
    _print_shared(shared, genomes)
    if not found.front and found.split != "search":
        output.print(f"no candidate was scored on {found.split}; all have a score on --split search", soft_wrap=True)


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="SEARCH|INDIVIDUAL",
            help="A search by name or id, or an individual as SEARCH:INDEX, for example demo:137.",
        ),
    ],
    genome: Annotated[
        bool, typer.Option("--genome", help="Show what an individual keeps of each layer, and its settings.")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    as_json: JsonOption = False,
) -> None:
    """Show what the store has on a search (settings, phases, best), or everything on one individual."""
    if genome:
        (print_json if as_json else print_genome)(moevolve.genome(store, name))
        return
    if ":" not in name:
        overview = moevolve.overview(store, name)
        (print_json if as_json else _print_overview)(overview)
        return
    detail = moevolve.show(store, name)
    if as_json:
        print_json(detail)
        return
    _print_facts(_description(detail))
    rows = [
        [
            item.task,
            item.split,
            SCALES[item.scale].text(item.score),
            "-" if item.gold_logprob is None else f"{item.gold_logprob:.4f}",
            str(item.examples_seen),
            one_line(item.failure or "", _LONGEST_REASON),
        ]
        for item in detail.evaluations
    ]
    headings = "task | split | >score | >gold log-prob | >examples | failure"
    print_table(scales_title(item.scale for item in detail.evaluations), headings, rows)


def _print_facts(facts: Iterable[tuple[str, str]]) -> None:
    for label, value in facts:
        output.print(f"{label:>13}  ", style="bold", end="")
        output.print(value, soft_wrap=True)


def _print_overview(found: SearchOverview) -> None:
    search, control, scale = found.search, found.control, SCALES[found.scale]
    best = "none yet" if found.best is None else f"{found.best[0]}: {scale.phrase(found.best[1])} on search"
    full = "" if found.full is None else f"; full model: {scale.phrase(found.full)}"
    driver = "none" if control.owner is None or not control.alive else f"{control.owner}: {control.stage or 'starting'}"
    reason = search.reason(control.alive)
    _print_facts(
        [
            ("search", f"{search.name} (id {search.id}), of {date_time(search.created_at)}"),
            ("status", search.state(control.alive) + (f" ({' '.join(reason.split())})" if reason else "")),
            *found.facts,
            ("driver", driver),
            ("best", f"{best}{full}"),
            *([] if search.winner is None else [("winner", f"{search.name}:{search.winner}")]),
        ]
    )
    rows = [
        [
            each.phase,
            "-" if each.planned is None else f"{each.planned:,}",
            f"{each.individuals:,}",
            f"{each.failed:,}",
            scale.text(each.best),
        ]
        for each in found.phases
    ]
    print_table(scale.title, "phase | >planned | >made | >failed | >best on search", rows)


def _description(detail: IndividualDetail) -> list[tuple[str, str]]:
    record, kind = detail.individual, detail.search.genome_kind
    section = stored_section(kind)
    share = 100 * record.parameters / record.parameters_full
    used = 100 * record.active_parameters / record.active_parameters_full
    shown = SCALES[detail.scale].phrase(record.fitness)
    fitness = shown if record.fitness is None else f"{shown} (tie-break {record.tie_break:.4f})"
    return [
        ("individual", detail.ref),
        ("genome", f"{kind}: {record.summary}"),
        ("made by", f"{record.operator} in phase {record.phase}, depth {record.depth}"),
        ("parents", ", ".join(f"{detail.search.name}:{parent}" for parent in record.parents) or "none"),
        (section.parts, section.count_format.format(experts=record.experts, active=record.active)),
        ("parameters", f"{record.parameters:,} of {record.parameters_full:,} ({share:.1f} %)"),
        ("active", f"{record.active_parameters:,} of {record.active_parameters_full:,} ({used:.1f} %)"),
        ("status", record.status + (f" ({record.failure_kind}): {record.failure}" if record.failure else "")),
        ("fitness", fitness),
        ("content hash", record.content_hash),
        ("exports", ", ".join(f"{export.path} ({export.form})" for export in detail.exports) or "none"),
    ]


@shows(LineageRequest)
def lineage(graph: LineageGraph, _: LineageRequest) -> None:
    parents: dict[int, list[int]] = {node.index: [] for node in graph.nodes}
    for parent, child in graph.edges:
        parents[child].append(parent)
    genomes, shared = _differing([node.summary for node in graph.nodes])
    rows = [
        [
            f"{graph.search_name}:{node.index}",
            f"{node.phase}: {node.operator}",
            ", ".join(map(str, parents[node.index])),
            SCALES[graph.scale].text(node.fitness),
            genome,
        ]
        for node, genome in zip(graph.nodes, genomes, strict=True)
    ]
    headings = "individual | made by | parents | >fitness | genome"
    print_table(SCALES[graph.scale].title, headings, rows)
    _print_shared(shared, genomes)


def tasks(as_json: JsonOption = False) -> None:
    """List the tasks that a configuration can name; NAME@FITNESS is NAME under another fitness (demo-span@kl)."""
    found = moevolve.tasks()
    if as_json:
        print_json(found)
        return
    rows = [[task.name, task.fitness, ", ".join(task.splits), task.description] for task in found]
    print_table(None, "task | fitness | splits | description", rows)


@takes(PlotRequest)
def plot(request: PlotRequest, store: StoreOption = DEFAULT_STORE) -> None:
    moevolve.ask(store, request)
    output.print(f"wrote {request.path}", soft_wrap=True)


@takes(ReportRequest)
def report(request: ReportRequest, store: StoreOption = DEFAULT_STORE) -> None:
    moevolve.ask(store, request)
    output.print(f"wrote {request.path}", soft_wrap=True)


@takes(ServeRequest)
def serve(request: ServeRequest) -> None:
    moevolve.ask(None, request, moevolve.Observer(on_note=partial(output.print, soft_wrap=True)))
