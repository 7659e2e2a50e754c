"""What a task's YAML file may say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.base import Fitness
from moevolve.evaluators.fitness.registry import DEFAULT_FITNESS, FITNESSES, known_fitness, task_fitnesses
from moevolve.evaluators.matching.registry import MATCHERS, known_matcher
from moevolve.evaluators.metrics import known_metric
from moevolve.evaluators.types import Example, HarnessTask, Matching, Positions, PreparedSplit, Split
from moevolve.evaluators.yaml_files import explain_validation

Count = Annotated[int, Field(ge=1)]
Scalar = str | int | bool
_ASIDE = 4
"""Of so many rows of `search` one is set aside where a task has no rows of its own to measure on."""


class TaskFileSection(BaseModel):
    """A section of a task: immutable, and without other keys than its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Source(TaskFileSection):
    """Where the rows are: a dataset of the Hugging Face hub, or local JSONL files.

    Attributes:
        hub: dataset id on the hub (`aps/super_glue`).
        config: the hub dataset's configuration, if it has several.
        revision: branch, tag or commit of the hub dataset.
        files: for each source split (any name) one or several JSONL files, relative to the YAML's folder or absolute.
        lm_eval: a task of lm-evaluation-harness; set by `moevolve.evaluators.harness.tasks` only.
    """

    hub: str | None = None
    config: str | None = None
    revision: str | None = None
    files: dict[str, tuple[Path, ...]] | None = None
    lm_eval: str | None = None

    @field_validator("files", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {split: [paths] if isinstance(paths, str | Path) else paths for split, paths in value.items()}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.lm_eval is not None and self.hub is None and self.files is None:
            return self
        if (self.hub is None) == (self.files is None) or self.lm_eval is not None:
            raise ValueError("give either `hub` or `files`")
        if self.files is not None and (self.config or self.revision):
            raise ValueError("`config` and `revision` belong to `hub`, not to `files`")
        seen: dict[Path, str] = {}
        for split, paths in (self.files or {}).items():
            if not paths:
                raise ValueError(f"`files.{split}` names no file")
            for path in paths:
                where = path.resolve()
                if where in seen:
                    raise ValueError(f"{path} stands under both `{seen[where]}` and `{split}`; list it once and let "
                                     "the splits choose different rows of it")  # fmt: skip
                seen[where] = split
        return self


class Selection(TaskFileSection):
    """Which rows of a source split one of our splits takes; the same rows on every machine.

    The filters come first, then the order (file order, or shuffled by `seed`), then `offset` and `count`, counted
    within each group of equal `per` values when `per` is given. `indices` pick among the rows that these leave.

    Attributes:
        source: the source split (YAML key `from`).
        where: column -> accepted values. The column may be a dotted path into a nested one; a list there has a value
            if one of its items is that.
        where_not: column -> values left out.
        min_chars: column of text -> fewest characters a row must have there, white space at both ends not counted
            (leaves empty lines and headings out of running text).
        seed: shuffle with this seed; None keeps the file's order.
        per: a column; `offset` and `count` then hold for each of its values (a stratified sample).
        offset: rows skipped.
        count: rows taken; None takes all that are left.
        indices: numbers, from 0, among the rows chosen by everything above, not together with `seed` or `per`; a task
            file may name a JSON file that lists them.
        part: of the rows chosen so far, the last quarter (`aside`, at least one row) or those before it (`kept`); set
            by `TaskConfig.with_calibration` only.
    """

    source: str = Field(alias="from")
    where: dict[str, tuple[Scalar, ...]] = {}
    where_not: dict[str, tuple[Scalar, ...]] = {}
    min_chars: dict[str, Count] = {}
    seed: int | None = None
    per: str | None = None
    offset: int = Field(default=0, ge=0)
    count: Count | None = None
    indices: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    part: Literal["kept", "aside"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.indices is None:
            return self
        if self.seed is not None or self.per:
            raise ValueError("`indices` can't be combined with `seed` or `per`")
        if not self.indices or len(set(self.indices)) != len(self.indices):
            raise ValueError("`indices` must name at least one row, and none twice")
        return self

    @property
    def stated(self) -> int | None:
        """How many rows these are; None if that depends on the data."""
        chosen = len(self.indices) if self.indices else self.count if self.per is None else None
        return None if chosen is None else len(self.part_of(range(chosen)))

    def part_of(self, rows: Sequence[int]) -> Sequence[int]:
        """What of the rows chosen so far `part` leaves."""
        if self.part is None:
            return rows
        border = len(rows) - max(1, len(rows) // _ASIDE)
        return rows[border:] if self.part == "aside" else rows[:border]


class MatchingConfig(TaskFileSection):
    """How an answer is compared with the references; see `moevolve.evaluators.matching`.

    Attributes:
        kind: name of the matcher.
        stop: where an answer ends; None for what belongs to the matcher, a line break for most.
    """

    kind: str = "exact"
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        return known_matcher(value)

    def build(self) -> Matching:
        return Matching(kind=self.kind, stop=MATCHERS[self.kind].stop if self.stop is None else self.stop)


class TaskConfig(TaskFileSection):
    """One task: data, prompt, answers, matching and fixed splits.

    Attributes:
        name: the task's name in commands, tables and the store; a task file's stem.
        description: one line for `moevolve tasks`.
        source: where the rows are.
        splits: the rows of `calibration`, `search`, `dev` and `test`; a split that is absent can't be used. Rows of
            `calibration` need the columns of the prompt only.
        fields: extra variables of the templates: name -> dotted path into the row, or several of which the first that
            exists counts (hub and original files name things differently).
        labels: column -> {value in the data: what it becomes}; keys are compared as text (`0`, `true`, `entailment`).
        prompt: Jinja2 template of the text the model is given.
        answer: Jinja2 template of the gold answer; None when `references` gives it, or when the fitness needs none.
        references: more accepted answers: a list of templates, or one Jinja2 expression whose value is a list.
        choices: the closed set of answers, given like `references`.
        matching: how generated text is compared.
        metric: what turns per-example outcomes into the score; None for the one that belongs to the fitness.
        fitness: what the outcomes are: a name in `moevolve.evaluators.fitness.registry.FITNESSES`, where each says
            which answers or choices it needs. One that reads texts reads the prompt, with the answer behind it if there
            is one.
        positions: for a fitness that compares with the full model, whose predictions: those of the whole `text`, of the
            gold `answer`, or of the full model's own `greedy` answer (up to `max_new_tokens`, the end token or a stop
            string), which replaces the gold one. None for the `answer` where the task has one, and otherwise for what
            belongs to the fitness.
        max_new_tokens: greedy decoding stops after this many tokens.
        answer_prefix: text between prompt and answer when an answer is teacher-forced, and in shots.
        system: what the model is told before everything else.
        shots: solved examples before every prompt: rows with the fields that `prompt` and `answer` use, or which rows
            of a source split (with `per`, only those that have the row's own value in that column). They are turns of
            the conversation under a chat template, and text with empty lines between them without one. Rows of the
            splits whose prompt is a shot's are left out. A fitness that reads whole texts shows none, and no `system`.
        chat: whether the prompts are wrapped in the model's chat template, if it has one.
        window: for a fitness that reads whole texts: the rows of a split, in their order and an empty line apart, are
            one text, which the model's tokenizer makes tokens of and which is cut into windows of so many; the rest at
            its end, shorter than a window, is dropped. None reads each row's text by itself.
    """

    name: str = Field(min_length=1)
    description: str = ""
    source: Source
    splits: dict[Split, Selection] = Field(min_length=1)
    fields: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    labels: dict[str, dict[str, str]] = Field(default_factory=dict)
    prompt: str = Field(min_length=1)
    answer: str | None = None
    references: str | tuple[str, ...] | None = None
    choices: str | tuple[str, ...] = ()
    matching: MatchingConfig = MatchingConfig()
    metric: str | None = None
    fitness: str = DEFAULT_FITNESS
    positions: Positions | None = None
    max_new_tokens: Count = 16
    answer_prefix: str = " "
    system: str = ""
    shots: Selection | tuple[dict[str, Any], ...] = ()
    chat: bool = True
    window: Annotated[int, Field(ge=2)] | None = None

    _origin: str = PrivateAttr(default="")

    @field_validator("fields", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: [path] if isinstance(path, str) else path for name, path in value.items()}

    @field_validator("metric")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        return None if value is None else known_metric(value)

    @field_validator("shots", mode="before")
    @classmethod
    def _rows_or_selection(cls, value: Any) -> Any:
        # Told apart here: a message that names both forms' errors is no help.
        if isinstance(value, Mapping):
            try:
                chosen = Selection.model_validate(value)
            except ValidationError as error:
                raise ValueError(explain_validation(error, value, Selection.model_fields)) from None
            if chosen.count is None and chosen.indices is None:
                raise ValueError("say how many shots with `count`, or which rows with `indices`")
            return chosen
        if isinstance(value, Selection) or (
            isinstance(value, list | tuple) and all(isinstance(row, Mapping) for row in value)
        ):
            return value
        raise ValueError("give a list of rows, or `from` and which rows of it: {from: train, seed: 0, count: 2}")

    @field_validator("fitness", mode="before")
    @classmethod
    def _known_fitness(cls, value: object) -> str:
        return known_fitness(value)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        kind = self.kind
        if kind.uses_matching if self.source.lm_eval is not None else kind.reads == "harness":
            *others, last = (f"@{name}" for name in task_fitnesses() if not FITNESSES[name].uses_matching)
            raise ValueError("a task of lm-evaluation-harness is judged by it, and no other task is: name it "
                             f"`lm_eval:TASK`; {', '.join(others)} and {last} may follow")  # fmt: skip
        if not self.labelled and kind.needs_references:
            raise ValueError("give `answer` (a template) or `references` (a list), or both")
        if self.compared == "answer" and not self.labelled:
            raise ValueError("positions `answer` needs `answer` or `references`; without them say `greedy` or `text`")
        if kind.reads == "choices" and not self.choices:
            raise ValueError(f"fitness `{self.fitness}` compares the likelihood of choices: give `choices`")
        if MATCHERS[self.matching.kind].needs_choices and kind.uses_matching and not self.choices:
            raise ValueError(f"matching kind `{self.matching.kind}` looks for one of the choices: give `choices`")
        if self.shots and not self.labelled:
            raise ValueError("`shots` show answers: give `answer` or `references`")
        if self.window is not None and not self.reads_whole:
            raise ValueError(f"`window` cuts running text, of which fitness `{self.fitness}` with positions "
                             f"`{self.compared}` reads none: use fitness `perplexity`, or `kl` or `agreement` with "
                             "positions `text`, or leave `window` out")  # fmt: skip
        self._check_sources()
        return self

    @property
    def _selections(self) -> dict[str, Selection]:
        """Field -> the rows that it names."""
        named = {f"splits.{split}": selection for split, selection in self.splits.items()}
        return named | ({"shots": self.shots} if isinstance(self.shots, Selection) else {})

    def _check_sources(self) -> None:
        """Whether every split, and the shots, are of one of the source's splits."""
        if self.source.files is None:
            for field, selection in self._selections.items():
                if not selection.source.replace("_", "").replace("-", "").replace(".", "").isalnum():
                    raise ValueError(f"`{field}.from` must be a plain split name, got `{selection.source}`; "
                                     "choose rows with `offset` and `count`, so that overlaps are noticed")  # fmt: skip
        else:
            for field, selection in self._selections.items():
                if selection.source not in self.source.files:
                    known = ", ".join(self.source.files)
                    raise ValueError(f"`{field}.from` is `{selection.source}`, but `source.files` has: {known}")

    @property
    def origin(self) -> str:
        """The YAML file this came from, for messages (the task's name when there is none)."""
        return self._origin or f"task {self.name}"

    @property
    def kind(self) -> Fitness:
        """Its fitness."""
        return FITNESSES[self.fitness]

    @property
    def scored_by(self) -> str:
        """The metric: its own, or the one that belongs to the fitness."""
        return self.metric or self.kind.metric

    @property
    def labelled(self) -> bool:
        """Whether there are gold answers."""
        return self.answer is not None or self.references is not None

    @property
    def compared(self) -> Positions:
        """Whose predictions are compared: its own `positions`, or what belongs to the fitness."""
        if not self.kind.compares:
            return "text"
        if self.positions is not None:
            return self.positions
        return "answer" if self.labelled else self.kind.positions

    @property
    def reads_whole(self) -> bool:
        """Whether prompts are running text, of which every token is read: no conversation, and nothing before them."""
        return self.kind.reads == "texts" and self.compared == "text"

    def prepared(
        self, split: Split, examples: tuple[Example, ...], harness: HarnessTask | None = None
    ) -> PreparedSplit:
        """A split with everything the task says of how its examples are scored."""
        return PreparedSplit(
            task=self.name,
            split=split,
            fitness=self.fitness,
            metric=self.scored_by,
            matching=self.matching.build(),
            max_new_tokens=self.max_new_tokens,
            answer_prefix=self.answer_prefix,
            examples=examples,
            positions=self.compared,
            harness=harness,
            system="" if self.reads_whole else self.system,
            chat=self.chat and not self.reads_whole,
            window=self.window,
        )

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], origin: str = "") -> TaskConfig:
        """Validates a parsed YAML document.

        Args:
            raw: the document.
            origin: the file, for messages.

        Raises:
            UserError: naming file and field.
        """
        try:
            task: TaskConfig = cls.model_validate(dict(raw))
        except ValidationError as error:
            raise UserError(f"{origin or 'task'}: {explain_validation(error, dict(raw), cls.model_fields)}") from None
        task._origin = origin
        return task

    def with_counts(self, counts: Mapping[Split, int]) -> TaskConfig:
        """The same task with other numbers of examples in some splits (`{"search": 64}`).

        Raises:
            UserError: the task has no such split, or its rows are listed by `indices`.
        """
        splits: dict[str, Any] = {}
        for split, selection in self.splits.items():
            splits[split] = selection.model_dump(by_alias=True, exclude_unset=True)
            if split in counts and selection.indices is not None:
                raise UserError(
                    f"{self.origin}: the rows of `{split}` are listed by `indices`, so they can't be counted"
                )
            if split in counts:
                splits[split]["count"] = counts[split]
        for split in counts:
            if split not in splits:
                raise UserError(f"{self.origin}: there is no `{split}` split; it has: {', '.join(splits)}")
        return self._changed(splits=splits)

    def with_calibration(self) -> TaskConfig:
        """The same task, with rows to measure on.

        Where it has no `calibration` split, a quarter of `search` is set aside: its last rows in its order, at least
        one. `search` keeps the others.
        """
        if "calibration" in self.splits or "search" not in self.splits:
            return self
        splits = {
            split: selection.model_dump(by_alias=True, exclude_unset=True) for split, selection in self.splits.items()
        }
        aside = {"calibration": splits["search"] | {"part": "aside"}, "search": splits["search"] | {"part": "kept"}}
        return self._changed(splits=splits | aside)

    def with_fitness(self, fitness: str) -> TaskConfig:
        """The same data and prompts under another fitness, as a task of its own, `NAME@FITNESS`.

        The metric stays if it suits the fitness as well; otherwise it becomes the one that belongs to it. A task of
        running text is read as that by every fitness that compares, rather than continued.

        Raises:
            UserError: the task lacks what the fitness needs.
        """
        suits = FITNESSES[fitness].metric == self.kind.metric
        changes = {"name": f"{self.name}@{fitness}", "fitness": fitness, "metric": self.metric if suits else None}
        whole = self.kind.reads == "texts" and self.kind.positions == "text"
        if whole and not self.labelled and self.positions is None:
            changes["positions"] = "text"
        return self._changed(**changes)

    def _changed(self, **changes: Any) -> TaskConfig:
        raw = self.model_dump(by_alias=True, exclude_unset=True) | changes
        return TaskConfig.from_mapping(raw, self._origin)
