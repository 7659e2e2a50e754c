"""Edits that are repaired once they are made, how, and on which tokens."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from moevolve.workers.contract.edits import LayeredEdit, prefix_hashes
from moevolve.workers.contract.fitting import FitRows, NeuronRecipe

Target = Literal["global", "local"]
RIDGE_LAMBDAS = (1e-3, 1e-2, 1e-1, 1.0)
"""Strengths tried where none are given: with 60,000 tokens the first was best, with 8,000 the third."""


@dataclass(frozen=True, slots=True)
class RepairRecipe:
    """How an edit is repaired: ridge regression toward the present weights, layer after layer.

    Attributes:
        ridge_lambdas: of the ridge, as multiples of the features' mean square summed over tokens; per layer the one is
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

    ridge_lambdas: tuple[float, ...] = RIDGE_LAMBDAS
    target: Target = "global"
    tokens: int = 16384
    neurons: NeuronRecipe | None = None
    memory_mb: int = 8192

    def __post_init__(self) -> None:
        if not self.ridge_lambdas or not all(math.isfinite(each) and each > 0 for each in self.ridge_lambdas):
            raise ValueError(f"ridge_lambdas must be above 0, got {list(self.ridge_lambdas)}")
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
        ridge_lambdas = tuple(values.pop("ridge_lambdas"))
        return cls(ridge_lambdas=ridge_lambdas, neurons=None if neurons is None else NeuronRecipe(**neurons), **values)


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
        """See `moevolve.workers.contract.edits.LayeredEdit`; what a layer is fitted to depends on all before it."""
        return prefix_hashes(self._head, self.base.layer_hashes)
