"""Figures and files of analyses (EEP, Fig. 4, 6 and 7): how often experts are chosen, their weights, and pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.text_files import writing_into
from moevolve.search.drawing import (
    BLUE,
    GREY,
    ORANGE,
    SEQUENTIAL,
    blocks_figure,
    drawing,
    save,
    scale_below,
    shown_note,
    spread,
)
from moevolve.search.genomes.registry import routing_weights_label
from moevolve.search.results.expert_usage import Analysis
from moevolve.workers.contract.usage import MixedLayer, RoutedLayer, Usage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = "analysis.json"
LAYERS = 4
"""Most layers with panels of their own."""
_MANY = 16
"""Most experts whose bars fit half the width."""
Models = Mapping[str, Usage]
"""Usages by the names of their models: the full model if it has experts, then the individual."""


def on_originals(layer: RoutedLayer, values: NDArray[Any], experts: int) -> NDArray[np.float64]:
    """Sum values of new experts, shape (n',), at the original experts that they mostly consist of, shape (experts,).

    Original experts that no new one consists of get NaN. Values of layers without origins are returned as they are.
    """
    if not layer.origins:
        return values.astype(np.float64)
    placed = np.full(experts, np.nan)
    for origin, value in zip(layer.origins, values, strict=True):
        placed[origin] = value if np.isnan(placed[origin]) else placed[origin] + value
    return placed


def _last(models: Models) -> Usage:
    return list(models.values())[-1]


def _experts(models: Models) -> int:
    """Most experts of any layer: the number of original experts, if the full model has experts."""
    return max(layer.experts for usage in models.values() for layer in usage.routed)


def _expert_label(models: Models) -> str:
    return "expert" if len(models) == 1 else "original expert"


def share_map(usage: Usage, experts: int) -> NDArray[np.float64]:
    """Share of tokens that chose each expert in %, shape (layers, experts); NaN where there is no expert."""
    found = np.full((len(usage.routed), experts), np.nan)
    for row, layer in enumerate(usage.routed):
        placed = on_originals(layer, 100 * layer.counts / usage.tokens, experts)
        found[row, : len(placed)] = placed
    return found


def map_figure(models: Models) -> Figure:
    """Draw the share of tokens that chose each expert, in all layers."""
    experts = _experts(models)
    maps = {name: share_map(usage, experts) for name, usage in models.items()}
    layers = [layer.layer for layer in _last(models).routed]
    with drawing(0.9 + max(1.1, min(0.24 * len(layers), 5.0))) as figure:
        panels = figure.subplots(1, len(maps), squeeze=False, sharey=True)[0]
        top = max(float(np.nanmax(each)) for each in maps.values()) or 1.0
        for axes, (name, each) in zip(panels, maps.items(), strict=True):
            axes.set_facecolor("#d8d8d8")
            image = axes.imshow(each, cmap=SEQUENTIAL, vmin=0, vmax=top, aspect="auto", interpolation="none")
            if len(maps) > 1:
                axes.set_title(name)
            axes.set_xlabel(_expert_label(models))
            axes.set_xticks(range(0, experts, -(-experts // 8)))
            rows = spread(len(layers), 12)
            axes.set_yticks(rows, [str(layers[row]) for row in rows])
        panels[0].set_ylabel("layer")
        figure.colorbar(image, ax=list(panels), label="tokens that chose it [%]")
        return figure


def bars_figure(models: Models, weights: str | None) -> Figure:
    """Draw every expert's activation count and accumulated routing weight in some layers, before and after.

    Args:
        models: The usages.
        weights: Heading of the weights' column; None leaves them out.
    """
    experts, picked = _experts(models), spread(len(_last(models).routed), LAYERS)
    colours = {name: BLUE if len(models) == 1 else colour for name, colour in zip(models, (GREY, ORANGE), strict=False)}
    headings = {"counts": "tokens that chose it"} | ({} if weights is None else {"weights": weights})
    # Many bars need the whole width, so the weights stand below the counts then.
    columns = len(headings) if experts <= _MANY else 1
    panels = [(position, name) for position in picked for name in headings]
    rows = len(panels) // columns
    with drawing(0.7 + 1.35 * rows) as figure:
        grid = figure.subplots(rows, columns, squeeze=False, sharex=True)
        for axes, (position, name) in zip(grid.ravel(), panels, strict=True):
            layers = [usage.routed[position] for usage in models.values()]
            _draw_bars(axes, layers, name, experts, list(colours.values()))
            if columns == len(headings):
                axes.set_ylabel(f"layer {layers[-1].layer}" if name == "counts" else "")
                axes.set_title(headings[name] if position == picked[0] else "", pad=12)
            else:
                axes.set_title(f"layer {layers[-1].layer}: {headings[name]}")
        for axes in grid[-1]:
            axes.set_xlabel(_expert_label(models))
        if len(models) > 1:
            from matplotlib.patches import Patch

            patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
            figure.legend(handles=patches, loc="outside upper center", ncols=2)
        return figure


def _draw_bars(axes: Axes, layers: Sequence[RoutedLayer], name: str, experts: int, colours: Sequence[str]) -> None:
    """Draw `counts` or `weights` of one layer side by side for every model."""
    wide = 0.8 / len(layers)
    for place, (layer, colour) in enumerate(zip(layers, colours, strict=True)):
        values = on_originals(layer, getattr(layer, name), experts)
        middle = np.arange(len(values)) + (place - (len(layers) - 1) / 2) * wide
        axes.bar(middle, np.nan_to_num(values), width=wide, color=colour)
    axes.set_xticks(range(0, experts, -(-experts // 8)))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 4))
    axes.margins(x=0.02)


def together_figure(models: Models) -> Figure:
    """Draw the share of tokens that chose both of two experts in some layers, without the diagonal."""
    # A row has one layer in two models, or two layers of one model.
    panels = []
    for position in spread(len(_last(models).routed), LAYERS):
        for name, usage in models.items():
            pairs = 100 * usage.routed[position].together / usage.tokens
            np.fill_diagonal(pairs, np.nan)
            panels.append((name, usage.routed[position], pairs))
    top = max(float(np.nanmax(pairs, initial=0.0)) for _, _, pairs in panels) or 1.0
    rows = -(-len(panels) // 2)
    with drawing(0.85 + 2.15 * rows, squares=True) as figure:
        grid = figure.subplots(rows, 2, squeeze=False)
        for axes in grid.ravel()[len(panels) :]:
            axes.set_axis_off()
        for axes, (name, layer, pairs) in zip(grid.ravel(), panels, strict=False):
            image = axes.imshow(pairs, cmap=SEQUENTIAL, vmin=0, vmax=top, interpolation="none")
            axes.set_facecolor("#d8d8d8")
            axes.set_title(f"layer {layer.layer}, {name}")
            step = -(-layer.experts // 8)
            names = [str(expert) for expert in layer.origins or range(layer.experts)][::step]
            axes.set_xticks(range(0, layer.experts, step), names)
            axes.set_yticks(range(0, layer.experts, step), names)
        for axes in grid[-1]:
            axes.set_xlabel("expert")
        scale_below(figure, image, grid, "tokens that chose both [%]")
        return figure


def words_figure(usage: Usage) -> Figure:
    """Draw which experts each word's tokens chose, in three layers (cf. ToMoE, arXiv 2501.15316, Tab. 4, 8 and 9)."""
    picked = [usage.routed[position] for position in spread(len(usage.routed), 3)]
    with drawing(1.0 + 0.15 * len(usage.words)) as figure:
        grid = figure.subplots(1, len(picked), squeeze=False, sharey=True)
        for axes, layer in zip(grid[0], picked, strict=True):
            shares = 100 * layer.by_word / np.maximum(layer.by_word.sum(axis=1, keepdims=True), 1)
            image = axes.imshow(shares, cmap=SEQUENTIAL, vmin=0, vmax=100, aspect="auto", interpolation="none")
            axes.set_title(f"layer {layer.layer}")
            axes.set_xlabel("expert")
            axes.set_xticks(range(0, layer.experts, -(-layer.experts // 4)))
        grid[0][0].set_yticks(range(len(usage.words)), [word.replace("\n", "\\n") for word in usage.words])
        scale_below(figure, image, grid, "of the experts that its tokens chose [%]")
        return figure


def mixing_usage_figure(layers: Sequence[MixedLayer]) -> Figure:
    """Draw the mixing matrices that block-mixed layers run on."""
    what = "mixing coefficient" if layers[0].variant == "I" else "size of the block"
    blocks = np.stack([layer.blocks for layer in layers])
    return blocks_figure([layer.name for layer in layers], blocks, 1.0, f"{what} (1: as in plain low rank)")


def figures_of(analysis: Analysis) -> dict[str, tuple[Figure, str]]:
    """Draw an analysis: figures by name, each with a caption."""
    before, after = analysis.before, analysis.after
    found: dict[str, tuple[Figure, str]] = {}
    if after.routed:
        models = {"individual": after} if before is None else {"full model": before, "individual": after}
        several = shown_note(len(after.routed), LAYERS, "layers")
        gone = "" if before is None else "; grey experts are gone"
        caption = f"Share of the tokens that chose each expert, in every layer{gone}."
        found["usage"] = map_figure(models), caption
        weights = routing_weights_label(analysis.kind)
        caption = "How many tokens chose each expert"
        if weights is not None:
            caption += f", and the {weights} summed over {'all tokens' if before is None else 'them'}"
        if before is not None:
            caption += ". New experts stand at the original one that they mostly consist of"
        found["activations"] = bars_figure(models, weights), f"{caption}.{several}"
        if any((layer.together.sum(axis=1) > layer.counts).any() for layer in after.routed):
            caption = "Share of the tokens that chose both of two different experts."
            found["together"] = together_figure(models), caption + several
        caption = (
            "Which experts the tokens of the most frequent words chose, in the first, the middle and the last layer."
        )
        found["words"] = words_figure(after), caption
    if after.mixed:
        caption = "The mixing matrices that the model runs on, one number per block."
        found["mixing"] = mixing_usage_figure(after.mixed), caption
    return found


def write_analysis(analysis: Analysis, folder: Path) -> list[Path]:
    """Write an analysis and its figures into a folder, made if need be, and return the files, `analysis.json` first.

    Raises:
        UserError: the folder can't be written.
    """
    written = [folder / FILE]
    with writing_into(folder):
        written[0].write_bytes(TypeAdapter(Analysis).dump_json(analysis))
        for name, (figure, _) in figures_of(analysis).items():
            written.append(folder / f"{name}.png")
            save(figure, written[-1])
    return written


def read_analysis(path: Path) -> Analysis:
    """Read an `analysis.json`, or the one in a folder.

    Raises:
        UserError: there is none, or the file is something else.
    """
    path = path / FILE if path.is_dir() else path
    try:
        return TypeAdapter(Analysis).validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: no analysis can be read there: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path}: this is no analysis of this version; make one with `moevolve analyse`") from None
