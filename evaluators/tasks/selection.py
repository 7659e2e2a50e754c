"""Selecting the rows of a split: the same on every machine and with every library version."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Hashable, Mapping, Sequence

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.tasks.config import Selection
from moevolve.evaluators.tasks.datasets import Table
from moevolve.evaluators.types import Split

_LOG = logging.getLogger(__name__)


def value_key(value: object) -> str:
    """Return a value as text for labels and filters: `True` is `true`, `1` and `1.0` are `1`, None is `null`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "null" if value is None else str(value)


def select_rows(table: Table, selection: Selection) -> list[int]:
    """Return the row numbers of a selection, in the order of the examples.

    Raises:
        UserError: A column is unknown, or there are fewer rows than requested.
    """
    rows = _filtered(table, selection)
    if selection.seed is not None:
        # Not numpy's permutation, which may change between numpy versions.
        rows.sort(key=lambda index: hashlib.blake2b(f"{selection.seed}:{index}".encode(), digest_size=16).digest())
    if selection.per is not None:
        rows = _per_group(rows, selection, table)
    else:
        rows = _slice(rows, selection, table.name)
    if selection.indices is not None:
        beyond = [index for index in selection.indices if index >= len(rows)]
        if beyond:
            raise UserError(f"{table.name}: row {beyond[0]} asked for, but there are {len(rows)} rows (from 0)")
        rows = [rows[index] for index in selection.indices]
    left = list(selection.take_part(rows))
    if not left:
        raise UserError(
            f"{table.name}: the only row of `search` is set aside to measure on, and none is left; give the task a "
            "`calibration` split, or `search` more rows"
        )
    return left


def check_disjoint(rows: Mapping[Split, list[int]], name: str) -> None:
    """Raise a `UserError` if splits share rows, which are given by number and all of the source split `name`."""
    owner: dict[int, Split] = {}
    for split, indices in rows.items():
        for index in indices:
            if index in owner:
                raise UserError(
                    f"{name}: row {index} is in both `{owner[index]}` and `{split}`; splits must not share rows: use "
                    "the same `seed` (or none) and separate `offset`/`count` ranges, or disjoint filters"
                )
            owner[index] = split


def unshared_rows(prompts: Sequence[Hashable], elsewhere: Collection[Hashable], name: str) -> list[int]:
    """Return the positions of the calibration prompts that are in no other split, each prompt once.

    `elsewhere` has the prompts of the task's other splits. Raises a `UserError`, which names the task, if none is left.
    """
    first = {prompt: row for row, prompt in reversed(list(enumerate(prompts)))}
    kept = sorted(row for prompt, row in first.items() if prompt not in elsewhere)
    if not kept:
        raise UserError(f"{name}: all prompts of `calibration` also stand in other splits; give it other rows")
    if len(kept) < len(prompts):
        _LOG.info(
            "%s: %d of %d rows of `calibration` are left out: their prompts also stand in another split or before them",
            *(name, len(prompts) - len(kept), len(prompts)),
        )
    return kept


def _filtered(table: Table, selection: Selection) -> list[int]:
    keep = [True] * len(table)
    for wanted, filters in ((True, selection.where), (False, selection.where_not)):
        for column, values in filters.items():
            keys = {value_key(value) for value in values}
            present = _keys_of(table, column)
            if missing := keys.difference(*present):
                raise UserError(f"{table.name}: column `{column}` never holds {min(missing)!r}; check the filter")
            keep = [kept and bool(values & keys) == wanted for kept, values in zip(keep, present, strict=True)]
    return [index for index, kept in enumerate(keep) if kept]


def _keys_of(table: Table, column: str) -> list[set[str]]:
    """Return each row's value in a column or at a dotted path, or the items of a list there, as text."""
    head, *path = (column,) if column in table.columns else column.split(".")
    values = table.column(head)
    for part in path:
        values = [value.get(part) if isinstance(value, dict) else None for value in values]
    return [set(map(value_key, value)) if isinstance(value, list) else {value_key(value)} for value in values]


def _slice(rows: list[int], selection: Selection, name: str) -> list[int]:
    end = None if selection.count is None else selection.offset + selection.count
    taken = rows[selection.offset : end]
    if not taken or len(taken) < (selection.count or 0):
        wanted = "any" if selection.count is None else str(selection.count)
        raise UserError(
            f"{name}: can't take {wanted} rows after the first {selection.offset}: there are only {len(rows)}"
        )
    return taken


def _per_group(rows: list[int], selection: Selection, table: Table) -> list[int]:
    assert selection.per is not None
    values = [value_key(value) for value in table.column(selection.per)]
    groups: dict[str, list[int]] = {}
    for index in rows:
        groups.setdefault(values[index], []).append(index)
    chosen: set[int] = set()
    for value, members in groups.items():
        chosen.update(_slice(members, selection, f"{table.name}, {selection.per} {value}"))
    return [index for index in rows if index in chosen]
