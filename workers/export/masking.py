"""Experts that the router's bias keeps from being chosen: as padding, and instead of leaving experts out.

A router with a bias b chooses by `s + b` (DeepSeek-V3, arXiv 2412.19437, Sec. 2.1.2) or by `W x + b` (GPT-OSS,
Kolibri-1). With b = `MASK` an expert is chosen only if too few others can be. Weights are computed from the chosen
experts alone, so a mask changes nothing else: the sigmoids don't depend on each other, and GPT-OSS takes the softmax of
the chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingRule
from moevolve.workers.checkpoints.pruning import KeptTensor
from moevolve.workers.contract.methods import ExpertSelection


def padded(selection: ExpertSelection, rule: RoutingRule, multiple: int) -> ExpertSelection:
    """Pad the number of experts to a multiple, for kernels that want it round.

    Every routing group gets as many, after its own, which are copies of its first expert and masked. The groups divide
    the padded number as well.
    """
    groups, kept = rule.groups.count, selection.retained
    step = math.lcm(groups, multiple)
    size, wanted = kept // groups, -(-kept // step) * step // groups
    if size == wanted:
        return selection
    places = [(group, place) for group in range(groups) for place in range(wanted)]
    rows = [group * size + (place if place < size else 0) for group, place in places]
    masked = tuple(position for position, (_, place) in enumerate(places) if place >= size)
    return replace(
        selection,
        routers=tuple(tuple(layer[row] for row in rows) for layer in selection.routers),
        experts=tuple(tuple(layer[row] for row in rows) for layer in selection.experts),
        masked=(masked,) * len(selection.experts),
    )


def masked_instead(selection: ExpertSelection, experts: int, rule: RoutingRule) -> ExpertSelection:
    """Return a selection that keeps all experts, n per layer, and masks those that another one leaves out.

    Raises:
        UserError: No mask computes the same, because router rows belong to other experts, or because the groups that
            tokens choose from are others.
    """
    if selection.routers != selection.experts:
        raise UserError("--form mask: it gives experts the router rows of others, which no mask does; use another form")
    size, kept = experts // rule.groups.count, selection.retained // rule.groups.count
    for layer in selection.experts:
        groups = [{each // size for each in layer[start : start + kept]} for start in range(0, len(layer), kept)]
        if rule.groups.count > 1 and (any(len(each) > 1 for each in groups) or len(set().union(*groups)) < len(groups)):
            raise UserError(
                "--form mask: its routing groups mix experts of several of the model's, so tokens would choose from "
                "other groups; use another form"
            )
    every = (tuple(range(experts)),) * len(selection.experts)
    masked = tuple(tuple(sorted(set(range(experts)) - set(layer))) for layer in selection.experts)
    return ExpertSelection(every, every, selection.active, masked)


def check_masked(kept: Sequence[KeptTensor], selection: ExpertSelection) -> None:
    """Raise a `UserError` unless every MoE layer has a bias for the experts that a selection masks."""
    layers = sum(bool(each) for each in selection.masked)
    if sum(bool(tensor.masked) for tensor in kept) < layers:
        raise UserError(
            "the model's routers have no bias that could keep an expert from being chosen, so its experts can be "
            "neither padded nor masked exactly; export the individual without --pad-experts and --form mask"
        )
