"""Thresholds of dynamic skipping, which leaves out a token's second expert if its routing weight is small.

Source: Not All Experts are Equal (NAEE, arXiv 2402.14800), Sec. 3.3. The threshold beta of a layer is the median, over
calibration tokens, of the ratio of the second to the first routing weight. A token's second expert is skipped if its
ratio is below that. Thresholds are measured on the edited model while it skips nothing.
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
from moevolve.workers.methods.shared.passes import padded_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BINS = 1 << 16
"""Number of equal bins over [0, 1]; medians are exact to within 2^-17."""


class RatioHistogram:
    """Histogram of the ratios of tokens' second to their first routing weight.

    Mapped routing weights can be negative or zero. If the first isn't positive, the ratio counts as 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(_BINS, dtype=torch.int64, device=device)

    def add(self, weights: Tensor) -> None:
        """Count tokens with routing weights float32 [tokens, 2], the higher-ranked expert's first; their scale cancels.

        Raises:
            CandidateError: A weight is not finite.
        """
        if not bool(torch.isfinite(weights).all()):
            raise CandidateError("a routing weight is not finite")
        first, second = weights.unbind(dim=-1)
        ratios = torch.where(first > 0, second / first, 0).clamp(0, 1)
        # Integer sums, so the order in which a device adds them doesn't matter.
        bins = (ratios * _BINS).long().clamp_max(_BINS - 1)
        self._counts.scatter_add_(0, bins, torch.ones_like(bins))

    def median(self) -> float:
        """Median ratio, rounded to float32; the mean of the middle two for an even number of tokens."""
        upto = self._counts.cumsum(dim=0)
        total = int(upto[-1])
        middle = torch.tensor([(total - 1) // 2, total // 2], device=upto.device)
        bins = torch.searchsorted(upto, middle, right=True)
        return float(((bins.double() + 0.5) / _BINS).mean().float())


def skipping_thresholds(
    model: PreTrainedModel, routers: Sequence[EditableRouter], sequences: Sequence[Tokens]
) -> list[float]:
    """Measure the thresholds of an edited model that skips nothing yet, in one pass.

    Args:
        model: Model with an edit of two active experts applied.
        routers: Routers of all MoE layers, in order of depth.
        sequences: Token ids, at least one sequence.

    Returns:
        Threshold of every MoE layer, in [0, 1].

    Raises:
        CandidateError: A routing weight is not finite.
    """
    histograms = [RatioHistogram(_device(router)) for router in routers]
    _observe_weights(model, routers, sequences, [each.add for each in histograms])
    return [each.median() for each in histograms]


def mean_active_experts(
    model: PreTrainedModel, routers: Sequence[EditableRouter], sequences: Sequence[Tokens]
) -> float:
    """Experts used per token by an edited model that skips some, averaged over tokens and layers: 1 to 2."""
    used: list[Tensor] = []
    _observe_weights(model, routers, sequences, [lambda weights: used.append((weights != 0).sum())] * len(routers))
    return sum(map(int, used)) / (len(routers) * sum(map(len, sequences)))


@torch.inference_mode()
def _observe_weights(
    model: PreTrainedModel,
    routers: Sequence[EditableRouter],
    sequences: Sequence[Tokens],
    callbacks: Sequence[Callable[[Tensor], object]],
) -> None:
    """Run sequences and pass each router's weights, float32 [tokens, 2], to its callback."""
    decoder = model.get_decoder()
    for batch in padded_batches(sequences, next(model.get_input_embeddings().parameters()).device):
        with ExitStack() as stack:
            for router, callback in zip(routers, callbacks, strict=True):
                stack.callback(router.register_forward_hook(_weights_hook(callback, batch.real)).remove)
            decoder(input_ids=batch.ids, use_cache=False)


def _weights_hook(callback: Callable[[Tensor], object], real: Tensor) -> Callable[..., None]:
    def hook(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        assert isinstance(router, EditableRouter) and router.plan is not None
        # The weights in the output may have been rounded to the model's dtype.
        _, weights, _ = router.route_to_kept(router.plan, args[0])
        callback(weights[real.to(weights.device)])

    return hook


def _device(router: EditableRouter) -> torch.device:
    weight = router.inner.weight
    assert isinstance(weight, Tensor)
    return weight.device
