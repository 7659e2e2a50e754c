"""The routing rule of a model: how a router turns its logits into chosen experts and weights. Needs no torch.

From the logits l = W_G x (+ b_G) over n experts a router computes scores, `s = softmax(l)` or `s = sigmoid(l)`. It
ranks experts by s, or by s + b with a correction bias for choosing only, and chooses the best k. Their weights are s,
rescaled to sum to 1 if `renormalise`, times `scale`.

Group-limited routing (DeepSeek-V2, arXiv 2405.04434, Sec. 2.2.2; DeepSeek-V3, arXiv 2412.19437, Sec. 2.1.2) divides the
experts, in order, into equal groups, and a token chooses from its best groups only. A group is ranked by the sum of the
ranks of its best experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

# How logits become routing weights. With `softmax_of_chosen` (GPT-OSS) the top-k of the logits is chosen, and their
# softmax gives the weights. With `sigmoid_of_chosen` (Kolibri-1) it is the top-k of the logits plus a correction bias,
# and the sigmoids of their logits. With `sparse_mixer` (Phi-3.5-MoE) the best expert is chosen, then the best of the
# others, and each is weighted by a softmax over those whose logits are near its own. With `sqrt_softplus_of_chosen`
# (DeepSeek-V4) the experts of a token are those that a table has for its id, or the top-k of `sqrt(softplus(l))` plus a
# correction bias, and those roots give the weights. None of the four has scores over all experts that decide alone.
Scores = Literal[
    "softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen", "sparse_mixer", "sqrt_softplus_of_chosen"
]

# Error message for a mapping in `router_space: probs` without scores, after the name of the setting.
NO_SCORES = (
    "probs maps the scores of all experts, and this family has none, since it chooses and weights experts by their "
    "logits; use router_space: logits"
)

# Error message for dynamic skipping in families without it, after the name of the setting.
NO_SKIPPING = (
    "this family chooses a token's second expert for another reason than its weight beside the first's; leave it out"
)


@dataclass(frozen=True, slots=True)
class RoutingGroups:
    """Groups of experts that limit a token's choice.

    Attributes:
        count: Number of groups; 1 for no limit.
        chosen: Number of groups that a token chooses from.
        best: Number of experts per group whose ranks are summed to rank the group.
    """

    count: int = 1
    chosen: int = 1
    best: int = 1

    def reach(self, experts: int) -> int:
        """Return the number of experts, of `experts` per layer, that a token can choose from."""
        return self.chosen * (experts // self.count)

    def fault(self, experts: int) -> str | None:
        """Return why a layer can't have this many experts, as the rest of a sentence; None if it can."""
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
    """How a model's routers choose and weight experts; see the module's docstring.

    Attributes:
        renormalise: True if the weights of the chosen experts are rescaled to sum to 1.
        scores: Function that turns logits into scores.
        groups: Groups that limit a token's choice.
        scale: Factor on the weights.
        corrected: True if a correction bias is added to a softmax for choosing.
        nearness: With `sparse_mixer`, how far a logit may lie below that of the chosen expert to count in its softmax,
            relative to the larger of its own absolute value and the chosen expert's logit.
        scales_inputs: True if weights multiply the experts' inputs instead of their outputs (Llama-4).
        rounds: True if scores and weights have the logits' dtype, as `transformers` computes them in some families,
            instead of float32.
    """

    renormalise: bool
    scores: Scores = "softmax"
    groups: RoutingGroups = field(default=RoutingGroups())
    scale: float = 1.0
    corrected: bool = False
    nearness: float = 0.0
    scales_inputs: bool = False
    rounds: bool = False

    @property
    def has_scores(self) -> bool:
        """True if there are scores over all experts, which `router_space: probs` maps."""
        return self.scores in ("softmax", "sigmoid")

    @property
    def can_skip(self) -> bool:
        """True if a token's second expert may be skipped where its weight is small beside the first one's."""
        # With the second of these scores, layers may choose experts by token ids.
        return self.scores not in ("sparse_mixer", "sqrt_softplus_of_chosen") and not self.scales_inputs

    @property
    def one_hot_folds(self) -> bool:
        """True if selecting experts' scores equals selecting their logits, so that a smaller router computes it."""
        # The softmax over n experts differs from that over n' by a factor. Rescaling cancels it in the weights, but
        # with a correction bias it also changes which experts are chosen.
        return self.scores != "softmax" or (self.renormalise and not self.corrected)

    def active_fault(self, experts: int, active: int) -> str | None:
        """Return why a token can't have `active` of `experts` experts, as the rest of a sentence; None if it can."""
        groups = self.groups
        if active > groups.reach(experts):
            return (
                f"of {experts} are more than the {groups.reach(experts)} in the {groups.chosen} of {groups.count} "
                "routing groups that a token may choose from; use fewer"
            )
        if self.scores == "sparse_mixer" and active != 2:
            return "can't be had: the family's routers always choose two; keep two experts or more, with active: 2"
        return None
