"""What fits of edits are told, without torch: on which tokens, and which neurons to take."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.workers.contract.edits import Tokens

RowsUse = Literal["repair", "skipping"]
"""`repair`: what is kept is fitted. `skipping`: thresholds of dynamic skipping are."""


@dataclass(frozen=True, slots=True)
class RowsRecipe:
    """Which tokens edits are fitted on: the calibration prompts, whole ones up to a number of tokens.

    Attributes:
        tokens: about this many.
        use: what for; one calibration may hold rows for several uses.
    """

    tokens: int
    use: RowsUse = "repair"


@dataclass(frozen=True)
class FitRows:
    """Token sequences that an edit is fitted on.

    Attributes:
        tokens: of all sequences, one after the other, int32 [tokens].
        lengths: of the sequences, int32 [sequences].
    """

    tokens: NDArray[np.int32] = field(repr=False)
    lengths: NDArray[np.int32] = field(repr=False)

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], use: RowsUse = "repair") -> FitRows:
        """From a calibration of `RowsRecipe`."""
        return cls(arrays[f"{use}_tokens"], arrays[f"{use}_lengths"])

    @property
    def sequences(self) -> list[Tokens]:
        """All of them."""
        return self.first(len(self.tokens))

    def first(self, limit: int) -> list[Tokens]:
        """The first sequences that together have at most `limit` tokens, one at least."""
        ends = np.cumsum(self.lengths)
        taken = max(1, int(np.searchsorted(ends, limit, side="right")))
        parts = np.split(self.tokens, ends[:taken])[:taken]
        return [tuple(part.tolist()) for part in parts]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the tokens and where sequences end."""
        digest = hashlib.sha256(self.lengths.astype("<i4").tobytes())
        digest.update(self.tokens.astype("<i4").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class NeuronRecipe:
    """How slots are filled with neurons of all experts, before they are fitted.

    Attributes:
        routing: exponent of the slot's routing weight in what a neuron is worth to it.
        activation: of the neuron's activation times its own expert's routing weight.
        output: of the length of its output.
        shared: whether a neuron may stand in several slots.
        candidates: so many times the neurons that a slot has room for are shortlisted by worth; those go of them whose
            loss a fit makes up for best. 1 takes the worthiest.
        router: `fitted`, each slot stands for a group of experts, and its router row is fitted to their routing mass;
            `kept`, rows stay what the edit made of them. They stay, too, where a stock router has no such rows
            (`moevolve.workers.methods.eep.outputs`).
        width_slope: how much wider the kept experts of the last layer are than an original expert, as a share of its
            width, and how much narrower those of the first; see `widths`. With 0 all layers keep the experts'
            width, and exports stay stock.

    Raises:
        ValueError: an exponent is negative, there are too few candidates, the router's rows are neither, or the
            width_slope leaves a layer without neurons.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    routing: float = 1.0
    activation: float = 2.0
    output: float = 2.0
    shared: bool = False
    candidates: float = 4.0
    router: Literal["fitted", "kept"] = "fitted"
    width_slope: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= each < 100 for each in (self.routing, self.activation, self.output)):  # NaN, too
            raise ValueError("exponents must be 0 at least, and less than 100")
        if not 1 <= self.candidates < math.inf:
            raise ValueError(f"candidates must be 1 at least, not {self.candidates}")
        if self.router not in ("fitted", "kept"):
            raise ValueError(f"router rows of neurons are fitted or kept, not {self.router!r}")
        if not -1 < self.width_slope < 1:
            raise ValueError(f"a width_slope of widths must be between -1 and 1, not {self.width_slope}")

    def widths(self, layers: int, experts: int, retained: int, width: int) -> tuple[int, ...]:
        """Neurons of a slot, layer by layer; over all layers as many as experts have.

        They rise linearly with depth, in steps of a power of 2 that matrix products like: up to 64, and at least 8,
        where so many divide `width`. No layer gets more than its experts have for all of its slots, or less than a
        step; the width_slope is as much smaller.

        Args:
            layers: MoE layers.
            experts: n.
            retained: n'.
            width: neurons of an expert.
        """
        step = max(each for each in (1, 2, 4, 8, 16, 32, 64) if width % each == 0 and (each <= 8 or 8 * each <= width))
        units = width // step
        most = min(experts * units // retained - units, units - 1) / units
        width_slope = max(-most, min(self.width_slope, most))
        depth = np.linspace(-1, 1, layers) if layers > 1 else np.zeros(1)
        ends = np.floor(np.cumsum(1 + width_slope * depth) * units + 0.5).astype(int) * step
        ends[-1] = layers * width
        return tuple(np.diff(ends, prepend=0).tolist())
