"""Loading rows from local files, the Hugging Face hub or installed text; the only file that imports `datasets`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from datasets import Dataset, concatenate_datasets, load_dataset

from moevolve.evaluators.errors import UserError, first_line, opening
from moevolve.evaluators.tasks.config import Source
from moevolve.evaluators.tasks.installed import rows_of
from moevolve.evaluators.text_files import MOST_FAULTS, Row, read_rows, refuse_faults

_RELATIVE = "; `source.files` paths are relative to the task file's folder"
_OFFLINE = (
    "offline, give the task local JSONL files under `source.files`, or fill the cache on a machine with network and "
    "set HF_HOME to it"
)


@dataclass(frozen=True)
class Table:
    """The rows of one source split.

    Attributes:
        name: Name of the table in messages.
        places: `file:line` of each row for local files; empty for other sources.
    """

    name: str
    data: Dataset = field(repr=False)
    places: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.data.column_names)

    def without(self, columns: Sequence[str]) -> Table:
        """Return the table without some columns.

        Raises:
            UserError: It lacks one of them, or another one has images or sound, which nothing here reads.
        """
        for name in columns:
            self.require(name)
        data = self.data.remove_columns(list(columns))
        for name, feature in data.features.items():
            if kind := re.search(r"\b(Image|Audio|Video)\(", repr(feature)):
                raise UserError(f"{self.name}: column `{name}` has {kind[1].lower()}s, and only text is read")
        return replace(self, data=data)

    def row(self, index: int) -> Row:
        """Return a row by its number from 0; missing columns are None."""
        return dict(self.data[index])

    def rows(self, indices: Sequence[int]) -> list[Row]:
        """Return rows by their numbers, in this order; read at once, which takes a fraction of the time."""
        columns = self.data[list(indices)]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def column(self, name: str) -> list[object]:
        """Return all values of a column; see `require`."""
        self.require(name)
        return list(self.data[name])

    def require(self, name: str) -> None:
        """Raise a `UserError` that says which columns there are if `name` isn't one of them."""
        if name not in self.columns:
            raise UserError(f"{self.name}: the data has no column `{name}`; it has: {', '.join(self.columns)}")

    def place(self, index: int) -> str:
        """Return the origin of a row for messages."""
        return self.places[index] if self.places else f"{self.name}, row {index}"


def load_table(source: Source, split: str) -> Table:
    """Load all rows of one source split.

    Raises:
        UserError: A file is missing, empty or malformed (with its line), or the hub dataset can't be loaded.
    """
    if source.files is not None:
        return read_files(source.files[split])
    if source.installed is not None:
        name = f"installed text {source.installed}, {split}"
        return Table(name, as_dataset(rows_of(source.installed, split), name))
    name = " ".join(part for part in (source.hub, source.config, split) if part)
    with opening(f"hub dataset {name}: can't be loaded", _OFFLINE):
        # `datasets` doesn't run loading scripts, so no remote code is executed.
        data = load_dataset(source.hub, source.config, split=split, revision=source.revision)
    if len(data) == 0:
        raise UserError(f"hub dataset {name}: no rows")
    return Table(name, data)


def read_files(paths: Sequence[Path]) -> Table:
    """Read the rows of files into memory; see `read_rows`. A file of another name is read as JSONL.

    Raises:
        UserError: A file is missing, empty, not UTF-8 or malformed; the message names file and line.
    """
    # Not `load_dataset("json")`, which writes a cache and whose errors don't name the line.
    rows: list[Row] = []
    places: list[str] = []
    for path in paths:
        before, faults = len(rows), list[tuple[str, str]]()
        for place, row in read_rows(path, _RELATIVE):
            if isinstance(row, UserError):
                faults.append((place, str(row)))
                if len(faults) == MOST_FAULTS:
                    break
            else:
                rows.append(row)
                places.append(place)
        refuse_faults(path, faults, len(rows) - before + len(faults))
        if len(rows) == before:
            raise UserError(f"{path}: no rows; put one JSON object on each line")
    name = ", ".join(str(path) for path in paths)
    return Table(name, as_dataset(rows, name), tuple(places))


def as_dataset(rows: Sequence[Mapping[str, object]], file: str) -> Dataset:
    """Make a `Dataset` of rows, whose columns are typed; `file` is their origin for messages."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns.append(Dataset.from_dict({name: [row.get(name) for row in rows]}))
        except (TypeError, ValueError, OverflowError) as error:  # pyarrow's
            raise UserError(f"{file}: field `{name}` isn't of one type in all lines: {first_line(error)}") from None
    return concatenate_datasets(columns, axis=1) if columns else Dataset.from_dict({})
