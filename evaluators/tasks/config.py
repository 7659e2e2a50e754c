"""The settings of a task: the content of its YAML file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.base import Fitness
from moevolve.evaluators.fitness.kinds import DEFAULT_FITNESS, FITNESSES, task_fitnesses
from moevolve.evaluators.matching.registry import MATCHERS
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.tasks.installed import DOMAINS, SOURCE_SPLITS
from moevolve.evaluators.text_files import Row
from moevolve.evaluators.types import Chat, Example, HarnessTask, Matching, Positions, PreparedSplit, Split
from moevolve.evaluators.yaml_files import explain_validation

Count = Annotated[int, Field(ge=1)]
Scalar = str | int | bool


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str | Path) else value


def _one_of(what: str, names: Collection[str]) -> AfterValidator:
    """Return a check that a name is one of `names`, to which an extension may add some."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"unknown {what} `{name}`; known: {', '.join(names)}")
        return name

    return AfterValidator(check)


Paths = Annotated[tuple[Path, ...], BeforeValidator(_as_list)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]

# Every how many rows of `search` one is set aside for `calibration` in a task without that split.
_CALIBRATION_PART = 4


class TaskFileSection(BaseModel):
    """A section of a task: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Source(TaskFileSection):
    """The source of a task's rows: a dataset of the Hugging Face hub, local JSONL files, or text of installed packages.

    Attributes:
        hub: Dataset id on the hub (`aps/super_glue`).
        config: Configuration of the hub dataset, if it has several.
        files: Name of every source split -> its JSONL files, relative to the YAML's folder or absolute.
        installed: Domain of `moevolve.evaluators.tasks.installed`, whose rows come with Python, NumPy and torch.
        lm_eval: Task of lm-evaluation-harness; set by `moevolve.evaluators.harness.tasks` only.
    """

    hub: str | None = None
    config: str | None = None
    revision: str | None = None
    files: dict[str, Annotated[Paths, Field(min_length=1)]] | None = None
    installed: Annotated[str, _one_of("domain of installed text", DOMAINS)] | None = None
    lm_eval: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(place is not None for place in (self.hub, self.files, self.installed, self.lm_eval)) != 1:
            raise ValueError("give one of `hub`, `files` and `installed`")
        if self.hub is None and (self.config or self.revision):
            raise ValueError("`config` and `revision` belong to `hub`")
        seen: dict[Path, str] = {}
        for split, paths in (self.files or {}).items():
            for path in paths:
                where = path.resolve()
                if where in seen:
                    raise ValueError(f"{path} stands under both `{seen[where]}` and `{split}`; list it once and let "
                                     "the splits choose different rows of it")  # fmt: skip
                seen[where] = split
        return self


class Selection(TaskFileSection):
    """The rows of a source split that one of the task's splits uses; the same rows on every machine.

    Filters are applied first, then the order (file order, or shuffled by `seed`), then `offset` and `count`, within
    each group of equal `per` values if `per` is given, then `indices`.

    Attributes:
        source: Name of the source split (`from` in YAML).
        where: Column -> accepted values. The column may be a dotted path into a nested one; a list in it matches if one
            of its items does.
        where_not: Column -> rejected values.
        seed: Seed of the shuffle; None keeps the file's order.
        per: Column of a stratified sample: `offset` and `count` apply to each of its values.
        offset: Number of rows to skip.
        count: Number of rows to take; None takes all the rest.
        indices: Row numbers, from 0, among the rows selected so far; not with `seed` or `per`. A task file may name a
            JSON file that lists them.
        part: Part of the rows selected so far: the last quarter, at least one row (`aside`), or the rows before it
            (`kept`); set by `TaskConfig.with_calibration` only.
    """

    source: str = Field(alias="from")
    where: dict[str, tuple[Scalar, ...]] = {}
    where_not: dict[str, tuple[Scalar, ...]] = {}
    seed: int | None = None
    per: str | None = None
    offset: int = Field(default=0, ge=0)
    count: Count | None = None
    indices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] | None = None
    part: Literal["kept", "aside"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.indices is not None and (self.seed is not None or self.per):
            raise ValueError("`indices` can't be combined with `seed` or `per`")
        if self.indices is not None and len(set(self.indices)) != len(self.indices):
            raise ValueError("`indices` names a row twice")
        return self

    @property
    def row_count(self) -> int | None:
        """Number of rows; None if it depends on the data."""
        chosen = len(self.indices) if self.indices else self.count if self.per is None else None
        return None if chosen is None else len(self.take_part(range(chosen)))

    def take_part(self, rows: Sequence[int]) -> Sequence[int]:
        """Apply `part` to the rows selected so far."""
        if self.part is None:
            return rows
        boundary = len(rows) - max(1, len(rows) // _CALIBRATION_PART)
        return rows[boundary:] if self.part == "aside" else rows[:boundary]


class MatchingConfig(TaskFileSection):
    """The comparison of answers with the references; see `moevolve.evaluators.matching`.

    Attributes:
        stop: Stop strings of an answer; None for the matcher's default, mostly a line break.
        function, source: See `Matching`. In a file, `function: FILE.py:NAME` stands for both and for the kind.
    """

    kind: Annotated[str, _one_of("matching kind", MATCHERS)] = "exact"
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    function: str = ""
    source: str = Field(default="", repr=False)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.kind == "function") != bool(self.function and self.source):
            raise ValueError("kind `function` and `function: FILE.py:NAME` go together")
        return self

    def build(self) -> Matching:
        stop = MATCHERS[self.kind].stop if self.stop is None else self.stop
        return Matching(self.kind, stop, self.function, self.source)


class TaskConfig(TaskFileSection):
    """One task: data, prompt, answers, matching and fixed splits.

    Attributes:
        name: Name in commands, tables and the store; the stem of the task's file.
        description: One-line description in `moevolve tasks`.
        splits: Rows of `calibration`, `search`, `dev` and `test`; any of them may be missing. Rows of `calibration`
            need only the columns of the prompt.
        fields: Additional variables of the templates: name -> dotted path into the row, or several paths; the first
            that exists counts (the hub and original files use different names).
        labels: Column -> {value in the data: its replacement}; keys are compared as text (`0`, `true`, `entailment`).
        prompt: Jinja2 template of the prompt.
        answer: Jinja2 template of the gold answer; None if `references` has it or the fitness needs none.
        references: Further accepted answers: a list of templates, or a Jinja2 expression whose value is a list.
        choices: Closed set of answers, in the same form as `references`.
        fitness: Name in `moevolve.evaluators.fitness.kinds.FITNESSES`. A fitness that reads texts reads the prompt
            followed by the answer, if there is one.
        positions: See `PreparedSplit`; a `greedy` answer ends at `max_new_tokens`, the end token or a stop string. None
            means `answer` if the task has one, else the fitness's default.
        max_new_tokens: Largest number of tokens in a generated answer.
        answer_prefix: Text between prompt and answer when an answer is teacher-forced, and in shots.
        shots: Few-shot examples before every prompt: rows with the fields that `prompt` and `answer` use, or a
            selection from a source split (with `per`, only rows that share the row's value in that column). They are
            turns of a conversation under a chat template, otherwise text separated by empty lines. Rows of the splits
            whose prompt is a shot's are left out. A fitness that reads whole texts uses neither shots nor `system`.
        turns: Column with the turns of a row's conversation before the prompt: a list of `{role, content}`, a `system`
            turn first if there is one, then `user` and `assistant` in turn. They follow the shots.
        chat: Put prompts into the model's chat template, if it has one; `rendered` if they have been put there.
        window: See `PreparedSplit`; an incomplete last window is dropped.
    """

    __repr__ = short_repr

    name: str = Field(min_length=1)
    description: str = ""
    source: Source
    splits: dict[Split, Selection] = Field(min_length=1)
    fields: dict[str, Texts] = Field(default_factory=dict)
    labels: dict[str, dict[str, str]] = Field(default_factory=dict)
    prompt: str = Field(min_length=1)
    answer: str | None = None
    references: str | tuple[str, ...] | None = None
    choices: str | tuple[str, ...] = ()
    matching: MatchingConfig = MatchingConfig()
    fitness: Annotated[str, _one_of("fitness", FITNESSES)] = DEFAULT_FITNESS
    positions: Positions | None = None
    max_new_tokens: Count = 16
    answer_prefix: str = " "
    system: str = ""
    shots: Selection | tuple[Row, ...] = ()
    turns: str | None = None
    chat: Chat = True
    window: Annotated[int, Field(ge=2)] | None = None

    _origin: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        kind = self.fitness_kind
        if kind.uses_matching if self.source.lm_eval is not None else kind.reads == "harness":
            *others, last = (f"@{name}" for name in task_fitnesses() if not FITNESSES[name].uses_matching)
            raise ValueError("a task of lm-evaluation-harness is judged by it, and no other task is: name it "
                             f"`lm_eval:TASK`; {', '.join(others)} and {last} may follow")  # fmt: skip
        if not self.labelled and kind.needs_references:
            raise ValueError("give `answer` (a template) or `references` (a list), or both")
        if self.resolved_positions == "answer" and not self.labelled:
            raise ValueError("positions `answer` needs `answer` or `references`; without them say `greedy` or `text`")
        if kind.reads == "choices" and not self.choices:
            raise ValueError(f"fitness `{self.fitness}` compares the likelihood of choices: give `choices`")
        if MATCHERS[self.matching.kind].needs_choices and kind.uses_matching and not self.choices:
            raise ValueError(f"matching kind `{self.matching.kind}` looks for one of the choices: give `choices`")
        if self.turns is not None and self.reads_whole_texts:
            raise ValueError("`turns` are a conversation's, and texts that are scored as a whole have none")
        if self.shots and not self.labelled:
            raise ValueError("`shots` show answers: give `answer` or `references`")
        if isinstance(self.shots, Selection) and self.shots.count is None and self.shots.indices is None:
            raise ValueError("`shots`: say how many with `count`, or which rows with `indices`")
        if self.window is not None and not self.reads_whole_texts:
            positions = self.resolved_positions
            raise ValueError(f"`window` cuts running text, but fitness `{self.fitness}` with positions "
                             f"`{positions}` reads none: use fitness `perplexity`, or `kl` or `agreement` with "
                             "positions `text`, or leave `window` out")  # fmt: skip
        self._check_sources()
        return self

    def _check_sources(self) -> None:
        named = {f"splits.{split}": selection for split, selection in self.splits.items()}
        if isinstance(self.shots, Selection):
            named["shots"] = self.shots
        for field, selection in named.items():
            source, files = selection.source, self.source.files
            if files is not None and source not in files:
                raise ValueError(f"`{field}.from` is `{source}`, but `source.files` has: {', '.join(files)}")
            if self.source.installed is not None and source not in SOURCE_SPLITS:
                has = ", ".join(SOURCE_SPLITS)
                raise ValueError(f"`{field}.from` is `{source}`, but installed text has: {has}")
            # The hub also takes slices, such as `train[:9]`; overlaps of those can't be noticed.
            if files is None and not re.fullmatch(r"[\w.-]+", source):
                raise ValueError(f"`{field}.from` must be a plain split name, got `{source}`; use `offset` and `count`")

    @property
    def origin(self) -> str:
        """The task's YAML file for messages, or its name without one."""
        return self._origin or f"task {self.name}"

    @property
    def fitness_kind(self) -> Fitness:
        return FITNESSES[self.fitness]

    @property
    def labelled(self) -> bool:
        """True if the task has gold answers."""
        return self.answer is not None or self.references is not None

    @property
    def resolved_positions(self) -> Positions:
        """The task's `positions`, or else the default; `text` for a fitness that doesn't compare."""
        if not self.fitness_kind.compares:
            return "text"
        if self.positions is not None:
            return self.positions
        return "answer" if self.labelled else self.fitness_kind.positions

    @property
    def reads_whole_texts(self) -> bool:
        """True if every token of a prompt is scored, so that no conversation, system prompt or shots are added."""
        return self.fitness_kind.reads == "texts" and self.resolved_positions == "text"

    def prepared(
        self, split: Split, examples: tuple[Example, ...], harness: HarnessTask | None = None
    ) -> PreparedSplit:
        """Return a split of these examples with the task's settings for scoring them."""
        return PreparedSplit(
            task=self.name,
            split=split,
            fitness=self.fitness,
            metric=self.fitness_kind.metric,
            matching=self.matching.build(),
            max_new_tokens=self.max_new_tokens,
            answer_prefix=self.answer_prefix,
            examples=examples,
            positions=self.resolved_positions,
            harness=harness,
            system="" if self.reads_whole_texts else self.system,
            chat=self.chat if self.chat == "rendered" else self.chat and not self.reads_whole_texts,
            window=self.window,
        )

    @classmethod
    def from_mapping(cls, raw: Mapping[str, object], origin: str = "") -> TaskConfig:
        """Validate a parsed YAML document; `origin` is its file for messages.

        Raises:
            UserError: The document is wrong; the message names file and field.
        """
        try:
            task: TaskConfig = cls.model_validate(dict(raw))
        except ValidationError as error:
            raise UserError(f"{origin or 'task'}: {explain_validation(error, dict(raw), cls.model_fields)}") from None
        task._origin = origin
        return task

    def with_counts(self, counts: Mapping[Split, int]) -> TaskConfig:
        """Return the task with other numbers of examples in some splits (`{"search": 64}`).

        Raises:
            UserError: The task has no such split, or its rows are listed by `indices`.
        """
        splits = self._raw_splits()
        for split, count in counts.items():
            if split not in splits:
                raise UserError(f"{self.origin}: the task has no `{split}` split; it has: {', '.join(splits)}")
            if self.splits[split].indices is not None:
                raise UserError(f"{self.origin}: the rows of `{split}` are listed by `indices`, not counted")
            splits[split]["count"] = count
        return self._changed(splits=splits)

    def with_calibration(self) -> TaskConfig:
        """Return the task with a `calibration` split.

        If it has none, the last quarter of the rows of `search`, at least one, becomes `calibration`.
        """
        if "calibration" in self.splits or "search" not in self.splits:
            return self
        splits = self._raw_splits()
        aside = {"calibration": splits["search"] | {"part": "aside"}, "search": splits["search"] | {"part": "kept"}}
        return self._changed(splits=splits | aside)

    def with_fitness(self, fitness: str) -> TaskConfig:
        """Return the same data and prompts under another fitness, as a task named `NAME@FITNESS`.

        A fitness that compares reads a task of running text as text, instead of continuing it.

        Raises:
            UserError: The task lacks something that the fitness needs.
        """
        changes = {"name": f"{self.name}@{fitness}", "fitness": fitness}
        whole = self.fitness_kind.reads == "texts" and self.fitness_kind.positions == "text"
        if whole and not self.labelled and self.positions is None:
            changes["positions"] = "text"
        return self._changed(**changes)

    def _raw_splits(self) -> dict[Split, dict[str, object]]:
        return {name: rows.model_dump(by_alias=True, exclude_unset=True) for name, rows in self.splits.items()}

    def _changed(self, **changes: object) -> TaskConfig:
        raw = self.model_dump(by_alias=True, exclude_unset=True) | changes
        return TaskConfig.from_mapping(raw, self._origin)
