"""Thresholds of dynamic skipping: below which share of the first expert's routing weight a token's second is left out.

Source: Not All Experts are Equal (NAEE, arXiv 2402.14800), Sec. 3.3: a layer's threshold beta is the median, over
calibration tokens, of the ratio of the second to the first routing weight. They are those of the model as it is edited,
while it skips nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import CandidateError
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.methods.eep.router import EditableRouter
from moevolve.workers.methods.shared.padding import padded_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BINS = 1 << 16
"""Equal bins in [0, 1] that ratios of routing weights are counted in: a median is right to within 2^-17."""


class Ratios:
    """Ratios of tokens' second to their first routing weight, counted: memory doesn't grow with the tokens.

    Mapped routing weights can be negative or nothing; where the first isn't above 0 the ratio counts as 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(_BINS, dtype=torch.int64, device=device)

    def add(self, weights: Tensor) -> None:
        """Take in tokens' two routing weights, in descending order of rank, float32 [tokens, 2]; their scale cancels.

        Raises:
            CandidateError: a weight isn't finite.
        """
        if not bool(torch.isfinite(weights).all()):
            raise CandidateError("a routing weight is not finite")
        first, second = weights.unbind(dim=-1)
        ratios = torch.where(first > 0, second / first, 0).clamp(0, 1)
        # One more for every token: sums of whole numbers, in whatever order.
        bins = (ratios * _BINS).long().clamp_max(_BINS - 1)
        self._counts.scatter_add_(0, bins, torch.ones_like(bins))

    def median(self) -> float:
        """Of all ratios, as a number that float32 holds; of an even number the mean of the middle two."""
        upto = self._counts.cumsum(dim=0)
        total = int(upto[-1])
        middle = torch.tensor([(total - 1) // 2, total // 2], device=upto.device)
        bins = torch.searchsorted(upto, middle, right=True)
        return float(((bins.double() + 0.5) / _BINS).mean().float())


def skipping_thresholds(
    model: PreTrainedModel, routers: Sequence[EditableRouter], sequences: Sequence[Tokens]
) -> list[float]:
    """Measure an edited model that skips nothing, in one pass.

    Args:
        model: with an edit of two active experts on it.
        routers: of its MoE layers, in order of depth.
        sequences: token ids, one at least.

    Returns:
        The threshold of every MoE layer, in [0, 1].

    Raises:
        CandidateError: a routing weight isn't finite.
    """
    counts = [Ratios(_device(router)) for router in routers]
    _watch(model, routers, sequences, [each.add for each in counts])
    return [each.median() for each in counts]


def active_experts(model: PreTrainedModel, routers: Sequence[EditableRouter], sequences: Sequence[Tokens]) -> float:
    """Experts that a token uses in an edited model that skips some, on average over tokens and layers: 1 to 2."""
    used: list[Tensor] = []
    _watch(model, routers, sequences, [lambda weights: used.append((weights != 0).sum())] * len(routers))
    return sum(map(int, used)) / (len(routers) * sum(map(len, sequences)))


@torch.inference_mode()
def _watch(
    model: PreTrainedModel,
    routers: Sequence[EditableRouter],
    sequences: Sequence[Tokens],
    takes: Sequence[Callable[[Tensor], object]],
) -> None:
    """Run sequences for what routers make of them: each one's taker is given routing weights, float32 [tokens, 2]."""
    decoder = model.get_decoder()
    for batch in padded_batches(sequences, next(model.get_input_embeddings().parameters()).device):
        with ExitStack() as stack:
            for router, take in zip(routers, takes, strict=True):
                stack.callback(router.register_forward_hook(_telling(take, batch.real)).remove)
            decoder(input_ids=batch.ids, use_cache=False)


def _telling(take: Callable[[Tensor], object], real: Tensor) -> Callable[..., None]:
    def hook(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(router, EditableRouter) and router.plan is not None
        # Not the output's: those may have been rounded to the model's dtype.
        _, weights, _ = router.choose(router.plan, args[0])
        take(weights[real.to(weights.device)])

    return hook


def _device(router: EditableRouter) -> torch.device:
    weight = router.inner.weight
    assert isinstance(weight, Tensor)
    return weight.device
