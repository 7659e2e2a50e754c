"""The contents of an export's model card, and the report of a finished export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moevolve.evaluators.records import short_repr
from moevolve.evaluators.scales import SCALES, ScaleName

# A `stock` checkpoint loads with a model class of `transformers`; a `native` one contains its own modelling code. A
# `source` checkpoint has the source checkpoint's format: tensors that the edit leaves alone are copied byte for byte.
CheckpointForm = Literal["stock", "native", "source"]

# Files that say which experts are kept; see `moevolve.workers.export.lists`.
ListForm = Literal["list", "vllm-ascend", "easy-ep"]

# What becomes of layers for multi-token prediction (MTP), which speculative decoding uses and `transformers` doesn't
# load: `drop` omits them, `prune` keeps the same experts of them as of the last MoE layer, and `keep` copies them
# whole.
MtpLayers = Literal["drop", "prune", "keep"]


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What the export report and the model card say about an edited model.

    Attributes:
        experts: Experts per MoE layer; 0 for a dense model.
        active: Active experts per token, of the layer with the most.
        parameters_before: Parameters of the unedited model.
        lead: Beginning of the card's first sentence.
        method: What the edit does, with the arXiv number of its paper if it has one.
        tag: Tag of the model card for the kind of edit.
        form_note: Sentence that says what is needed to load the checkpoint.
        rows: Further rows of the card's table, as (title, value).
    """

    experts: int
    active: int
    parameters_before: int
    lead: str
    method: str
    tag: str
    form_note: str
    rows: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ExportScore:
    """A score measured on one task split.

    Attributes:
        score: Value of the task's metric, in [0, 1].
        examples: Number of examples scored.
        low, high: 95 % confidence interval; both None if unknown.
        scale: Scale that it is shown on.
        metric: Name of the metric; empty if unknown.
    """

    task: str
    split: str
    score: float
    examples: int
    low: float | None = None
    high: float | None = None
    scale: ScaleName = "percent"
    metric: str = ""

    @property
    def cells(self) -> tuple[str, str]:
        """The score and its interval as texts of a table."""
        scale = SCALES[self.scale]
        bounds = "-" if self.low is None or self.high is None else scale.interval(self.low, self.high)
        return scale.phrase(self.score), bounds


@dataclass(frozen=True, slots=True)
class ExportCard:
    """The provenance of an exported model.

    Attributes:
        title: Heading of the card.
        base_model, base_fingerprint: Unedited checkpoint, as the user named it, and its fingerprint.
        search_name, search_id: Search that found the edit.
        individual: Reference of the individual within its search.
        lineage: Description of every ancestor, nearest first.
        scores, full_scores: Scores of the individual, and of the full model on the same rows.
        notes: Further paragraphs.
    """

    title: str
    base_model: str
    base_fingerprint: str
    search_name: str = ""
    search_id: str = ""
    individual: str = ""
    lineage: tuple[str, ...] = ()
    scores: tuple[ExportScore, ...] = ()
    full_scores: tuple[ExportScore, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the card says about the exported model itself."""

    summary: ExportSummary
    form: CheckpointForm
    parameters: int
    phenotype_hash: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """How much a part of a checkpoint, or all of it, differs from the edited resident model on equal inputs.

    Attributes:
        max_difference: Largest difference at any position, relative to the largest value that the part adds there.
        accepted_difference: The same over the positions that must agree: all of them in float32, 90 % in 16-bit dtypes,
            where two experts can tie and the order of a sum decides between them.
        tolerance: Upper bound on `accepted_difference`.
        positions: Number of positions at which each part was compared.
        worst_part: Name of the part with the largest `accepted_difference`.
        parts: Number of parts: embeddings, decoder layers, final norm and output head.
    """

    max_difference: float
    accepted_difference: float
    tolerance: float
    positions: int
    worst_part: str
    parts: int = 1

    @property
    def holds(self) -> bool:
        return self.accepted_difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A finished export.

    Attributes:
        directory: Folder of the checkpoint, or file of the list.
        experts, active: See `ExportSummary`.
        parameters: Number of parameters of the exported model.
        size_bytes: Total size of the files.
        agreement: Comparison of the files with the edited model; None in the source form.
        copied: In the source form, the number of tensors that were read back and found equal to the source's.
        anew: In the source form, the number of tensors that were written anew, read back and found as they were packed.
        difference: Largest difference of a tensor that was packed anew from the edited model's, relative to the latter.
        changes: What was written anew and how, each as a title and patterns of names; also in the model card. Of a list
            how it is used.
    """

    __repr__ = short_repr

    directory: Path
    form: CheckpointForm | ListForm
    experts: int
    active: int
    parameters: int
    size_bytes: int
    agreement: Agreement | None = field(repr=False)
    copied: int = 0
    anew: int = 0
    difference: float = 0.0
    changes: tuple[tuple[str, str], ...] = ()


class ExportError(RuntimeError):
    """An export failed its verification, by the difference that `reason` describes."""

    def __init__(self, reason: str, kept: Path) -> None:
        super().__init__(f"{reason}; the files are kept in {kept}, don't use them")
        self.reason = reason
