"""Fits of one factor per layer, in closed form: of the present weights, or of weights that ridge regression fitted.

A layer's output is `phi W` for features `phi` [tokens, width] and weights `W` [width, hidden]. A factor on all weights
is a factor on this output. Factors per expert have no such form: what one expert should give by itself isn't known.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from moevolve.workers.methods.repair.ridge import Fit, FitOutcome, LayerSystem, squared_norm


def fit_scalar(layer: LayerSystem, memory: int) -> Fit | None:
    """Fit one factor on a layer's weights: `c = <y, y*> / |y|^2` for its output `y` and the wanted output `y*`.

    Args:
        layer: The layer.
        memory: Bytes that a block of features may take.

    Returns:
        The fit; None if the factor isn't finite or doesn't reduce the error on held-out tokens.
    """
    given = torch.zeros_like(layer.residual)
    for block in layer.features.blocks(memory):
        given[block.tokens] += block.values @ layer.present(block.columns)
    output, residual, checked = layer.weighted(given), layer.weighted(layer.residual), layer.checked
    along = float((output[~checked].double() * residual[~checked].double()).sum())
    energy = squared_norm(output[~checked])
    if not 0 < energy < math.inf or not math.isfinite(along):
        return None
    change = along / energy
    before = squared_norm(residual[checked])
    after = squared_norm(residual[checked] - change * output[checked])
    return Fit(FitOutcome(None, before, after), factor=1 + change) if after < before else None


def match_energy(fit: Fit, layer: LayerSystem, memory: int) -> Fit:
    """Scale fitted weights so that the layer's output has the energy that it should have, `E|y|^2 = E|y*|^2`.

    Least squares shrink what they can't predict. The energies are those of held-out tokens, since a fit on few tokens
    has the right energy on these and too little on others.

    Args:
        fit: Ridge regression of the layer.
        layer: The layer.
        memory: Bytes that a block of features may take.

    Returns:
        The fit with a factor. Its error on held-out tokens may be larger than without the fit.
    """
    before, after = torch.zeros_like(layer.residual), torch.zeros_like(layer.residual)
    for block in fit.blocks or layer.features.blocks(memory):
        present = layer.present(block.columns)
        before[block.tokens] += block.values @ present
        after[block.tokens] += block.values @ (present + fit.change(block, layer.present))
    wanted = layer.weighted(layer.residual + before)[layer.checked]
    given = layer.weighted(after)[layer.checked]
    energy = squared_norm(given)
    factor = math.sqrt(squared_norm(wanted) / energy) if energy > 0 else 1.0
    left = squared_norm(wanted - factor * given)
    return replace(fit, factor=factor, outcome=replace(fit.outcome, after=left))
