"""Analyses of an individual's experts: made by a worker on a task split, kept as a JSON file, read back for reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.types import Split
from moevolve.search.genomes.registry import weights_of
from moevolve.search.loop.scores import FULL
from moevolve.search.service.data import as_data
from moevolve.search.service.evaluate import prepared_split
from moevolve.search.service.subject import find_subject
from moevolve.store.reader import StoreReader
from moevolve.workers.methods.base import IdentityEdit
from moevolve.workers.methods.usage import MixedLayer, RoutedLayer, Usage, UsageRequest

if TYPE_CHECKING:
    from moevolve.search.figures.style import Figure

FORMAT = "moevolve-analysis/2"
FILE = "analysis.json"


@dataclass(frozen=True, slots=True)
class Analysis:
    """What was seen of an individual's experts.

    Attributes:
        ref: the individual.
        search_id: its search.
        kind: of its genome.
        task, split: whose prompts and answers were run.
        task_fingerprint: of that split.
        before: the full model's usage; None where it has no experts to compare with.
        after: the individual's.
    """

    ref: str
    search_id: str
    kind: str
    task: str
    split: str
    task_fingerprint: str
    before: Usage | None = field(repr=False)
    after: Usage = field(repr=False)


def analyse_individual(
    store: StoreReader, reference: str, task: str, split: Split, tokens: int | None = None, model: str | None = None
) -> Analysis:
    """Watch an individual's experts, and the full model's, on a task split, in this process. Nothing is stored.

    Args:
        store: where the individual is.
        reference: `SEARCH:INDEX`.
        task: any task.
        split: one of its splits.
        tokens: stop after the prompt that reaches this many tokens; None runs them all.
        model: where the weights are, if not where the store says.

    Raises:
        StoreError: no such individual.
        UserError: unknown task or split, the model isn't there any more, or the individual can't be run.
    """
    from moevolve.workers.worker import EvaluationWorker

    if reference == FULL:
        raise UserError(f"{FULL}: an analysis compares an individual with the full model; name one as SEARCH:INDEX")
    subject = find_subject(store, reference, model=model)
    detail = subject.detail
    assert detail is not None
    prepared = prepared_split(subject, task, split)
    worker = EvaluationWorker(subject.config.model, subject.config.engine)
    try:
        after = worker.analyse(UsageRequest(subject.edit, tokens), prepared)
    except CandidateError as error:
        raise UserError(f"{reference} can't be run: {error}") from None
    before = worker.analyse(UsageRequest(IdentityEdit(), tokens), prepared) if subject.facts.moe_layers else None
    return Analysis(
        ref=detail.ref,
        search_id=detail.search.id,
        kind=detail.search.genome_kind,
        task=prepared.task,
        split=prepared.split,
        task_fingerprint=prepared.fingerprint,
        before=before,
        after=after,
    )


def figures_of(analysis: Analysis) -> dict[str, tuple[Figure, str]]:
    """The analysis as figures, with what is to be seen on each, by name."""
    from moevolve.search.figures import usage as draw

    before, after = analysis.before, analysis.after
    found: dict[str, tuple[Figure, str]] = {}
    if after.routed:
        several = "" if len(after.routed) <= draw.LAYERS else f" {draw.LAYERS} of {len(after.routed)} layers are shown."
        found["usage"] = (
            draw.map_figure(before, after),
            "Share of the tokens that chose each expert, in every layer"
            + ("; grey experts are gone." if before else "."),
        )
        weights = weights_of(analysis.kind)
        found["activations"] = (
            draw.bars_figure(before, after, weights),
            "How many tokens chose each expert"
            + ("" if weights is None else f", and the {weights} summed over " + ("them" if before else "all tokens"))
            + (". New experts stand at the original one that they mostly consist of." if before else ".")
            + several,
        )
        if any((layer.together.sum(axis=1) > layer.counts).any() for layer in after.routed):
            found["together"] = (
                draw.together_figure(before, after),
                "Share of the tokens that chose both of two experts; an expert with itself is left out." + several,
            )
        found["words"] = (
            draw.words_figure(after),
            "Which experts the tokens of the most frequent words chose, in the first, the middle and the last layer.",
        )
    if after.mixed:
        found["mixing"] = (
            draw.mixing_usage_figure(after.mixed),
            "The mixing matrices that the model runs on, one number per block.",
        )
    return found


def write_analysis(analysis: Analysis, folder: Path) -> list[Path]:
    """Write an analysis and its figures into a folder, which is made if need be.

    Returns:
        The files, `analysis.json` first.

    Raises:
        UserError: the folder can't be written.
    """
    from moevolve.search.figures.style import save

    written = [folder / FILE]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written[0].write_text(json.dumps(as_data(analysis)), encoding="utf-8")
        for name, (figure, _) in figures_of(analysis).items():
            written.append(folder / f"{name}.png")
            save(figure, written[-1])
    except OSError as error:
        raise UserError(f"{error.filename or folder}: can't be written: {error.strerror}") from None
    return written


@as_data.register
def _(analysis: Analysis) -> dict[str, Any]:
    names = ("ref", "search_id", "kind", "task", "split", "task_fingerprint")
    data: dict[str, Any] = {"format": FORMAT} | {name: getattr(analysis, name) for name in names}
    data["before"] = None if analysis.before is None else _usage_data(analysis.before)
    data["after"] = _usage_data(analysis.after)
    return data


def read_analysis(path: Path) -> Analysis:
    """Read an `analysis.json`, or the one in a folder.

    Raises:
        UserError: there is none, or it is something else.
    """
    path = path / FILE if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(data["format"])
        names = ("ref", "search_id", "kind", "task", "split", "task_fingerprint")
        before = None if data["before"] is None else _usage(data["before"])
        return Analysis(**{name: str(data[name]) for name in names}, before=before, after=_usage(data["after"]))
    except OSError as error:
        raise UserError(f"{path}: no analysis can be read there: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: this is no analysis of this version; make one with `moevolve analyse`") from None


def _usage_data(usage: Usage) -> dict[str, Any]:
    return {
        "tokens": usage.tokens,
        "active_experts": usage.active,
        "routed": [
            {
                "layer": layer.layer,
                "counts": layer.counts.tolist(),
                "weights": layer.weights.tolist(),
                "together": layer.together.tolist(),
                "by_word": layer.by_word.tolist(),
                "effective_experts": layer.effective,
                "origins": list(layer.origins),
                "neurons": list(layer.neurons),
            }
            for layer in usage.routed
        ],
        "words": list(usage.words),
        "mixed": [
            {"name": layer.name, "variant": layer.variant, "blocks": layer.blocks.tolist()} for layer in usage.mixed
        ],
    }


def _usage(data: Mapping[str, Any]) -> Usage:
    routed = tuple(
        RoutedLayer(
            int(layer["layer"]),
            np.array(layer["counts"], dtype=np.int64),
            np.array(layer["weights"], dtype=np.float64),
            np.array(layer["together"], dtype=np.int64),
            np.array(layer["by_word"], dtype=np.int64).reshape(len(data["words"]), -1),
            tuple(layer["origins"]),
            tuple(layer["neurons"]),
        )
        for layer in data["routed"]
    )
    mixed = tuple(MixedLayer(each["name"], each["variant"], np.array(each["blocks"])) for each in data["mixed"])
    return Usage(int(data["tokens"]), routed, mixed, tuple(data["words"]))
