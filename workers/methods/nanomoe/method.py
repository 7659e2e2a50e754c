"""NanoMoE as a method, and how its mixing matrices are read when a model is observed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.contract.methods import Method, UsageReaders
from moevolve.workers.contract.usage import MixedLayer
from moevolve.workers.methods.nanomoe.apply import BlockMixedLinear, NanoMoeApplicator
from moevolve.workers.methods.nanomoe.edit import NanoMoeEdit
from moevolve.workers.methods.nanomoe.export import NanoMoeExporter, block_mixed_linear_use


def _mixed_layers(decoder: nn.Module, edit: NanoMoeEdit) -> tuple[MixedLayer, ...]:
    modules = dict(decoder.named_modules())
    layers = []
    for name in edit.layers:
        module = modules[name]
        assert isinstance(module, BlockMixedLinear)
        layers.append(MixedLayer(name, edit.form.variant, _block_sizes(edit.form.variant, module.mixing)))
    return tuple(layers)


def _block_sizes(variant: str, mixing: Tensor | None) -> NDArray[np.float64]:
    """One number per block of M; see `MixedLayer`."""
    if mixing is None:
        return np.ones((1, 1))
    parameters: NDArray[np.float64] = mixing.double().cpu().numpy()
    if variant == "I":
        return parameters
    if variant == "II":
        return np.sqrt((parameters**2).mean(axis=-1))
    diagonal, alpha, beta = parameters
    # |diag(c) + alpha beta^T|_F^2 without forming the matrix.
    square = (diagonal**2).sum(-1) + 2 * (diagonal * alpha * beta).sum(-1)
    square += (alpha**2).sum(-1) * (beta**2).sum(-1)
    return np.sqrt(np.maximum(square, 0) / diagonal.shape[-1])


NANOMOE = Method(
    edit=NanoMoeEdit,
    applicator=NanoMoeApplicator,
    exporter=NanoMoeExporter(),
    usage=UsageReaders(mixed=_mixed_layers),
    module_uses={"BlockMixedLinear": block_mixed_linear_use},
)
