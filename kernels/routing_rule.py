"""What a family's router does with its logits, as numbers: nothing here needs torch.

With l = W_G x (+ b_G) over n experts, a router scores them, `s = softmax(l)` or `s = sigmoid(l)`, ranks them by s or by
s + b (a correction bias, used for choosing only), chooses k, and weighs the chosen ones by s, rescaled to sum 1 if
`renormalise`, times `scale`.

Group-limited routing (DeepSeek-V2, arXiv 2405.04434, Sec. 2.2.2; DeepSeek-V3, arXiv 2412.19437, Sec. 2.1.2) divides the
experts, in order, into equal groups. A token may choose from its best groups only; a group is worth the sum of its best
experts' ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Scores = Literal["softmax", "sigmoid", "softmax_of_chosen"]
"""How logits become routing weights. `softmax_of_chosen`: the top-k is taken of the logits, then the softmax of those
(GPT-OSS); there are no probabilities over all experts."""

NO_SCORES = (
    "probs maps the scores of all experts, and this family has none, since it takes the top-k of the logits and the "
    "softmax of those; use router_space: logits"
)
"""Why a continuous mapping can't be of `probs` with `softmax_of_chosen`, to follow the setting's name."""


@dataclass(frozen=True, slots=True)
class RoutingGroups:
    """Groups of experts that a token's choice is limited to.

    Attributes:
        count: number of groups; 1 when the choice isn't limited.
        chosen: groups a token may choose from.
        best: experts of a group whose ranks add up to the group's.
    """

    count: int = 1
    chosen: int = 1
    best: int = 1

    def reach(self, experts: int) -> int:
        """How many of `experts` a token can choose from."""
        return self.chosen * (experts // self.count)

    def fault(self, experts: int) -> str | None:
        """Why a layer can't have this many experts, to follow their number in a message; None if it can."""
        if experts % self.count:
            return (
                f"can't be divided among the model's {self.count} routing groups; "
                f"use a multiple of {self.count}, so that every group keeps as many"
            )
        if experts // self.count < self.best:
            each = "" if self.count == 1 else f" in each of its {self.count} routing groups"
            return (
                f"are too few: the family ranks a group by its {self.best} best experts and needs as many{each}; "
                f"use {self.best * self.count} or more"
            )
        return None


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How one model's routers choose and weigh experts; see the module.

    Attributes:
        renormalise: whether the chosen weights are rescaled to sum 1.
        scores: how logits become scores.
        groups: limits of a token's choice.
        scale: factor on the weights.
    """

    renormalise: bool
    scores: Scores = "softmax"
    groups: RoutingGroups = field(default=RoutingGroups())
    scale: float = 1.0

    @property
    def one_hot_folds(self) -> bool:
        """Whether picking scores of experts equals picking their logits, so that a smaller router computes it.

        The softmax over all n differs from that over n' by a factor, which only rescaling cancels.
        """
        return self.renormalise or self.scores != "softmax"
