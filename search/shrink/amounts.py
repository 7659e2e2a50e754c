"""What an amount means for a model: a number of experts, a share of neurons, or what fits into a size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingGroups
from moevolve.search.shrink.goal import Amount
from moevolve.search.text import memory_size
from moevolve.workers.contract.facts import FileSizes


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is searched, and where, beside what the request says.

    Attributes:
        genome: Settings of the genome; without a kind it has the preset's.
        preset: Preset that has the phases; None takes the default one.
        repaired: False leaves the preset's repairs out.
        only_formulas: True compares formulas' choices alone, without searching others.
        sentence: What is kept, for people; empty where that isn't known yet.
    """

    genome: Mapping[str, str | int | float]
    preset: str | None = None
    repaired: bool = True
    only_formulas: bool = False
    sentence: str = ""


def possible_experts(experts: int, groups: RoutingGroups) -> list[int]:
    """Return the numbers of experts that a model can keep, ascending."""
    return [count for count in range(1, experts + 1) if groups.fault(count) is None]


def kept_experts(amount: Amount, experts: int, groups: RoutingGroups) -> int:
    """Return the number of experts to keep per MoE layer.

    Args:
        amount: A number, which must be possible, or a share, which is rounded to what is.
        experts: Experts per MoE layer of the model.
        groups: The model's routing groups; each keeps the same number of experts.

    Raises:
        UserError: It is out of range, or all of them; the message names what is possible.
    """
    possible = possible_experts(experts, groups)
    kept = amount.number
    if amount.share is not None:
        share = amount.share
        kept = min(possible, key=lambda count: (abs(count - share * experts), -count))
    if kept == experts:
        raise UserError(f"{amount} keeps all {experts} experts; give a smaller number")
    if kept in possible:
        return kept
    numbers = f"1 to {experts}" if len(possible) == experts else ", ".join(map(str, possible))
    meant = f"did you mean {amount.text.strip()}%? Otherwise " if experts < kept < 100 else ""
    raise UserError(
        f"{amount}: {meant}give a share such as 50%, or one of the numbers that this model can keep: {numbers}"
    )


def fitting_experts(amount: Amount, sizes: FileSizes, experts: int, groups: RoutingGroups) -> int:
    """Return the largest number of kept experts with which the weight files fit.

    Args:
        amount: What they may take.
        sizes: Sizes of the files.
        experts, groups: See `kept_experts`.

    Raises:
        UserError: The fewest experts don't fit, or all of them do; the message says what they take.
    """
    possible = possible_experts(experts, groups)
    _check_larger(amount, sizes.total(experts))
    fitting = [count for count in possible if sizes.total(count) <= amount.number]
    if fitting:
        return fitting[-1]
    least = possible[0]
    raise UserError(
        f"{amount}: the smallest that this model can be is {memory_size(sizes.total(least))}, with {least} of "
        f"{experts} experts"
    )


def fitting_share(amount: Amount, sizes: FileSizes, experts: int) -> float:
    """Return the largest share of the experts' neurons with which the weight files fit.

    All experts are kept, only narrower, so that with any number of them the files fit. For arguments see
    `fitting_experts`.

    Raises:
        UserError: There is no room for neurons, or for all of them; the message says what is taken.
    """
    _check_larger(amount, sizes.total(experts))
    rest = sizes.total(experts) - experts * sizes.neurons
    if rest >= amount.number:
        raise UserError(f"{amount}: all that isn't neurons of experts takes {memory_size(rest)} already")
    return math.floor(1e6 * (amount.number - rest) / (experts * sizes.neurons)) / 1e6


def _check_larger(amount: Amount, whole: int) -> None:
    """Raise an error if the whole model fits the size."""
    if whole <= amount.number:
        raise UserError(f"{amount}: the whole model takes {memory_size(whole)} and fits; give a smaller size")
