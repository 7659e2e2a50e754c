"""What to keep: a number or a share of experts or neurons, or what fits a size; and the time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import RoutingGroups
from moevolve.search.shrink.options import ShrinkOptions
from moevolve.search.text import memory_size, quantity
from moevolve.workers.contract.facts import FileSizes

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_DURATIONS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
# How many times the given time a search may take by what was measured, before it is refused.
LONGEST = 1.2


@dataclass(frozen=True, slots=True)
class SizeBudget:
    """What a checkpoint's weight files may take.

    Attributes:
        text: The size as the user gave it.
        size: The same in bytes.
    """

    text: str
    size: int


def budget_of(request: ShrinkOptions) -> SizeBudget | None:
    """Read the size that a request asks for; None if it asks for experts, neurons, active neurons or a score.

    Raises:
        UserError: It asks for several or none of them, for all experts or neurons, or a share or size isn't one.
    """
    given = (request.experts, request.neurons, request.size, request.keep_score, request.active)
    if sum(each is not None for each in given) != 1:
        raise UserError(
            "give one of --experts (for example 50%), --neurons (for example 12.5%), --size (for example 16GiB) and "
            "--keep-score (for example 99%), or of a dense model --active (for example 50%)"
        )
    _check_shares(request)
    if request.kind is not None and request.active is None:
        raise UserError(f"--kind {request.kind} requires --active")
    if request.size is None:
        return None
    size = quantity(request.size.lower(), _UNITS)
    if size is None:
        raise UserError(f"--size {request.size}: give a number with a unit, such as 16GiB, 700MB or 1.5TB")
    return SizeBudget(request.size, int(size))


def _check_shares(request: ShrinkOptions) -> None:
    """Refuse shares that aren't any, or that ask for nothing, without a look at the model."""
    if request.experts is not None:
        if _share(request.experts) == 1:
            raise UserError(f"--experts {request.experts} keeps every expert; give a smaller number")
        if _share(request.experts) is None and not _count(request.experts):
            raise UserError(f"--experts {request.experts}: give a number such as 8, or a share such as 50%")
    for option, share in (("--neurons", request.neurons), ("--active", request.active)):
        if share is not None:
            kept_share(share, option)
    if request.keep_score is not None:
        kept_score(request.keep_score)
        if request.dry_run:
            raise UserError("--keep-score finds the size by searching, so that there is no --dry-run; leave one out")


def _count(text: str) -> int:
    """Read a number of experts; 0 if it isn't one."""
    return int(text) if text.strip().isdecimal() else 0


def kept_share(wanted: str, option: str = "--neurons") -> float:
    """Read a share of neurons such as `12.5%`, in (0, 1), the value of an option.

    Raises:
        UserError: It isn't one.
    """
    share = _share(wanted)
    if share == 1:
        raise UserError(f"{option} {wanted} keeps every neuron; give a smaller share such as 12.5%")
    if share is None:
        raise UserError(f"{option} {wanted}: give a share such as 12.5%")
    return share


def kept_score(wanted: str) -> float:
    """Read the share of the full model's score that --keep-score asks for, such as `99%`, in (0, 1).

    Raises:
        UserError: It isn't one.
    """
    share = _share(wanted)
    if share is None or share == 1:
        raise UserError(
            f"--keep-score {wanted}: give a share below 100%, such as 99%; no number of rows shows that nothing is lost"
        )
    return share


def _share(text: str) -> float | None:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    return float(found[1]) / 100 if found is not None and 0 < float(found[1]) <= 100 else None


def kept_experts(wanted: str, experts: int, groups: RoutingGroups) -> int:
    """The number of experts to keep per MoE layer.

    Args:
        wanted: A number such as `4`, which must be possible, or a share such as `50%`, which is rounded to what is.
        experts: Experts per MoE layer of the model.
        groups: The model's routing groups, of which each keeps as many experts.

    Raises:
        UserError: It is neither, out of range, or all of them; the message names what is possible.
    """
    possible = possible_experts(experts, groups)
    share, kept = _share(wanted), None
    if share is not None:
        kept = min(possible, key=lambda count: (abs(count - share * experts), -count))
    elif _count(wanted) in possible:
        kept = _count(wanted)
    if kept == experts:
        raise UserError(f"--experts {wanted} keeps all {experts} experts; give a smaller number")
    if kept is not None:
        return kept
    numbers = f"1 to {experts}" if len(possible) == experts else ", ".join(map(str, possible))
    meant = f"did you mean {wanted.strip()}%? Otherwise " if experts < _count(wanted) < 100 else ""
    raise UserError(
        f"--experts {wanted}: {meant}give a share such as 50%, or one of the numbers that this model can keep: "
        f"{numbers}"
    )


def fitting_experts(budget: SizeBudget, sizes: FileSizes, experts: int, groups: RoutingGroups) -> int:
    """The largest number of kept experts with which the weight files fit.

    Args:
        budget: What they may take.
        sizes: Sizes of the files.
        experts, groups: See `kept_experts`.

    Raises:
        UserError: The fewest experts don't fit, or all of them do; the message says what they take.
    """
    possible = possible_experts(experts, groups)
    _check_larger(budget, sizes.total(experts))
    fitting = [count for count in possible if sizes.total(count) <= budget.size]
    if fitting:
        return fitting[-1]
    least = possible[0]
    raise UserError(
        f"--size {budget.text}: the smallest that this model can be is {memory_size(sizes.total(least))}, with {least} "
        f"of {experts} experts"
    )


def _check_larger(budget: SizeBudget, whole: int) -> None:
    """Raise an error if the whole model fits the budget."""
    if whole <= budget.size:
        raise UserError(f"--size {budget.text}: the model takes only {memory_size(whole)}; give a smaller size")


def fitting_share(budget: SizeBudget, sizes: FileSizes, experts: int) -> float:
    """The largest share of the experts' neurons with which the weight files fit.

    All experts are kept, only narrower, so that with any number of them the files fit. For arguments see
    `fitting_experts`.

    Raises:
        UserError: There is no room for neurons, or for all of them; the message says what is taken.
    """
    _check_larger(budget, sizes.total(experts))
    rest = sizes.total(experts) - experts * sizes.neurons
    if rest >= budget.size:
        raise UserError(
            f"--size {budget.text}: what isn't neurons of experts takes {memory_size(rest)} already; give a larger size"
        )
    return math.floor(1e6 * (budget.size - rest) / (experts * sizes.neurons)) / 1e6


def possible_experts(experts: int, groups: RoutingGroups) -> list[int]:
    """Numbers of experts that a model can keep, ascending."""
    return [count for count in range(1, experts + 1) if groups.fault(count) is None]


def seconds_of(text: str, option: str = "--time") -> float:
    """Read a duration such as `2h` or `90min`, the value of an option, in seconds.

    Raises:
        UserError: It isn't one.
    """
    found = quantity(text, _DURATIONS)
    if found is None:
        raise UserError(f"{option} {text}: give a number with a unit, such as 2h, 90min or 1.5d")
    return found


def enough(seconds: float) -> str:
    """A value of --time that is as long or a little longer."""
    return f"{math.ceil(seconds / 60)}m" if seconds < 7200 else f"{math.ceil(seconds / 3600)}h"


def clock(seconds: float) -> str:
    """The local time of day in so many seconds."""
    return (datetime.now() + timedelta(seconds=seconds)).strftime("%H:%M:%S")  # noqa: DTZ005 - as users' clocks say
