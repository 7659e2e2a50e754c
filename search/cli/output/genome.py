"""Prints a genome in columns: the experts it keeps as strips, sizes as bars, and its settings."""

from __future__ import annotations

from moevolve.search.cli.output.console import output, print_table
from moevolve.search.genomes.contract.outline import GenomeOutline, outline_rows
from moevolve.search.text import ranges

# Largest number of experts that are shown as a strip, which then fits a line.
_STRIP = 64
# Characters of the bar of an unedited layer's size.
_BAR = 16


def print_genome(outline: GenomeOutline) -> None:
    """Print the settings and layers of a genome."""
    if outline.settings:
        print_table(None, "setting | value", outline.settings)
    headings = "layers | experts | >kept" if outline.experts else "layers"
    for label, full in outline.sizes:
        headings += f" | {label} (of {full:,})"
    rows = []
    for name, layer in outline_rows(outline):
        strip = "".join("#" if each in layer.experts else "." for each in range(outline.experts))
        shown = ranges(layer.experts) if outline.experts > _STRIP else strip
        kept = [shown, str(len(layer.experts))] if outline.experts else []
        sizes = zip(layer.sizes, outline.sizes, strict=False)
        bars = [f"{'=' * round(_BAR * min(1.0, size / full)):<{_BAR}} {size:,}" for size, (_, full) in sizes]
        rows.append([name, *kept, *bars])
    if rows:
        print_table(None, headings, rows)
    if rows and 0 < outline.experts <= _STRIP:
        output.print("experts: # kept, . pruned")
