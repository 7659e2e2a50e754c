"""The wrapper around the router of each MoE layer: it changes nothing until an EEP edit gives it a plan.

Thresholds of dynamic skipping, which leaves out a token's second expert if its routing weight is small, are measured on
the edited model while it skips nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moevolve.evaluators.errors import CandidateError
from moevolve.kernels.products import linear
from moevolve.kernels.routing import choose_kept, route_logits, route_mapped, route_selected
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.families.decoder import decoder_of
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.methods.shared.passes import padded_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Number of equal bins over [0, 1]; medians are exact to within 2^-17.
_BINS = 1 << 16

# A router's logits [tokens, n or n'], routing weights [tokens, k], and expert indices int64 [tokens, k].
Routing = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class RoutingPlan:
    """Routing of an edited layer. Exactly one of `selected`, `mapping` and `folded` is set.

    Attributes:
        active: Experts per token k.
        positions: Position of each kept expert in the layer's expert tensors, int64 [n']; None if kept
            expert i is at position i.
        selected: One-hot `W_RM`: the original expert whose routing weight each kept expert takes, int64 [n'].
        mapping: Continuous `W_RM`, applied to the scores of all n experts, float32 [n', n].
        folded: Router weight with the mapping folded in, `W_RM W_G`, [n', hidden]; logits space only.
        folded_bias: `W_RM b` to go with `folded`, where b is the bias of the router's logits, [n'].
        correction: `W_RM b` where b is the router's correction bias, float32 [n'].
        places: Number of the kept expert that takes each original expert's tokens, or -1, int64 [n], in a layer whose
            experts are chosen by a table of token ids; see `choose_kept`.
        factors: `W_RM f` where f are the factors of the experts' routing weights, [n'].
        logits_space: True if the mapping applies to logits instead of scores.
        skip_below: Threshold of dynamic skipping; see `moevolve.kernels.routing.top_k`.
    """

    active: int
    positions: Tensor | None = None
    selected: Tensor | None = None
    mapping: Tensor | None = None
    folded: Tensor | None = None
    folded_bias: Tensor | None = None
    correction: Tensor | None = None
    places: Tensor | None = None
    factors: Tensor | None = None
    logits_space: bool = False
    skip_below: float | None = None

    @property
    def retained(self) -> int:
        """Number n' of kept experts."""
        tensor = next(each for each in (self.selected, self.mapping, self.folded) if each is not None)
        return int(tensor.shape[0])


class EditableRouter(nn.Module):
    """Replaces a layer's router; without a plan it calls the original one unchanged.

    Attributes:
        inner: The family's router.
        plan: Routing to use instead of `inner`, or None.
        before_forward: Called before tokens are routed, with True without a plan. It loads experts that aren't on
            the device.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.inner, self.family, self.rule, self.table = layer.router, layer.family, layer.rule, layer.table
        self.plan: RoutingPlan | None = None
        self.before_forward: Callable[[bool], None] | None = None

    def forward(self, hidden_states: Tensor, *given: Tensor) -> Routing:
        """Route tokens with hidden states [..., hidden] to positions in the layer's expert tensors.

        `given` is what else the family's MoE blocks pass to the router: the correction bias, or token ids to a table.
        """
        if self.before_forward is not None:
            self.before_forward(self.plan is None)
        if self.plan is not None:
            return self.route(self.plan, hidden_states, *given)
        routed: Routing = self.inner(hidden_states, *given)
        # Logarithms of probabilities are logits, up to a constant per token that no rule depends on.
        return (routed[0].log(), *routed[1:]) if self.family.gives_probabilities else routed

    def route(self, plan: RoutingPlan, hidden_states: Tensor, *given: Tensor) -> Routing:
        """Route tokens by a plan to positions in the layer's expert tensors; see `forward`."""
        logits, weights, chosen = self.route_to_kept(plan, hidden_states, *given)
        if plan.positions is not None:
            chosen = plan.positions[chosen]
        return logits, weights.to(hidden_states.dtype) if self.family.casts_weights else weights, chosen

    def route_to_kept(self, plan: RoutingPlan, hidden_states: Tensor, *given: Tensor) -> Routing:
        """Route tokens by a plan to kept experts 0 to n' - 1, with routing weights in float32; see `forward`."""
        logits, bias, skip_below = self._logits(hidden_states, plan), plan.correction, plan.skip_below
        fixed = None
        if plan.places is not None:
            assert self.table is not None
            fixed = choose_kept(self.table[given[0].flatten()].long(), plan.places, plan.retained, plan.active)
        if plan.selected is not None:
            weights, chosen = route_selected(
                logits, plan.selected, plan.active, self.rule, plan.logits_space, skip_below, bias=bias, chosen=fixed
            )
        elif plan.mapping is not None:
            weights, chosen = route_mapped(logits, plan.mapping, plan.active, self.rule, skip_below, bias=bias)
        else:
            weights, chosen = route_logits(logits, plan.active, self.rule, skip_below, bias=bias, chosen=fixed)
        return logits, weights if plan.factors is None else weights * plan.factors[chosen], chosen

    def _logits(self, hidden_states: Tensor, plan: RoutingPlan) -> Tensor:
        """Logits of all n experts, or of the n' kept ones if the mapping is folded in: [tokens, n or n']."""
        weight, bias = plan.folded, plan.folded_bias
        if weight is None:
            weight, bias = self.inner.get_parameter(self.family.weight), getattr(self.inner, "bias", None)
        hidden = hidden_states.reshape(-1, weight.shape[1])
        if self.family.prepare is not None:
            hidden = self.family.prepare(self.inner, hidden)
        if self.family.float32_router:
            hidden, weight = hidden.float(), weight.float()
        logits = linear(hidden, weight, bias)
        factor = self.family.logits_factor
        return logits if factor is None else logits * getattr(self.inner, factor)


def fold(mapping: Tensor, original: Tensor) -> Tensor:
    """Fold a mapping, float32 [n', n], into a router: `W_RM W_G` or `W_RM b`, accumulated in float32."""
    return (mapping @ original.to(torch.float32)).to(original.dtype)


class RatioHistogram:
    """Histogram of the ratios of tokens' second to their first routing weight.

    Mapped routing weights can be negative or zero. If the first isn't positive, the ratio counts as 0.

    Source: Not All Experts are Equal (NAEE, arXiv 2402.14800), Sec. 3.3. A layer's threshold is the median of these
    ratios over calibration tokens. A token's second expert is skipped if its ratio is below that.
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
    """Measure the threshold of every MoE layer, in [0, 1], in one pass over at least one sequence.

    Raises:
        CandidateError: A routing weight is not finite.
    """
    histograms = [RatioHistogram(router.inner.get_parameter(router.family.weight).device) for router in routers]
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
    decoder = decoder_of(model)
    for batch in padded_batches(sequences, next(model.get_input_embeddings().parameters()).device):
        with ExitStack() as stack:
            for router, callback in zip(routers, callbacks, strict=True):
                hook = partial(_pass_weights, callback, batch.real)
                stack.callback(router.register_forward_hook(hook).remove)
            decoder(input_ids=batch.ids, use_cache=False)


def _pass_weights(
    callback: Callable[[Tensor], object], real: Tensor, router: nn.Module, args: tuple[Tensor, ...], output: object
) -> None:
    assert isinstance(router, EditableRouter) and router.plan is not None
    # The weights in the output may have been rounded to the model's dtype.
    _, weights, _ = router.route_to_kept(router.plan, *args)
    callback(weights[real.to(weights.device)])
