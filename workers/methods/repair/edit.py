"""The repaired edit: another edit, followed by a fit of the weights that it keeps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal, get_args

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import TypeAdapter

from moevolve.workers.contract.edits import LayeredEdit, prefix_hashes
from moevolve.workers.contract.fitting import FitRows, NeuronSettings

Target = Literal["global", "local"]
Strength = Literal["none", "scalar", "ridge", "matched"]
STRENGTHS: tuple[Strength, ...] = get_args(Strength)
"""Strengths of a fit, the weakest first."""
RIDGE_LAMBDAS = (1e-3, 1e-2, 1e-1, 1.0)
"""Default ridge lambdas to try: with 60,000 tokens the first was best, with 8,000 the third."""


@dataclass(frozen=True, slots=True)
class RepairSettings:
    """Settings of a repair: layer after layer, ridge regression that shrinks to the present weights.

    Attributes:
        ridge_lambdas: Ridge strengths to try, as multiples of the features' mean square summed over tokens. Each layer
            takes the one with the least error on held-out sequences.
        target: Target of each layer. `global` is the unedited model's residual stream after the layer, so that the fit
            also compensates for errors of earlier layers. `local` is the unedited layer's output for the same input.
        tokens: Limit on the number of tokens, taken from the calibration's first sequences.
        answer_weight: Weight of the tokens that predict an answer's tokens, relative to that of all others, in the
            choice of neurons and in the fit.
        shared_expert: `fitted`: the output projection of a layer's shared expert, which every token uses, is fitted
            together with those of the kept experts. `kept`: it stays as it is.
        neurons: Settings of filling the kept experts with neurons of all experts before the fit; None keeps their own.
        strength: How each layer is fitted. `none`: not at all, which leaves the edit, or the choice of `neurons`, as it
            is. `scalar`: one factor on the layer's output. `ridge`: ridge regression of all weights. `matched`: the
            same, scaled so that the layer's output has the energy of the target.
        input_rounds: Rounds in which also the gate and up projections of experts and networks are fitted, and the
            output projections again (`moevolve.workers.methods.repair.inputs`). A round takes as long as 30 passes.
        gate: Choose the strength, up to `strength`, by the whole model's predictions: the one with the least divergence
            from the unedited model on sequences that nothing is fitted on.
        memory_mb: MiB that the fit of a layer may take in addition to the model.

    Raises:
        ValueError: The settings do nothing. Reading them, from a configuration or a text, also checks every value.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    ridge_lambdas: Annotated[tuple[Annotated[float, Gt(0), Le(1e9)], ...], MinLen(1)] = RIDGE_LAMBDAS
    target: Target = "global"
    tokens: Annotated[int, Ge(2), Le(1_000_000_000)] = 16384
    # Weights of 1, 2, 4 and 8 score 62.4, 65.0, 69.7 and 70.8 on `span`, and in the same order on two other tasks.
    answer_weight: Annotated[float, Gt(0), Le(1e6)] = 8.0
    shared_expert: Literal["fitted", "kept"] = "fitted"
    neurons: NeuronSettings | None = None
    strength: Strength = "ridge"
    input_rounds: Annotated[int, Ge(0), Le(100)] = 0
    gate: bool = False
    memory_mb: Annotated[int, Ge(1), Le(100_000_000)] = 8192

    def __post_init__(self) -> None:
        if self.strength == "none" and self.neurons is None:
            raise ValueError("a repair of strength none does nothing without neurons; leave it out, or choose another")
        if self.input_rounds and self.strength != "ridge":
            raise ValueError(
                f"input_rounds: it is 0 with strength {self.strength}, since only ridge fits weights again"
            )

    @property
    def text(self) -> str:
        """The settings as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> RepairSettings:
        """Read settings from its `text`, or raise `ValueError`."""
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(RepairSettings)


@dataclass(frozen=True)
class RepairedEdit:
    """An edit followed by a repair.

    Attributes:
        base: The edit to repair.
        settings: Settings of the repair.
        rows: Token sequences to fit on.
    """

    base: LayeredEdit
    settings: RepairSettings
    rows: FitRows = field(repr=False)

    @cached_property
    def _head(self) -> bytes:
        return f"repair/1 {self.settings.text} {self.rows.fingerprint} ".encode()

    @cached_property
    def phenotype_hash(self) -> str:
        return hashlib.sha256(self._head + self.base.phenotype_hash.encode()).hexdigest()

    @cached_property
    def layer_hashes(self) -> tuple[str, ...]:
        """A layer's fit depends on all layers before it."""
        return prefix_hashes(self._head, self.base.layer_hashes)
