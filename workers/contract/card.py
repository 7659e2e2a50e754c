"""What an export's model card says, and what exporting reports back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

CheckpointForm = Literal["stock", "native"]
"""`stock` loads as a model of its family anywhere; `native` brings its modelling code."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What a report and a model card say of an edited model.

    Attributes:
        experts: experts per layer, 0 without any.
        active: of these, per token.
        parameters_before: parameters of the unedited model.
        lead: the card's first sentence, up to where it says who found the edit.
        method: the paper's name and number.
        tag: of the card, for the kind of edit.
        form_note: a sentence on what the checkpoint needs to load.
        rows: further rows of the card's table, title and value.
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
    """A measured score.

    Attributes:
        task: name of the task.
        split: the split it was measured on.
        score: the metric, in [0, 1].
        examples: how many examples it is over.
        low: lower end of the 95 % confidence interval, if known.
        high: upper end, set whenever `low` is.
    """

    task: str
    split: str
    score: float
    examples: int
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class ExportCard:
    """Provenance of an exported model.

    Attributes:
        title: heading of the card.
        base_model: the checkpoint it comes from, as the user named it.
        base_fingerprint: its fingerprint.
        search_name: name of the search.
        search_id: its id.
        individual: reference of the individual within it.
        lineage: one line per ancestor, nearest first.
        scores: measured scores, every one with its split.
        notes: further paragraphs.
    """

    title: str
    base_model: str
    base_fingerprint: str
    search_name: str = ""
    search_id: str = ""
    individual: str = ""
    lineage: tuple[str, ...] = ()
    scores: tuple[ExportScore, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The model's side of the card."""

    summary: ExportSummary
    form: CheckpointForm
    parameters: int
    phenotype_hash: str
    version: str
    created: str


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How far a part of a checkpoint is from the same part of the edited resident model, on the same hidden states.

    Attributes:
        largest: largest difference at any position, as a share of the largest value that the part adds there.
        accepted: the same over the positions that have to agree (all of them in float32, 90 % in 16-bit dtypes, where
            two experts can tie and the order of a sum decide between them).
        tolerance: bound on `accepted`.
        positions: how many positions were compared.
    """

    largest: float
    accepted: float
    tolerance: float
    positions: int

    @property
    def holds(self) -> bool:
        return self.accepted <= self.tolerance


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far an export is from the edited resident model, part by part; see `Disagreement`.

    Attributes:
        max_difference: of all parts, at any position.
        accepted_difference: of the part that differs most, over the positions that have to agree.
        tolerance: bound on `accepted_difference`.
        positions: how many positions every part was compared at.
        parts: how many parts were compared: the embeddings, every decoder layer, the final norm and the output head.
        worst_part: the one that differs most.
    """

    max_difference: float
    accepted_difference: float
    tolerance: float
    positions: int
    parts: int
    worst_part: str

    @property
    def holds(self) -> bool:
        return self.accepted_difference <= self.tolerance


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A finished export.

    Attributes:
        directory: the checkpoint.
        form: `stock` loads as its family anywhere; `native` brings its modelling code.
        experts: experts per layer.
        active: of these, per token.
        parameters: all parameters of the exported model.
        size_bytes: bytes of all its files.
        agreement: the comparison of its files with the edited model.
    """

    directory: Path
    form: CheckpointForm
    experts: int
    active: int
    parameters: int
    size_bytes: int
    agreement: Agreement = field(repr=False)


class ExportError(RuntimeError):
    """An export that failed its verification.

    Attributes:
        reason: what differs, and by how much.
    """

    def __init__(self, reason: str, kept: Path) -> None:
        """Say what failed.

        Args:
            reason: what differs, and by how much.
            kept: where the files are, for whoever wants to look at them.
        """
        super().__init__(f"{reason}; the files are kept in {kept}, don't use them")
        self.reason = reason
