"""The repaired edit: another edit, followed by a fit of the weights that it keeps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import TypeAdapter

from moevolve.workers.contract.edits import LayeredEdit, prefix_hashes
from moevolve.workers.contract.fitting import FitRows

# Default ridge lambdas to try: with 60,000 tokens the first was best, with 8,000 the third.
RIDGE_LAMBDAS = (1e-3, 1e-2, 1e-1, 1.0)


@dataclass(frozen=True, slots=True)
class RepairSettings:
    """Settings of a repair: layer after layer, ridge regression that shrinks to the present weights.

    Reading them, from a configuration or a text, checks every value.

    Attributes:
        ridge_lambdas: Ridge strengths to try, as multiples of the features' mean square summed over tokens. Each layer
            takes the one with the least error on held-out sequences.
        tokens: Limit on the number of tokens, taken from the calibration's first sequences.
        answer_weight: Weight of the tokens that predict an answer's tokens, relative to that of all others, in the
            choice of neurons and in the fit.
        neurons: Fill the kept experts with neurons of all experts before the fit.
        input_rounds: Rounds in which also the gate and up projections of experts and networks are fitted, and the
            output projections again (`moevolve.workers.methods.repair.inputs`). A round takes as long as 30 passes.
        continuations: How often the unedited model continues each of the calibration's sequences where these have fewer
            tokens, drawing from its predictions; it is fitted on what it writes as well.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    ridge_lambdas: Annotated[tuple[Annotated[float, Gt(0), Le(1e9)], ...], MinLen(1)] = RIDGE_LAMBDAS
    tokens: Annotated[int, Ge(2), Le(1_000_000_000)] = 16384
    # Weights of 1, 2, 4 and 8 score 59.8, 63.0, 64.7 and 66.5 on `span`, and in the same order on two other tasks.
    answer_weight: Annotated[float, Gt(0), Le(1e6)] = 8.0
    neurons: bool = False
    input_rounds: Annotated[int, Ge(0), Le(100)] = 0
    continuations: Annotated[int, Ge(0), Le(100)] = 0

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
        return f"repair/2 {self.settings.text} {self.rows.fingerprint} ".encode()

    @cached_property
    def phenotype_hash(self) -> str:
        return hashlib.sha256(self._head + self.base.phenotype_hash.encode()).hexdigest()

    @cached_property
    def layer_hashes(self) -> tuple[str, ...]:
        """A layer's fit depends on all layers before it."""
        return prefix_hashes(self._head, self.base.layer_hashes)
