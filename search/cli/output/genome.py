"""Prints a genome in columns: the experts it keeps as strips, sizes as bars, and its settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.search.cli.output.console import output, print_table
from moevolve.search.genomes.contract.outline import (
    LayerOutline,
    outline_rows,
    outline_settings,
)
from moevolve.search.text import ranges

if TYPE_CHECKING:
    from moevolve import GenomeView

_STRIP = 64
"""Largest number of experts that are shown as a strip."""
_BAR = 16
"""Characters of the bar of an unedited layer's size."""


def print_genome(view: GenomeView) -> None:
    """Print a genome, or two beside each other."""
    two = view.other is not None
    refs = [view.ref, *([view.against or ""] if two else [])]
    settings = outline_settings(view.outline, view.other)
    if settings:
        rows = [[label, one, *([other, "*" if one != other else ""] if two else [])] for label, one, other in settings]
        print_table(None, " | ".join(["setting", *refs, *(["differs"] if two else [])]), rows)
    kept = next((each for each in (view.outline, view.other) if each is not None and each.experts), None)
    sizes = max((view.outline, view.other or view.outline), key=lambda each: len(each.sizes)).sizes
    headings = "layers" if kept is None else "layers | experts | >kept"
    for label, full in sizes:
        headings += f" | {label}\n(of {full:,})"
    rows = []
    for row in outline_rows(view.outline, view.other):
        layers = [each for each in (row.one, row.other) if each is not None]
        cells = [row.layers + (" *" if row.differs else "")]
        if kept is not None:
            counts = " / ".join(str(len(each.experts)) for each in layers)
            cells += [_strip(row.one, row.other, kept.experts), counts]
        for place, (_, full) in enumerate(sizes):
            found = [each.sizes[place] for each in layers if len(each.sizes) > place]
            bar = "=" * round(_BAR * min(1.0, found[0] / full)) if found else ""
            cells.append(f"{bar:<{_BAR}} " + " / ".join(f"{size:,}" for size in found) if found else "-")
        rows.append(cells)
    if rows:
        print_table(None, headings, rows)
    if rows and (two or kept is not None):
        output.print(_legend(view.ref, view.against, kept is not None and kept.experts <= _STRIP), soft_wrap=True)


def _strip(one: LayerOutline | None, other: LayerOutline | None, experts: int) -> str:
    mine, theirs = (set(each.experts) if each else set() for each in (one, other))
    if experts <= _STRIP:
        marks = {(True, True): "#", (True, False): "+", (False, True): "-", (False, False): "."}
        alone = other is None
        return "".join(marks[each in mine, each in mine if alone else each in theirs] for each in range(experts))
    if other is None:
        return ranges(mine)
    parts = {"both": mine & theirs, "+": mine - theirs, "-": theirs - mine}
    return "; ".join(f"{name} {ranges(found)}" for name, found in parts.items() if found)


def _legend(ref: str, against: str | None, strips: bool) -> str:
    if against is None:
        return "experts: # kept, . pruned" if strips else "experts: those that are kept"
    marks = "# both keep it, " if strips else ""
    return f"experts: {marks}+ only {ref}, - only {against}; numbers: {ref} / {against}; * the layers differ"
