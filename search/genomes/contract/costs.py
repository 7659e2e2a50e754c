"""What a kind's candidates take, worked out before there are any: FLOPs per token, sizes, and what a repair fits.

FLOPs per token are counted here and in the kinds' own `kind.py`, and nowhere else in a search; a multiply and an add
count two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from moevolve.workers.contract.facts import DenseFacts
    from moevolve.workers.profiling.outline import ModelOutline

S = TypeVar("S")


def network_flops(dense: DenseFacts) -> int:
    """FLOPs per token of one dense feed-forward network."""
    return 2 * (3 if dense.gated else 2) * dense.hidden * dense.width


def down_bytes(outline: ModelOutline, dense: DenseFacts) -> int:
    """The output projections of all dense networks."""
    return dense.layers * dense.width * dense.hidden * outline.facts.dtype_bytes


@dataclass(frozen=True, slots=True)
class FitOutline:
    """A linear map of a candidate's decoder layer that a repair fits.

    Attributes:
        width: features.
        blocks: of features that are zero on the same tokens.
        density: share of the tokens on which a feature isn't zero.
        pool: neurons among which those to be fitted are chosen; 0 where they can't be others.
    """

    width: int
    blocks: int
    density: float
    pool: int = 0


class GenomeCosts(ABC, Generic[S]):
    """What the candidates of one space take; `phase` is a kind of phase.

    Args:
        space: the space.
        outline: its model.
    """

    def __init__(self, space: S, outline: ModelOutline) -> None:
        self.space, self.outline = space, outline

    @property
    def kept_experts(self) -> int:
        """Experts of the model's own size that a candidate has per MoE layer; 0 without any."""
        return self.outline.facts.experts

    @abstractmethod
    def token_flops(self, phase: str) -> int:
        """FLOPs per token in a candidate's matrix products with weights, its logits' included.

        Attention between positions is left out.
        """

    @abstractmethod
    def counts(self, phase: str) -> tuple[int, int, int | None, int]:
        """A candidate's experts, active ones, parameters and active parameters, as `Description` has them.

        None stands for parameters that differ between candidates; active ones are then those of the start's widths, and
        the start may have fewer.
        """

    def different(self, phase: str) -> int | None:
        """How many different candidates a phase can make; None if they don't run out."""
        return None

    def buffer_bytes(self, phases: Iterable[str], host: bool, repaired: bool) -> int:
        """What a worker sets aside for candidates' own weights.

        Args:
            phases: of the search.
            host: whether original experts stay on the host.
            repaired: whether candidates are.
        """
        return 0

    def measuring_bytes(self, longest: int) -> int:
        """Most device memory that the calibration takes beside the model.

        Args:
            longest: tokens of the longest sequence.
        """
        return 0

    def measuring_host_bytes(self) -> int:
        """Most host memory that the calibration takes, where some of it isn't done on the device."""
        return 0

    def fits(self) -> tuple[tuple[FitOutline, ...], ...]:
        """What a repair fits of every decoder layer, in the order in which it does."""
        return ((),) * len(self.outline.layers)
