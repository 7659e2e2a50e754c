"""The contents of a report, read from the store."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import yaml

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.scales import ScaleName
from moevolve.search.config.files import parse_stored_config
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.contract.base import Genome
from moevolve.search.genomes.repaired import base_genome
from moevolve.search.loop.final_table import FinalTable, build_final_table
from moevolve.search.loop.scores import full_fitness
from moevolve.search.results.effects import Effects, effects
from moevolve.search.running.candidates import find_candidate
from moevolve.search.text import date_time
from moevolve.store.costs import SearchCosts
from moevolve.store.errors import parsing
from moevolve.store.reader import StoreReader
from moevolve.store.records import IndividualRecord, LineageNode, SearchRecord

# Longest reason of a failure in characters.
_MAX_REASON = 160


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Individuals that failed for the same reason: the first one's message, shortened, and the first one's name."""

    reason: str
    count: int
    example: str


@dataclass(frozen=True)
class ReportContents:
    """Everything in a report except its figures.

    Attributes:
        settings: The configuration as YAML, without secrets.
        facts: Names and values of the search's settings: model, tasks, genome, phases ...
        counts: Number of individuals by status, made, and planned (None for an imported search).
        full: Fitness of the full model.
        scale: Scale that fitness is shown on.
        line: Main line of the best individual's ancestors, oldest first; empty without one.
        failures: The most frequent first.
        genome: None without a best individual, or if genomes can't be read.
        notes: Remarks on what is missing or special.
        commands: Purpose and text of commands that continue from here.
        provenance: Name and value of ids, dates and fingerprints.
    """

    search: SearchRecord
    settings: str = field(repr=False)
    facts: tuple[tuple[str, str], ...] = field(repr=False)
    counts: dict[str, int | None]
    history: Sequence[IndividualRecord] = field(repr=False)
    full: float | None
    scale: ScaleName
    standings: FinalTable = field(repr=False)
    line: tuple[LineageNode, ...] = field(repr=False)
    failures: tuple[FailureGroup, ...]
    effects: Effects = field(repr=False)
    costs: SearchCosts
    genome: Genome | None = field(repr=False)
    notes: tuple[str, ...]
    commands: tuple[tuple[str, str], ...] = field(repr=False)
    provenance: tuple[tuple[str, str], ...] = field(repr=False)


def gather(store: StoreReader, name: str) -> ReportContents:
    """Collect the contents of a search's report. Nothing is evaluated or written.

    Raises:
        StoreError: the search doesn't exist.
    """
    search = store.search(name)
    config = parse_stored_config(search.config, search.name)
    history = store.history(search.id)
    table = build_final_table(store, search, config, history)
    candidate, notes = None, []
    if table.winner is not None:
        try:
            candidate = find_candidate(store, table.winner, weights=False)
        except UserError as error:
            notes.append(f"The searched matrices aren't shown: {' '.join(str(error).split())}")
    statuses = [row.status for row in history]
    return ReportContents(
        search=search,
        settings=settings_text(search.config, search.name),
        facts=tuple(facts_of(store, search, config)),
        counts={
            "planned": None if config.is_imported else sum(phase.evaluations for phase in config.phases),
            "made": len(history),
            **{status: statuses.count(status) for status in ("ok", "failed", "pending")},
        },
        history=history,
        full=full_fitness(store, search),
        scale=store.scales(search.id).fitness,
        standings=table,
        line=() if table.winner is None else tuple(store.ancestors(table.winner).main_line),
        failures=group_failures(search, history),
        effects=effects(store, search.id),
        costs=store.costs(search),
        genome=None if candidate is None or candidate.genome is None else base_genome(candidate.genome),
        notes=tuple(notes),
        commands=tuple(_commands(search, table, config)),
        provenance=tuple(_provenance(store, search)),
    )


def settings_text(stored: str, name: str) -> str:
    """Return the stored configuration of the search of a name as YAML; raise a DamagedError if it isn't JSON."""
    with parsing(f"the configuration of search {name}"):
        return yaml.safe_dump(json.loads(stored), sort_keys=False, allow_unicode=True, width=100)


def facts_of(store: StoreReader, search: SearchRecord, config: RunConfig) -> list[tuple[str, str]]:
    """Return a search's settings by name: model, tasks, genome, phases, strategy, seed, engine, software."""
    model, engine = config.model, config.engine
    facts = [("model", f"{model.path} ({model.parameter_dtype})")]
    tasks = [task for task in store.search_tasks(search.id) if task.split == "search"]
    weighted = len({task.weight for task in tasks}) > 1
    names = [f"{task.task} (weight {task.weight:g})" if weighted else task.task for task in tasks]
    facts.append(("tasks" if len(names) > 1 else "task", ", ".join(names) or "none"))
    words = {True: "yes", False: "no"}
    genome = {
        key: words[value] if isinstance(value, bool) else value
        for key, value in config.genome.model_dump().items()
        if key != "kind" and value is not None
    }
    facts.append(("genome", f"{config.genome.kind}: " + ", ".join(f"{key} {value}" for key, value in genome.items())))
    if not config.is_imported:
        phases = []
        for phase in config.phases:
            initial = f", {phase.initial} of them initial" if phase.initial else ""
            own = f", by {phase.strategy}" if phase.strategy else ""
            phases.append(f"{phase.kind}: {phase.evaluations} individuals{initial}{own}")
        facts.append(("phases", "; ".join(phases)))
        facts += [("strategy", f"{config.strategy}, window {config.window}"), ("seed", str(config.seed))]
    batch = f"{engine.batch_tokens:,} tokens per batch, {engine.threads} thread" + "s" * (engine.threads > 1)
    cut = "" if engine.max_prompt_tokens is None else f", prompts cut to {engine.max_prompt_tokens} tokens"
    return [*facts, ("engine", batch + cut), ("software", f"moevolve {search.software_version}")]


def group_failures(search: SearchRecord, history: Sequence[IndividualRecord]) -> tuple[FailureGroup, ...]:
    """Failed individuals by reason, the most frequent first. Reasons that differ only in numbers count as one."""
    groups: dict[str, list[IndividualRecord]] = {}
    for row in history:
        if row.status == "failed":
            groups.setdefault(re.sub(r"\d+(\.\d+)?", "#", _reason(row)), []).append(row)
    found = sorted(groups.values(), key=lambda rows: (-len(rows), rows[0].index))
    return tuple(
        FailureGroup(_reason(rows[0])[:_MAX_REASON], len(rows), f"{search.name}:{rows[0].index}") for rows in found
    )


def _reason(row: IndividualRecord) -> str:
    return " ".join((row.failure or "no reason was recorded").split())


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
            commands.append(("its experts at work", f"moevolve analyse {ref} --task {task}"))
    return commands


def _provenance(store: StoreReader, search: SearchRecord) -> list[tuple[str, str]]:
    rows = [
        ("search", f"{search.name} (id {search.id})"),
        ("status", search.status + (f": {search.status_reason}" if search.status_reason else "")),
        ("created", f"{date_time(search.created_at)} UTC"),
        ("last change", f"{date_time(search.updated_at)} UTC"),
        ("configuration (hash of the population's settings)", search.config_hash),
        ("model (fingerprint)", search.model_fingerprint),
        ("engine (fingerprint)", search.engine_fingerprint),
    ]
    rows += [
        (f"task {task.task}, {task.split} (fingerprint)", task.task_fingerprint)
        for task in store.search_tasks(search.id, auxiliary=True)
    ]
    return [*rows, ("this page", f"moevolve {version('moevolve')}")]
