"""The configuration of a search: frozen, validated values, which `files.py` reads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.genomes.contract.base import Genome, GenomeSpace
from moevolve.search.genomes.contract.phases import MOST_EVALUATIONS, Phase, Section, Strategy
from moevolve.search.genomes.registry import AnyGenomeSection, make_space
from moevolve.store.session import without_password
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import EngineConfig, ModelConfig


class TaskSection(Section):
    """A task by name or YAML path.

    Attributes:
        name: Name of a packaged task or path of a task file, optionally followed by `@` and a fitness kind. The prefix
            `lm_eval:` selects a task of lm-evaluation-harness.
        weight: Weight of the task in the fitness, a mean.
        counts: Numbers of examples per split that replace the task file's.
    """

    name: str
    weight: float = Field(1.0, gt=0, le=1e6)
    counts: dict[Split, Annotated[int, Field(ge=1, le=1_000_000_000)]] = Field(default_factory=dict)

    @property
    def holds_out_calibration(self) -> bool:
        """True if the task has no `calibration` split, so that a search that calibrates sets `search` rows aside."""
        return "calibration" not in load_task(self.name).splits

    @property
    def decodes(self) -> bool:
        """Whether models have to generate answers to the task with all their layers at hand; see `Fitness.decodes`."""
        task = self.task()
        return FITNESSES[task.fitness].decodes(task.max_new_tokens)

    def task(self, calibrating: bool = False) -> TaskConfig:
        """The task with this section's numbers of examples, which hold for all of its splits whichever is prepared.

        With `calibrating`, rows of `search` are set aside if the task has no `calibration` split. A `UserError` says
        that the task or split doesn't exist, or what is wrong with the task's file.
        """
        # Splits are compared with each other, and rows of `calibration` may be those that `search` leaves over.
        task = load_task(self.name)
        task = task.with_counts(self.counts) if self.counts else task
        return task.with_calibration() if calibrating else task

    def prepared(self, split: Split, calibrating: bool = False) -> PreparedSplit:
        """Load and render one split of the task; see `prepared_splits`."""
        return self.prepared_splits((split,), calibrating)[split]

    def prepared_splits(self, splits: Iterable[Split], calibrating: bool = False) -> dict[Split, PreparedSplit]:
        """Load and render several splits of the task, whose data are read once; see `task`.

        Raises:
            UserError: The same errors as `task`, or data can't be loaded or rendered.
        """
        from moevolve.evaluators.preparation.prepare import prepare_splits  # imported here because it loads `datasets`

        return prepare_splits(self.task(calibrating), splits)


_MOST_WORKERS = 100_000
_LONGEST_S = 30 * 86_400


class WorkersSection(Section):
    """Settings of execution. No score depends on them, so they may differ between launch and resume.

    A candidate can fail by them: one that exceeds `timeout_s` three times is recorded as failed, which `moevolve retry`
    undoes.

    Attributes:
        count: Number of worker actors; `auto` asks Ray for as many as can be busy at once. Those that no node has room
            for wait in Ray.
        num_cpus: CPUs that Ray reserves per worker.
        num_gpus: GPUs, or a fraction of one, that Ray reserves per worker.
        timeout_s: Time limit of an evaluation, of loading the model, of calibrating, and of finding room for the first
            worker. A worker that takes longer to evaluate or to load is replaced.
        address: Ray address to join (`auto`, `host:port`), or `local` to start Ray on this machine; None takes
            RAY_ADDRESS, which Ray sets for its jobs, and is `local` without it.
    """

    count: Annotated[int, Field(ge=1, le=_MOST_WORKERS)] | Literal["auto"] = 1
    num_cpus: float = Field(1, ge=0, le=10_000)
    num_gpus: float = Field(0, ge=0, le=1000)
    timeout_s: float = Field(3600, gt=0, le=_LONGEST_S)
    address: str | None = None

    @property
    def least(self) -> int:
        """Number of workers that a Ray on this machine must have CPUs for."""
        return 1 if self.count == "auto" else self.count

    def most(self, useful: int) -> int:
        """Return the number of workers to ask for, if `useful` of them can be busy at once."""
        return useful if self.count == "auto" else self.count

    @property
    def cluster(self) -> str | None:
        """Address of the Ray cluster to join; None if Ray is started on this machine."""
        address = self.address or os.environ.get("RAY_ADDRESS")
        return None if address in (None, "", "local") else address


class FinalSection(Section):
    """Settings of the evaluations after the last individual.

    Attributes:
        rerank: Number of individuals, the best on `search`, that are scored on `dev`, which picks the winner; 0 skips
            this.
        test: Score the full model and the winner on `test` for the final table.
        random_baselines: Number of random initial individuals that are scored on `test`, as the final table's
            random-pruning baseline.
        held_out: Names of tasks outside the fitness. The full model and the winner are scored on their `test` splits,
            to see whether the search generalises.
    """

    rerank: int = Field(5, ge=0, le=MOST_EVALUATIONS)
    test: bool = True
    random_baselines: int = Field(0, ge=0, le=MOST_EVALUATIONS)
    held_out: tuple[str, ...] = ()


# Part of every configuration's hash; raise it when the same settings come to mean another population.
_HASHED_VERSION = 3


# Most characters of a search's name, which becomes part of file names and URLs.
LONGEST_NAME = 200
SearchName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=LONGEST_NAME)]


class RunConfig(Section):
    """The complete configuration of one search.

    Attributes:
        seed: Seed of all of the search's randomness.
        tasks: Tasks whose scores make up the fitness; empty for imported individuals.
        task_aggregation: What the fitness of several tasks is: the weighted mean of their scores (`mean`,
            geometric for perplexities), or the smallest share of the unedited model's score that is left on any of them
            (`worst`).
        strategy: Strategy of the phases that don't name their own.
        phases: Phases of the search, in order; empty for imported individuals.
        window: Most individuals that may be under evaluation at once. With 8, the paper's search has as good a result
            on `test` as without a window, with 16 a worse one (`search/loop/README.md`).
        skip_phases_at: The search ends before a phase if its best individual has at least this share of the full
            model's fitness by then; None runs all phases. With a share, a phase begins only after all individuals of
            the phases before it are evaluated.
        tie_break: Criterion between equal scores, before the smaller index decides: the mean log-probability of the
            gold answers (`gold_logprob`), or nothing (`index`).
        loggers: Programs that keep experiments, which get the search's numbers; like `workers`, they may differ between
            launch and resume.
        store: SQLAlchemy URL.
    """

    __repr__ = short_repr

    name: SearchName
    model: ModelConfig
    genome: AnyGenomeSection
    engine: EngineConfig = EngineConfig()
    seed: int = Field(0, ge=0, lt=2**63)
    tasks: tuple[TaskSection, ...]
    task_aggregation: Literal["mean", "worst"] = "mean"
    strategy: Strategy = "evolution"
    phases: tuple[Phase, ...]
    window: int = Field(8, ge=1, le=100_000)
    skip_phases_at: float | None = Field(None, gt=0, le=100)
    tie_break: Literal["gold_logprob", "index"] = "gold_logprob"
    workers: WorkersSection = WorkersSection()
    final: FinalSection = FinalSection()
    loggers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()
    store: str = "sqlite:///moevolve.db"

    @classmethod
    def imported(cls, name: str, model: ModelConfig, genome: AnyGenomeSection, engine: EngineConfig) -> Self:
        """Return the configuration of imported individuals, which has neither phases nor tasks."""
        final = FinalSection(rerank=0, test=False)
        return cls(
            name=name, model=model, genome=genome, engine=engine, tasks=(), phases=(), tie_break="index", final=final
        )

    @property
    def is_imported(self) -> bool:
        """True for the configuration of imported individuals, which can't be run."""
        return not self.phases

    @property
    def on_gpu(self) -> bool:
        """Whether workers run on GPUs, whose memory isn't the host's."""
        return self.model.device != "cpu" and (self.model.device != "auto" or self.workers.num_gpus > 0)

    def space(self, facts: ModelFacts) -> GenomeSpace[Genome]:
        phases = [phase.model_copy(update={"strategy": phase.strategy or self.strategy}) for phase in self.phases]
        return make_space(self.genome, facts, phases)

    def canonical_json(self) -> str:
        """Return the configuration as stored with the search, including settings that have their default."""
        content = self.model_dump(mode="json")
        content["store"] = without_password(content["store"])  # others may read what is stored
        return json.dumps(content, sort_keys=True)

    def stored_over(self, stored: str) -> str:
        """The JSON of a recorded search with this configuration's `final` settings, the only ones that may change."""
        return json.dumps(json.loads(stored) | {"final": self.final.model_dump(mode="json")}, sort_keys=True)

    @property
    def config_hash(self) -> str:
        """SHA-256 (hex) of the settings that determine the population.

        Execution settings, loggers, the name and the store aren't part of it, nor are the model's revision and own
        dtype and the folders of model and tasks: fingerprints identify them on whatever machine a search is launched
        or resumed.
        """
        content = self.model_dump(mode="json", exclude={"name", "workers", "loggers", "store", "final"})
        for found in ("revision", "own_dtype"):
            del content["model"][found]
        for place, key in ((content["model"], "path"), *((task, "name") for task in content["tasks"])):
            prefix, _, path = place[key].rpartition(":")  # such as `lm_eval:`
            if path.startswith("/"):
                place[key] = f"{prefix}:{PurePath(path).name}".lstrip(":")
        versioned = {"version": _HASHED_VERSION, **content}
        return hashlib.sha256(json.dumps(versioned, sort_keys=True).encode()).hexdigest()

    @model_validator(mode="after")
    def _tasks_differ(self) -> Self:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"tasks: a task is named twice in {', '.join(names)}")
        for name in self.final.held_out:
            if name in names:
                raise ValueError(f"final.held_out: {name} is one of `tasks`, so its search split isn't held out")
        if self.final.held_out and not self.final.test:
            raise ValueError("final.held_out: tasks are scored on `test`; set final.test: true")
        weighted = next((task.name for task in self.tasks if task.weight != 1), None)
        if weighted is not None and self.task_aggregation == "worst":
            raise ValueError(f"task_aggregation: `worst` has no weights, and {weighted} has one; leave it out")
        return self

    @model_validator(mode="after")
    def _phases_follow_each_other(self) -> Self:
        kinds = [phase.kind for phase in self.phases]
        if kinds[:1] == ["repair"] or "repair" in kinds[:-1]:
            raise ValueError("phases: a repair phase repairs what others found, so it is the last of several")
        if "merge" in kinds and "prune" in kinds[kinds.index("merge") :]:
            raise ValueError("phases: a prune phase can't follow a merge phase, whose experts are mixtures")
        if len({phase.repair.continuations for phase in self.phases if phase.repair is not None}) > 1:
            raise ValueError("phases: all repairs of a search have the same rows; give them the same `continuations`")
        return self
