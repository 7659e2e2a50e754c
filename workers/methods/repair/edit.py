"""Edits that are repaired once they are made, how, and on which tokens."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from moevolve.workers.methods.base import LayeredEdit, Tokens

Target = Literal["global", "local"]
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
"""Strengths tried where none are given: with 60,000 tokens the first was best, with 8,000 the third."""


@dataclass(frozen=True, slots=True)
class RowsRecipe:
    """Which tokens edits are fitted on: the calibration prompts, whole ones up to a number of tokens.

    Attributes:
        tokens: at most this many.
    """

    tokens: int


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
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> FitRows:
        """From a calibration of `RowsRecipe`."""
        return cls(arrays["row_tokens"], arrays["row_lengths"])

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

    Raises:
        ValueError: an exponent is negative.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    routing: float = 1.0
    activation: float = 2.0
    output: float = 2.0
    shared: bool = False

    def __post_init__(self) -> None:
        if not all(0 <= each < 100 for each in (self.routing, self.activation, self.output)):  # NaN, too
            raise ValueError("exponents must be 0 at least, and less than 100")


@dataclass(frozen=True, slots=True)
class RepairRecipe:
    """How an edit is repaired: ridge regression toward the present weights, layer after layer.

    Attributes:
        strengths: of the ridge, as multiples of the features' mean square summed over tokens; per layer the one is
            taken that leaves the least error on sequences that weren't fitted.
        target: what a layer is fitted to: `global`, the unedited model's residual stream behind it, which makes up for
            what layers before it lost, too; `local`, what the unedited layer makes of the same input.
        tokens: at most this many, of the calibration's first sequences.
        neurons: fill the kept experts with neurons of all experts first; None leaves them their own.
        memory_mb: MiB that the fit of a layer may take beside the model.

    Raises:
        ValueError: a value is out of range.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    strengths: tuple[float, ...] = STRENGTHS
    target: Target = "global"
    tokens: int = 16384
    neurons: NeuronRecipe | None = None
    memory_mb: int = 8192

    def __post_init__(self) -> None:
        if not self.strengths or not all(math.isfinite(each) and each > 0 for each in self.strengths):
            raise ValueError(f"a repair's strengths must be above 0, got {list(self.strengths)}")
        if self.target not in ("global", "local"):
            raise ValueError(f"a repair's target is global or local, not {self.target!r}")
        if self.tokens < 2 or self.memory_mb < 1:
            raise ValueError("a repair needs 2 tokens and 1 MiB at least")

    @property
    def text(self) -> str:
        """As canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> RepairRecipe:
        """Inverse of `text`."""
        values = json.loads(text)
        neurons = values.pop("neurons")
        strengths = tuple(values.pop("strengths"))
        return cls(strengths=strengths, neurons=None if neurons is None else NeuronRecipe(**neurons), **values)


@dataclass(frozen=True)
class RepairedEdit:
    """An edit, and the fit of what it keeps.

    Attributes:
        base: the edit itself.
        recipe: how it is repaired.
        rows: what it is fitted on.
    """

    base: LayeredEdit
    recipe: RepairRecipe
    rows: FitRows = field(repr=False)

    @cached_property
    def _head(self) -> bytes:
        return f"repair/1 {self.recipe.text} {self.rows.fingerprint} ".encode()

    @cached_property
    def phenotype_hash(self) -> str:
        return hashlib.sha256(self._head + self.base.phenotype_hash.encode()).hexdigest()

    @cached_property
    def layer_hashes(self) -> tuple[str, ...]:
        """See `moevolve.workers.methods.base.LayeredEdit`; what a layer is fitted to depends on all before it."""
        return prefix_hashes(self._head, self.base.layer_hashes)


def prefix_hashes(head: bytes, hashes: Sequence[str]) -> tuple[str, ...]:
    """Of every layer with all layers before it."""
    digest, found = hashlib.sha256(head), []
    for each in hashes:
        digest.update(each.encode())
        found.append(digest.hexdigest())
    return tuple(found)
