"""The configuration of a search as frozen, checked values; `files.py` reads it."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePath
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from moevolve.evaluators.preparation.registry import load_task
from moevolve.evaluators.tasks.config import TaskConfig
from moevolve.evaluators.types import PreparedSplit, Split
from moevolve.search.genomes.registry import AnyGenomeSection
from moevolve.search.settings.phases import EvolutionSection, Phase, StrategySection
from moevolve.search.settings.section import Section
from moevolve.store.session import without_password
from moevolve.workers.contract.settings import EngineConfig, ModelConfig


class TaskSection(Section):
    """A task by name or YAML path.

    Attributes:
        name: name of a packaged task, or path of a task file; `@` and a fitness kind may follow. `lm_eval:` in front
            means a task of lm-evaluation-harness.
        weight: its weight in the fitness.
        counts: use this many examples of a split instead of the task file's number.
    """

    name: str
    weight: float = Field(1.0, gt=0)
    counts: dict[Split, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)

    @property
    def sets_aside(self) -> bool:
        """Whether a search that measures takes rows away from `search` for it: the task has none of their own.

        Raises:
            UserError: no such task, or its file is wrong.
        """
        return "calibration" not in load_task(self.name).splits

    def task(self, split: Split, calibrating: bool = False) -> TaskConfig:
        """The task, with this section's number of examples of one split; of all splits for `calibration`.

        Args:
            split: what the task is asked for.
            calibrating: whether rows to measure on are set aside where the task has none.

        Raises:
            UserError: no such task, its file is wrong, or it has no such split to count.
        """
        task = load_task(self.name)
        # Rows of `calibration` are compared with all others, and may be those that `search` leaves.
        counts = {name: n for name, n in self.counts.items() if split in (name, "calibration")}
        task = task.with_counts(counts) if counts else task
        return task.with_calibration() if calibrating else task

    def prepared(self, split: Split, fitness: str | None = None, calibrating: bool = False) -> PreparedSplit:
        """One split of the task, under another fitness if one is given and isn't the task's own.

        `calibrating` is as in `task`.

        Raises:
            UserError: as `task`, or the split's data can't be had or rendered.
        """
        from moevolve.evaluators.preparation.prepare import prepare_split  # not sooner: it loads `datasets`

        task = self.task(split, calibrating)
        return prepare_split(task if fitness in (None, task.fitness) else task.with_fitness(fitness), split)


class WorkersSection(Section):
    """Execution only: what a candidate scores doesn't depend on it, so all of it may differ between launch and resume.

    Whether a candidate gets to a score can: one that outruns `timeout_s`, or whose workers die `max_attempts` times, is
    recorded as failed, and `moevolve retry` takes that back.

    Attributes:
        count: worker actors; `auto` means as many as the cluster has room for, nodes that join later included.
        min: with `auto`, workers that it keeps, whatever other searches want; 0 may wait.
        max: with `auto`, the most that it takes, and never more than it has individuals under evaluation; None sets no
            other limit.
        priority: of searches that share a cluster and a store, those of a higher one get workers beyond `min` first;
            those of the same one share evenly.
        num_cpus: CPUs that Ray reserves per worker.
        num_gpus: GPUs (also fractions) that Ray reserves per worker.
        max_attempts: a candidate that kills its worker, or outruns its time, this many times is recorded as failed.
        timeout_s: an evaluation running longer is ended, its worker with it.
        start_timeout_s: how long the first worker may wait for room, and may then take to load the model; one that
            takes longer to load while others are ready is started again. Calibrations get as much.
        address: Ray address to join (`auto`, `host:port`); None starts Ray on this machine.
        activation_cache_mb: MiB of host memory per worker in which hidden states of candidates are kept for others with
            the same first layers; 0 keeps none.
        lease_s: how long a search stays this driver's when it can't be heard from, before another may take it over.
    """

    count: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    min: int = Field(1, ge=0)
    max: int | None = Field(None, ge=1)
    priority: int = 0
    num_cpus: float = Field(1, ge=0)
    num_gpus: float = Field(0, ge=0)
    max_attempts: int = Field(3, ge=1)
    timeout_s: float = Field(3600, gt=0)
    start_timeout_s: float = Field(3600, gt=0)
    address: str | None = None
    activation_cache_mb: int = Field(512, ge=0)
    lease_s: float = Field(30, ge=1)

    @model_validator(mode="after")
    def _between(self) -> Self:
        if self.count != "auto" and (self.min, self.max) != (1, None):
            raise ValueError(f"`min` and `max` go with `count: auto`, not with {self.count}")
        if self.max is not None and self.min > self.max:
            raise ValueError(f"`min` is {self.min}, more than `max`, which is {self.max}")
        return self

    @property
    def least(self) -> int:
        """Workers that it always has."""
        return self.min if self.count == "auto" else self.count

    def most(self, useful: int) -> int:
        """The most workers that it takes when so many are of use; never fewer than it always has."""
        if self.count != "auto":
            return self.count
        return max(self.min, useful if self.max is None else min(self.max, useful))

    @property
    def activation_cache_bytes(self) -> int:
        """`activation_cache_mb` in bytes."""
        return self.activation_cache_mb << 20


class FinalSection(Section):
    """What happens once the last individual is evaluated.

    Attributes:
        rerank: the best this many on `search` are scored on `dev`, which picks the winner; 0 skips it.
        test: score the full model and the winner on `test` for the final table.
        random_baselines: this many of the random initial individuals are scored on `test` too, as the random-pruning
            baseline of the final table.
        held_out: names of tasks that are no part of the fitness; full model and winner are scored on their `test` split
            too, to see whether what was searched for generalises.
    """

    rerank: int = Field(5, ge=0)
    test: bool = True
    random_baselines: int = Field(0, ge=0)
    held_out: tuple[str, ...] = ()


_HASHED_VERSION = 3
"""Of what a configuration's hash is made of; another number where the same settings come to mean another population."""


def _without_folder(name: str) -> str:
    """The last part of an absolute path, and of a task file's; any other name as it is."""
    prefix, _, path = name.rpartition(":")
    return f"{prefix}:{PurePath(path).name}".lstrip(":") if path.startswith("/") else name


LONGEST_NAME = 200
"""Most characters of a search's name, which becomes part of file names and URLs."""
SearchName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=LONGEST_NAME)]


class RunConfig(Section):
    """The configuration of one search, whole.

    Attributes:
        name: name of the search in its store.
        model: the checkpoint and how it is loaded.
        genome: the kind of genome, and the settings of that kind.
        engine: settings of the inference engine that runs the prompts.
        seed: seed of all of the search's randomness.
        tasks: the tasks whose scores make up the fitness; empty for individuals that were imported.
        strategy: the search strategy of phases that name none of their own.
        phases: stretches of the search, in order; empty for individuals that were imported.
        window: individuals that may be under evaluation at once.
        tie_break: the criterion between equal scores, before the smaller index decides: the mean log-probability of the
            gold answers, the mean `agreement` with the full model (one more evaluation per candidate, of the same
            prompts), or nothing (`index`).
        workers: how many workers evaluate, and where; changes no score.
        final: what is measured after the last individual.
        store: SQLAlchemy URL of the store.
    """

    name: SearchName
    model: ModelConfig
    genome: AnyGenomeSection
    engine: EngineConfig = EngineConfig()
    seed: int = Field(0, ge=0)
    tasks: tuple[TaskSection, ...]
    strategy: StrategySection = EvolutionSection()
    phases: tuple[Phase, ...]
    window: int = Field(8, ge=1)
    tie_break: Literal["gold_logprob", "agreement", "index"] = "gold_logprob"
    workers: WorkersSection = WorkersSection()
    final: FinalSection = FinalSection()
    store: str = "sqlite:///moevolve.db"

    @classmethod
    def imported(cls, name: str, model: ModelConfig, genome: AnyGenomeSection, engine: EngineConfig) -> Self:
        """The configuration of individuals that no search of ours made: it has neither phases nor tasks.

        Raises:
            ValidationError: the name can't be a search's.
        """
        final = FinalSection(rerank=0, test=False)
        return cls(
            name=name, model=model, genome=genome, engine=engine, tasks=(), phases=(), tie_break="index", final=final
        )

    @property
    def is_imported(self) -> bool:
        """Whether it is the configuration of imported individuals, so that there is nothing to run."""
        return not self.phases

    def canonical_json(self) -> str:
        """The configuration as stored with the search: whole, so that another default later on changes nothing here.

        The password of its store is left out: others may read what is stored.
        """
        content = self.model_dump(mode="json")
        content["store"] = without_password(content["store"])
        return json.dumps(content, sort_keys=True)

    def stored_over(self, stored: str) -> str:
        """What is stored of this configuration where the search was recorded already: of that only `final` changes."""
        return json.dumps(json.loads(stored) | {"final": self.final.model_dump(mode="json")}, sort_keys=True)

    @property
    def config_hash(self) -> str:
        """SHA-256 (hex) of what determines the population: execution settings, name and store are left out.

        So are the model's revision and own dtype, and the folders that model and tasks are in: which checkpoint and
        which task they are, their fingerprints tell, from whatever machine a search is launched or resumed.
        """
        content = self.model_dump(mode="json", exclude={"name", "workers", "store", "final"})
        for found in ("revision", "own_dtype"):
            del content["model"][found]
        content["model"]["path"] = _without_folder(self.model.path)
        for task in content["tasks"]:
            task["name"] = _without_folder(task["name"])
        versioned = {"version": _HASHED_VERSION, **content}
        return hashlib.sha256(json.dumps(versioned, sort_keys=True).encode()).hexdigest()

    @model_validator(mode="after")
    def _tasks_differ(self) -> Self:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError(f"tasks: a task is named twice in {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _held_out_is_not_searched_on(self) -> Self:
        for name in self.final.held_out:
            if name in {task.name for task in self.tasks}:
                raise ValueError(f"final.held_out: {name} is one of `tasks`, so its search split isn't held out")
        if self.final.held_out and not self.final.test:
            raise ValueError("final.held_out: tasks are scored on `test`; set final.test: true")
        return self

    @model_validator(mode="after")
    def _repair_comes_last(self) -> Self:
        kinds = [phase.kind for phase in self.phases]
        if kinds[:1] == ["repair"] or "repair" in kinds[:-1]:
            raise ValueError(
                "phases: a repair phase repairs what the phases before it found, so it is the last of several"
            )
        return self

    @model_validator(mode="after")
    def _prune_before_merge(self) -> Self:
        kinds = [phase.kind for phase in self.phases if phase.kind in ("prune", "merge")]
        if kinds != sorted(kinds, key=("prune", "merge").index):
            raise ValueError("phases: a prune phase can't follow a merge phase, merged experts have no retained ones")
        return self
