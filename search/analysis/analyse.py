"""Analyses of how an individual uses its experts: measuring them, drawing them, writing and reading their files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.evaluators.text_files import writing_into
from moevolve.evaluators.types import Split
from moevolve.search.genomes.registry import routing_weights_label
from moevolve.search.loop.scores import FULL
from moevolve.search.running.candidates import find_candidate, prepared_split
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.usage import Usage

if TYPE_CHECKING:
    from moevolve.search.report.style import Figure

FILE = "analysis.json"


@dataclass(frozen=True, slots=True)
class Analysis:
    """How an individual uses its experts.

    Attributes:
        kind: Genome kind of the individual's search.
        task_fingerprint: Fingerprint of the split whose prompts and answers were run.
        before: The full model's usage; None where that has no experts to compare with.
        after: The individual's usage.
    """

    ref: str
    search_id: str
    kind: str
    task: str
    split: str
    task_fingerprint: str
    before: Usage | None = field(repr=False)
    after: Usage = field(repr=False)
    format: Literal["moevolve-analysis/3"] = "moevolve-analysis/3"


def analyse(
    store: StoreReader, reference: str, task: str, split: Split, tokens: int | None = None, model: str | None = None
) -> Analysis:
    """Count which experts a task's prompts activate; the individual and the full model run in this process.

    Args:
        reference: The individual as SEARCH:INDEX.
        task, split: The prompts.
        tokens: Stop after about this many tokens; None runs all.
        model: The search's checkpoint, if it isn't where the store says.

    Raises:
        UserError: there is no such task or split, or the individual can't be run.
        StoreError: there is no such individual.
    """
    from moevolve.workers.worker import EvaluationWorker

    if reference == FULL:
        raise UserError(f"{FULL}: an analysis compares an individual with the full model; name one as SEARCH:INDEX")
    candidate = find_candidate(store, reference, model=model)
    detail = candidate.detail
    assert detail is not None
    prepared = prepared_split(candidate, task, split)
    worker = EvaluationWorker(candidate.config.model, candidate.config.engine)
    try:
        after = worker.analyse(candidate.edit, prepared, tokens)
    except CandidateError as error:
        raise UserError(f"{reference} can't be run: {error}") from None
    before = worker.analyse(IdentityEdit(), prepared, tokens) if candidate.facts.moe_layers else None
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
    """Draw an analysis: figures by name, each with a caption."""
    from moevolve.search.report import usage as draw

    before, after = analysis.before, analysis.after
    found: dict[str, tuple[Figure, str]] = {}
    if after.routed:
        models = {"individual": after} if before is None else {"full model": before, "individual": after}
        several = "" if len(after.routed) <= draw.LAYERS else f" {draw.LAYERS} of {len(after.routed)} layers are shown."
        gone = "" if before is None else "; grey experts are gone"
        caption = f"Share of the tokens that chose each expert, in every layer{gone}."
        found["usage"] = draw.map_figure(models), caption
        weights = routing_weights_label(analysis.kind)
        caption = "How many tokens chose each expert"
        if weights is not None:
            caption += f", and the {weights} summed over {'all tokens' if before is None else 'them'}"
        if before is not None:
            caption += ". New experts stand at the original one that they mostly consist of"
        found["activations"] = draw.bars_figure(models, weights), f"{caption}.{several}"
        if any((layer.together.sum(axis=1) > layer.counts).any() for layer in after.routed):
            caption = "Share of the tokens that chose both of two experts; an expert with itself is left out."
            found["together"] = draw.together_figure(models), caption + several
        caption = (
            "Which experts the tokens of the most frequent words chose, in the first, the middle and the last layer."
        )
        found["words"] = draw.words_figure(after), caption
    if after.mixed:
        caption = "The mixing matrices that the model runs on, one number per block."
        found["mixing"] = draw.mixing_usage_figure(after.mixed), caption
    return found


def write_analysis(analysis: Analysis, folder: Path) -> list[Path]:
    """Write an analysis and its figures into a folder, made if need be, and return the files, `analysis.json` first.

    Raises:
        UserError: the folder can't be written.
    """
    from moevolve.search.report.style import save

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
