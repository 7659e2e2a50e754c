"""What a report says, gathered from the store."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import yaml

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.figures.lineage import main_line
from moevolve.search.genomes.contract.base import Genome
from moevolve.search.loop.final_table import Entry, FinalTable, Scorer, standings
from moevolve.search.loop.scores import full_fitness
from moevolve.search.loop.setup import set_aside_note
from moevolve.search.operations.subject import Subject, find_subject, start_of
from moevolve.search.requests.answers import Analysis
from moevolve.search.settings.phases import (
    EvolutionSection,
    NevergradSection,
    PhaseConfig,
    StrategySection,
    SurrogateSection,
)
from moevolve.store.costs import SearchCosts
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualRecord, LineageGraph, LineageNode, SearchRecord

_REASON = 160


@dataclass(frozen=True, slots=True)
class Leader:
    """One of the best individuals, with its fitness and what made it."""

    entry: Entry
    fitness: float
    operator: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Individuals that failed for one reason, numbers in it apart."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class Contents:
    """All of a report but its figures.

    Attributes:
        search: the search.
        config: its configuration.
        settings: the same as YAML, without secrets.
        facts: (what, value) pairs: what was searched.
        counts: individuals by status, and how many the configuration asks for (None for imported ones).
        history: its individuals.
        full: fitness of the full model.
        standings: the final table.
        leaders: the best few by fitness.
        graph: ancestors of the best; None without a best.
        line: its main line, oldest first.
        failures: by reason, the most frequent first.
        costs: evaluations and seconds.
        subject: the best with its genome; None without a best, or without its model.
        start: genome of the method's own start, if it has one.
        notes: what is particular about this report.
        commands: (what for, command) pairs.
        provenance: (what, value) pairs.
        analysis: of experts, if one was given.
    """

    search: SearchRecord
    config: RunConfig = field(repr=False)
    settings: str = field(repr=False)
    facts: tuple[tuple[str, str], ...] = field(repr=False)
    counts: dict[str, int | None]
    history: Sequence[IndividualRecord] = field(repr=False)
    full: float | None
    standings: FinalTable = field(repr=False)
    leaders: tuple[Leader, ...] = field(repr=False)
    graph: LineageGraph | None = field(repr=False)
    line: tuple[LineageNode, ...] = field(repr=False)
    failures: tuple[Failure, ...]
    costs: SearchCosts
    subject: Subject | None = field(repr=False)
    start: Genome | None = field(repr=False)
    notes: tuple[str, ...]
    commands: tuple[tuple[str, str], ...] = field(repr=False)
    provenance: tuple[tuple[str, str], ...] = field(repr=False)
    analysis: Analysis | None = field(repr=False)


def gather(store: StoreReader, name: str, limit: int = 5, analysis: Analysis | None = None) -> Contents:
    """Everything a report says of a search; nothing is evaluated and nothing written.

    Args:
        store: where the search is.
        name: of the search, or its id.
        limit: how many of the best individuals are listed.
        analysis: of one of its individuals, to be shown.

    Raises:
        StoreError: no such search.
        UserError: the analysis is of another search.
    """
    search = store.search(name)
    config = parse_stored_config(search.config)
    if analysis is not None and analysis.search_id != search.id:
        raise UserError(f"the analysis is of {analysis.ref}, which is no individual of search {search.name}")
    history = store.history(search.id)
    table = standings(store, search, config, history)
    subject, start, notes = _subject(store, table.winner, history)
    graph = None if table.winner is None else store.ancestors(table.winner)
    nodes = {} if graph is None else {node.index: node for node in graph.nodes}
    return Contents(
        search=search,
        config=config,
        settings=settings_text(search.config),
        facts=tuple(_facts(store, search, config)),
        counts=_counts(config, history),
        history=history,
        full=full_fitness(store, search),
        standings=table,
        leaders=tuple(_leaders(store, search, config, limit)),
        graph=graph,
        line=() if graph is None else tuple(nodes[index] for index in main_line(graph)),
        failures=failures_of(search, history),
        costs=store.costs(search),
        subject=subject,
        start=start,
        notes=(*notes, *_set_aside(store, search, config)),
        commands=tuple(_commands(search, table, config)),
        provenance=tuple(_provenance(store, search)),
        analysis=analysis,
    )


def settings_text(stored: str) -> str:
    """A stored configuration as YAML."""
    return yaml.safe_dump(json.loads(stored), sort_keys=False, allow_unicode=True, width=100)


def _subject(
    store: StoreReader, ref: str | None, history: Sequence[IndividualRecord]
) -> tuple[Subject | None, Genome | None, list[str]]:
    """The best with its genome and the genome of the start, or a note on why they can't be had."""
    if ref is None:
        return None, None, []
    try:
        subject = find_subject(store, ref, weights=False)
    except (UserError, OSError) as error:
        return None, None, [f"The searched matrices are left out: {' '.join(str(error).split())}"]
    return subject, start_of(subject, history), []


def _set_aside(store: StoreReader, search: SearchRecord, config: RunConfig) -> list[str]:
    """A line for each task whose `search` gave rows to measure on, if its data are still what they were."""
    records = store.search_tasks(search.id, beside=True)
    measured = {task.task_fingerprint for task in records if task.split == "calibration"}
    notes = []
    for section in config.tasks if measured else ():
        try:
            split = section.prepared("calibration", calibrating=True) if section.sets_aside else None
        except (UserError, OSError):
            continue
        if split is not None and split.fingerprint in measured:
            notes.append(set_aside_note(split.task, len(split.examples)))
    return notes


def _facts(store: StoreReader, search: SearchRecord, config: RunConfig) -> list[tuple[str, str]]:
    model, engine = config.model, config.engine
    facts = [("model", f"{model.path} ({model.parameter_dtype})")]
    tasks = [task for task in store.search_tasks(search.id) if task.split == "search"]
    weighs = len({task.weight for task in tasks}) > 1
    names = [f"{task.task} (weight {task.weight:g})" if weighs else task.task for task in tasks]
    facts.append(("tasks" if len(names) > 1 else "task", ", ".join(names) or "none"))
    genome = {key: value for key, value in config.genome.model_dump().items() if key != "kind" and value is not None}
    facts.append(("genome", f"{config.genome.kind}: " + ", ".join(f"{key} {_word(v)}" for key, v in genome.items())))
    if not config.is_imported:
        facts += [("phases", "; ".join(_phase(phase) for phase in config.phases))]
        strategy = config.strategy
        facts += [("strategy", f"{_strategy(strategy)}, window {config.window}"), ("seed", str(config.seed))]
    batch = f"{engine.batch_tokens:,} tokens per batch, {engine.threads} thread" + "s" * (engine.threads > 1)
    cut = "" if engine.max_prompt_tokens is None else f", prompts cut to {engine.max_prompt_tokens} tokens"
    return [*facts, ("engine", batch + cut), ("software", f"moevolve {search.software_version}")]


def _strategy(section: StrategySection) -> str:
    match section:
        case EvolutionSection():
            return f"{section.kind} ({section.mode})"
        case NevergradSection():
            return f"{section.kind} ({section.optimizer})"
        case SurrogateSection():
            return section.kind


def _phase(phase: PhaseConfig) -> str:
    initial = f", {phase.initial} of them initial" if phase.initial else ""
    own = f", by {_strategy(phase.strategy)}" if phase.strategy else ""
    return f"{phase.kind}: {phase.evaluations} individuals{initial}{own}"


def _word(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _counts(config: RunConfig, history: Sequence[IndividualRecord]) -> dict[str, int | None]:
    statuses = [row.status for row in history]
    planned = None if config.is_imported else sum(phase.evaluations for phase in config.phases)
    return {"planned": planned, "made": len(history)} | {
        status: statuses.count(status) for status in ("ok", "failed", "pending")
    }


def _leaders(store: StoreReader, search: SearchRecord, config: RunConfig, limit: int) -> list[Leader]:
    scorer = Scorer(store, search, config)
    leaders = []
    for row in store.best_of_search(search.id, limit):
        detail = store.individual(f"{search.name}:{row.index}")
        one = detail.individual
        scorer.learn(detail.evaluations)
        scores, sizes = scorer.scores(one.phenotype_hash), (one.parameters, one.active_parameters)
        entry = Entry("", detail.ref, scores, *sizes, one.summary)
        leaders.append(Leader(entry, float(row.fitness or 0.0), f"{one.phase}: {one.operator}"))
    return leaders


def failures_of(search: SearchRecord, history: Sequence[IndividualRecord]) -> tuple[Failure, ...]:
    """Failed individuals by reason, the most frequent first; numbers don't tell reasons apart."""
    groups: dict[str, list[IndividualRecord]] = {}
    for row in history:
        if row.status == "failed":
            reason = " ".join((row.failure or "no reason was recorded").split())
            groups.setdefault(re.sub(r"\d+(\.\d+)?", "#", reason), []).append(row)
    found = sorted(groups.values(), key=lambda rows: (-len(rows), rows[0].index))
    return tuple(
        Failure(
            " ".join((rows[0].failure or "no reason was recorded").split())[:_REASON], len(rows), _ref(search, rows)
        )
        for rows in found
    )


def _ref(search: SearchRecord, rows: Sequence[IndividualRecord]) -> str:
    return f"{search.name}:{rows[0].index}"


def _commands(search: SearchRecord, table: FinalTable, config: RunConfig) -> list[tuple[str, str]]:
    name = shlex.quote(search.name)
    commands = []
    if not config.is_imported:
        commands.append(("search again: save the settings below as run.yaml", "moevolve launch run.yaml --name again"))
        if search.status != "finished":
            commands.append(("go on with this search", f"moevolve resume {name}"))
    if table.winner is not None:
        ref = shlex.quote(table.winner)
        commands += [
            ("write the best as a checkpoint", f"moevolve export {ref} ./{name}-model"),
            ("all that is known of it", f"moevolve show {ref}"),
            ("where it comes from", f"moevolve lineage {ref}"),
        ]
        if table.tasks:
            names = [section.name for section in config.tasks] or list(table.tasks)
            task = shlex.quote(names[0])
            commands += [
                ("its experts at work, for this page too", f"moevolve analyse {ref} --task {task} -o ./analysis"),
                ("this page again", f"moevolve report {name} -o report.html --analysis ./analysis"),
            ]
    return commands


def _provenance(store: StoreReader, search: SearchRecord) -> list[tuple[str, str]]:
    rows = [
        ("search", f"{search.name} (id {search.id})"),
        ("status", search.status + (f": {search.status_reason}" if search.status_reason else "")),
        ("created", f"{search.created_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("last change", f"{search.updated_at:%Y-%m-%d %H:%M:%S} UTC"),
        ("configuration (hash of what makes the population)", search.config_hash),
        ("model (fingerprint)", search.model_fingerprint),
        ("engine (fingerprint)", search.engine_fingerprint),
    ]
    rows += [
        (f"task {task.task}, {task.split} (fingerprint)", task.task_fingerprint)
        for task in store.search_tasks(search.id, beside=True)
    ]
    return [*rows, ("this page", f"moevolve {version('moevolve')}")]
