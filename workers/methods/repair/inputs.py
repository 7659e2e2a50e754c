"""Fits of experts' gate and up projections to what a fit of the output projections leaves of a layer's error.

An expert gives `(q * act(x W^T + b)) D` for an input x, its routing weight or mask q, and its output projection D.
Linearised in the change of W, what it gives changes by `(q * (slopes * (x dW^T))) D`, where the slopes are the
derivatives of the activation. `dW` is the damped least-squares solution for the layer's error (Gauss-Newton with
Levenberg's damping; Nocedal and Wright, Numerical Optimization, 2006, Sec. 10.3), computed by conjugate gradients,
which only need products with W, preconditioned by the second moments of the expert's inputs. Experts follow one
another, each with the error that those before it leave. No derivative passes through the model: a layer is fitted to
the unedited model's hidden states, as the output projections are.

Of every expert's step a whole, a half or a quarter is taken, whichever leaves the least error on held-out tokens, or
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn

from moevolve.workers.contract.capacity import release_freed_memory
from moevolve.workers.methods.repair.ridge import conjugate_gradients, squared_norm
from moevolve.workers.methods.shared.outputs import Network, padded, products_dtype

# Iterations of conjugate gradients. On three domains of text, 8 of 32 experts, 3, 6 and 12 of them leave a log gap of
# 0.275, 0.260 and 0.258 to the full model; without preconditioning 6, 12 and 24 leave 0.292, 0.268 and 0.265.
_ITERATIONS = 6
# Damping as a multiple of the mean square of a weight's unit effect, and of the mean second moment of inputs.
_DAMPING = 0.01
_STEPS = (1.0, 0.5, 0.25)
# Entries of gate and up projections from which on it takes less time to give memory back than to fit one of them.
_LARGE = 1 << 20
# Bytes that an expert's activations, slopes and their products take at once.
_CHUNK_BYTES = 1 << 30


def fit_inputs(networks: Iterable[Network], residual: Tensor, checked: Tensor, token_weights: Tensor | None) -> None:
    """Change the gate and up projections of a layer's experts, one after the other, in place.

    Args:
        networks: The experts, each with the tokens that are routed to it.
        residual: Target minus output of the layer, float32 [tokens, hidden]; afterwards what is left of it.
        checked: Mask of held-out tokens, bool [tokens].
        token_weights: Factors of the tokens' squares, float32 [tokens]; None for 1.
    """
    roots = torch.ones(len(residual), 1, device=residual.device)
    if token_weights is not None:
        roots = token_weights.to(residual.device).sqrt()[:, None]
    for network in networks:
        held_out = checked[network.tokens]
        if not held_out.any() or held_out.all():
            continue
        system = _System(network, roots, ~held_out)
        change, before, given = system.solve(residual), network.weight.clone(), system.given()
        left = residual[network.tokens]
        best, weight = left, before
        least = squared_norm((left * roots[network.tokens])[held_out])
        for step in _STEPS:
            network.weight.copy_(before.float() + step * change)
            trial = left + given - system.given()
            error = squared_norm((trial * roots[network.tokens])[held_out])
            if error < least:
                least, best, weight = error, trial, network.weight.clone()
        network.weight.copy_(weight)
        residual[network.tokens] = best
        if network.weight.numel() >= _LARGE:
            release_freed_memory()  # otherwise what experts of different numbers of tokens took adds up


def inputs_bytes(rows: int, tokens: int, hidden: int) -> int:
    """Return the bytes of fitting the gate and up projections of an expert with so many tokens.

    In float32: three copies of the projections and seven vectors of their size; the moments of the inputs, their factor
    and its copy; and for tokens the rows' values, slopes and changes, inputs, outputs, and what is left of them.
    """
    by_token = 4 * (6 * rows + 4 * hidden)
    return (
        4 * hidden * (10 * rows + 3 * hidden)
        + min(tokens * by_token, max(_CHUNK_BYTES, by_token))
        + 12 * tokens * hidden
    )


class _System:
    """The linearised least squares of one expert: `normal` is what conjugate gradients multiply with.

    Rows of the gate and up projections are sorted: the first row of every neuron precedes the second of any.
    """

    def __init__(self, network: Network, roots: Tensor, fitted: Tensor) -> None:
        self._network, self._roots, self._fitted = network, roots, fitted
        self._dtype = products_dtype(network.inputs, min(network.down.shape))
        self._chunk = max(1, _CHUNK_BYTES // (4 * (6 * len(network.weight) + 4 * network.weight.shape[1])))
        self._down = network.down.to(self._dtype)
        # Where neurons are few, products of their outputs are smaller than the outputs.
        neurons, hidden = self._down.shape
        self._down_products = self._down @ self._down.t() if neurons < 2 * hidden else None
        # Indices, since sums by `index_add_` differ from run to run on a GPU.
        self._order = network.neurons.argsort(stable=True).view(neurons, -1).t().flatten()
        self._whole: list[tuple[Tensor, Tensor, Tensor, Tensor]] | None = None

    def solve(self, residual: Tensor) -> Tensor:
        """Return the change of the weight, float32 [rows, hidden], that leaves least of a residual [tokens, hidden]."""
        rest, diagonal = self._right(residual)
        inverse = self._inverse_moments()
        change, image = torch.zeros_like(rest), torch.empty_like(rest)

        def curvature(direction: Tensor) -> Tensor:
            image.copy_(self._normal(direction).add_(_DAMPING * diagonal * direction))
            return (direction * image).sum()

        steps = conjugate_gradients(
            lambda: rest,
            curvature,
            lambda left: (left.to(self._dtype) @ inverse).float(),
            lambda first, second: (first * second).sum(),
        )
        for direction, length in islice(steps, _ITERATIONS):
            change += length * direction
            rest -= length * image
        if not bool(change.isfinite().all()):
            return torch.zeros_like(change)
        found = torch.empty_like(change)
        found[self._order] = change
        return found

    def given(self) -> Tensor:
        """Return what the expert gives now, float32 [its tokens, hidden]."""
        network = self._network
        parts = torch.arange(len(network.tokens), device=network.tokens.device).split(self._chunk)
        given = []
        for part in parts:
            rows = self._padded(part)
            activated = (network.factor[rows] * network.activated(rows)).to(self._dtype)
            given.append((activated @ self._down)[: len(part)].float())
        return torch.cat(given)

    def _parts(self) -> Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Tokens of the layer, inputs, slopes and factors, of fitted tokens, some at a time; kept if once suffices."""
        if self._whole is None:
            parts = self._fitted.nonzero()[:, 0].split(self._chunk)
            if len(parts) > 1:
                return map(self._part, parts)
            self._whole = [self._part(parts[0])]
        return self._whole

    def _part(self, part: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        network, rows = self._network, self._padded(part)
        tokens = network.tokens[rows]
        slopes = network.slopes(rows)[:, self._order].to(self._dtype)
        factor = (network.factor[rows] * self._roots[tokens]).to(self._dtype)
        factor[len(part) :] = 0  # so that padding counts nowhere
        return tokens, network.inputs[rows].to(self._dtype), slopes, factor

    def _padded(self, part: Tensor) -> Tensor:
        return padded(part, self._network.inputs, min(self._network.down.shape))

    def _by_neuron(self, rows: Tensor) -> Tensor:
        """View values of rows [tokens, rows] as [tokens, rows per neuron, neurons]."""
        return rows.view(len(rows), -1, len(self._down))

    def _right(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the right side of the normal equations, and the mean of their diagonal."""
        right = torch.zeros_like(self._network.weight, dtype=torch.float32)
        diagonal, lengths = torch.zeros((), device=right.device), self._down.float().square().sum(dim=1)
        for tokens, inputs, slopes, factor in self._parts():
            back = ((residual[tokens] * self._roots[tokens]).to(self._dtype) @ self._down.t()) * factor
            by_neuron = self._by_neuron(slopes)
            right += (by_neuron * back[:, None]).view_as(slopes).t() @ inputs
            moved = (by_neuron * factor[:, None]).float().square().sum(dim=1) @ lengths
            diagonal += (moved * inputs.float().square().mean(dim=1)).sum()
        return right, diagonal / len(right)

    def _inverse_moments(self) -> Tensor:
        """Inverse of the damped second moments of the expert's inputs, each weighted as its effect is [hidden, hidden].

        With the moments of the layer's inputs for all experts, what is repaired has 1.3 % more perplexity (8 of 32
        experts by HOPE on three domains of text).
        """
        hidden = self._network.weight.shape[1]
        moments = torch.zeros(hidden, hidden, device=self._network.weight.device)
        for _, inputs, _, factor in self._parts():
            scaled = inputs.float() * factor.float().square().mean(dim=1, keepdim=True).sqrt()
            moments.addmm_(scaled.t(), scaled)
        moments.diagonal().add_(_DAMPING * moments.diagonal().mean())
        factor, failed = torch.linalg.cholesky_ex(moments)
        found = torch.eye(hidden, device=moments.device) if failed else torch.cholesky_inverse(factor)
        return found.to(self._dtype)

    def _normal(self, change: Tensor) -> Tensor:
        image, change = torch.zeros_like(change), change.to(self._dtype)
        for _, inputs, slopes, factor in self._parts():
            by_neuron = self._by_neuron(slopes)
            moved = (self._by_neuron(nn.functional.linear(inputs, change)) * by_neuron).sum(dim=1) * factor
            if self._down_products is None:
                back = (moved @ self._down) @ self._down.t() * factor
            else:
                back = moved @ self._down_products * factor
            image += (by_neuron * back[:, None]).view_as(slopes).t() @ inputs
        return image
