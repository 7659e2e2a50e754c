"""What a task's YAML file may say of where its rows are, and which of them a split takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Count = Annotated[int, Field(ge=1)]
Scalar = str | int | bool


class TaskSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class Source(TaskSection):
    """Where the rows are: a dataset of the Hugging Face hub, or local JSONL files.

    Attributes:
        hub: dataset id on the hub (`aps/super_glue`).
        config: the hub dataset's configuration, if it has several.
        revision: branch, tag or commit of the hub dataset.
        files: for each source split (any name) one or several JSONL files, relative to the YAML's folder or absolute.
        lm_eval: a task of lm-evaluation-harness; set by `moevolve.evaluators.harness` only.
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


class Selection(TaskSection):
    """Which rows of a source split one of our splits takes; the same rows on every machine.

    The filters come first, then the order (file order, or shuffled by `seed`), then `offset` and `count`, counted
    within each group of equal `per` values when `per` is given.

    Attributes:
        source: the source split (YAML key `from`).
        where: column -> accepted values.
        where_not: column -> values left out.
        min_chars: column of text -> fewest characters a row must have there, white space at both ends not counted
            (leaves empty lines and headings out of running text).
        seed: shuffle with this seed; None keeps the file's order.
        per: a column; `offset` and `count` then hold for each of its values (a stratified sample).
        offset: rows skipped.
        count: rows taken; None takes all that are left.
        indices: explicit row numbers from 0 (instead of everything above but `source`).
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.indices is None:
            return self
        filters = self.where or self.where_not or self.min_chars
        if filters or self.seed is not None or self.per or self.offset or self.count:
            raise ValueError("`indices` can't be combined with other ways of choosing rows")
        if not self.indices or len(set(self.indices)) != len(self.indices):
            raise ValueError("`indices` must name at least one row, and none twice")
        return self
