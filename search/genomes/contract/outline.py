"""What a candidate keeps, as rows and labelled values that pages and commands show alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from moevolve.evaluators.records import short_repr
from moevolve.search.text import ranges


@dataclass(frozen=True, slots=True)
class LayerOutline:
    """What a candidate keeps of one decoder layer; layers that keep the same are equal.

    Attributes:
        experts: Original experts that the kept ones are made of, in ascending order.
        sizes: Sizes that the candidate gives the layer, in the order of `GenomeOutline.sizes`.
    """

    layer: int = field(compare=False)
    experts: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenomeOutline:
    """A candidate in columns.

    Attributes:
        settings: Labels and values that hold for the whole model, for example of its repair.
        experts: Number of original experts per layer; 0 if the candidate doesn't choose among experts.
        sizes: Labels of the layers' sizes, with the size of the unedited layer.
        layers: The layers that the candidate changes.
    """

    __repr__ = short_repr

    settings: tuple[tuple[str, str], ...]
    experts: int = 0
    sizes: tuple[tuple[str, int], ...] = ()
    layers: tuple[LayerOutline, ...] = field(default=(), repr=False)


def outline_rows(outline: GenomeOutline) -> list[tuple[str, LayerOutline]]:
    """Return the layers of a candidate by name, in order; neighbours that are alike are one, such as `layers 0-7`."""
    rows: list[tuple[list[int], LayerOutline]] = []
    for each in sorted(outline.layers, key=lambda layer: layer.layer):
        if rows and rows[-1][0][-1] == each.layer - 1 and rows[-1][1] == each:
            rows[-1][0].append(each.layer)
        else:
            rows.append(([each.layer], each))
    return [(f"{'layer' if len(layers) == 1 else 'layers'} {ranges(layers)}", first) for layers, first in rows]
