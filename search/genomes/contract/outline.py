"""What a candidate keeps, as rows and labelled values that pages and commands show alike, also of two candidates."""

from __future__ import annotations

from dataclasses import dataclass, field

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
        settings: Labels and values of what holds for the whole model, for example of its repair.
        experts: Number of original experts per layer; 0 if the candidate doesn't choose among experts.
        sizes: Labels of the layers' sizes, with the size of the unedited layer.
        layers: The layers that the candidate changes.
    """

    settings: tuple[tuple[str, str], ...]
    experts: int = 0
    sizes: tuple[tuple[str, int], ...] = ()
    layers: tuple[LayerOutline, ...] = ()


@dataclass(frozen=True, slots=True)
class OutlineRow:
    """Neighbouring layers that are alike in one candidate or, of two compared ones, in both.

    Attributes:
        layers: Names of the layers, such as `layers 0-7`.
        one, other: The first of the layers in either candidate; None without a second one, or where it lacks them.
    """

    layers: str
    one: LayerOutline | None
    other: LayerOutline | None

    @property
    def differs(self) -> bool:
        """Whether the two candidates differ here; False where one of them lacks the layers."""
        return self.one is not None and self.other is not None and self.one != self.other


def outline_rows(one: GenomeOutline, other: GenomeOutline | None = None) -> list[OutlineRow]:
    """The layers of a candidate, or of two, in order; neighbours that are alike are one row."""
    mine = {each.layer: each for each in one.layers}
    theirs = {} if other is None else {each.layer: each for each in other.layers}
    rows: list[tuple[list[int], LayerOutline | None, LayerOutline | None]] = []
    for layer in sorted(mine.keys() | theirs.keys()):
        pair = mine.get(layer), theirs.get(layer)
        if rows and rows[-1][0][-1] == layer - 1 and rows[-1][1:] == pair:
            rows[-1][0].append(layer)
        else:
            rows.append(([layer], *pair))
    return [
        OutlineRow(f"{'layer' if len(layers) == 1 else 'layers'} {ranges(layers)}", first, second)
        for layers, first, second in rows
    ]


def outline_settings(one: GenomeOutline, other: GenomeOutline | None = None) -> list[tuple[str, str, str]]:
    """Labels with the values of one candidate and of the other; `-` where one hasn't the setting."""
    mine, theirs = dict(one.settings), {} if other is None else dict(other.settings)
    return [(label, mine.get(label, "-"), theirs.get(label, "-")) for label in dict.fromkeys([*mine, *theirs])]
