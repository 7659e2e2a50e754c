"""NanoMoE as a method: how its mixing matrices are read when a model is observed, and how its edits are exported.

Exports are always in native form: no stock family has block-mixed linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.checkpoints.native import native_config, write_native
from moevolve.workers.checkpoints.state import empty_model, experts_prefix, layer_state, loaded_parameters, ordinal_of
from moevolve.workers.contract.card import CheckpointForm, ExportSummary
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import Blueprint, Method, ModuleUse, Resident, UsageReaders
from moevolve.workers.contract.usage import MixedLayer
from moevolve.workers.families.registry import family_of
from moevolve.workers.methods.nanomoe.apply import BlockMixedLinear, NanoMoeApplicator
from moevolve.workers.methods.nanomoe.edit import NanoMoeEdit


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


class NanoMoeExporter:
    """See `Exporter`."""

    def obstacle(self, resident: Resident, edit: Edit, asked: CheckpointForm | None = None) -> str | None:
        return "no family has block-mixed linear layers"

    def summary(self, resident: Resident, edit: Edit, form: CheckpointForm) -> ExportSummary:
        assert isinstance(edit, NanoMoeEdit)
        title = family_of(resident.model.config, resident.config.path).title
        before = loaded_parameters(resident)
        for module in resident.model.modules():
            if isinstance(module, BlockMixedLinear):
                outputs, inputs = module.u.shape[:2].numel(), len(module.v) * module.v.shape[2]
                before += outputs * inputs - edit.form.parameters(outputs, inputs)
        what = "low-rank" if edit.form.variant == "low_rank" else "block-mixed"
        return ExportSummary(
            experts=edit.form.blocks,
            active=edit.form.blocks,
            parameters_before=before,
            lead=f"{title} with {len(edit.layers)} of its linear layers made {what} ones of rank {edit.form.rank}",
            method="NanoMoE (a mixture of experts within single layers)",
            tag="low-rank",
            form_note="The modelling code beside this card holds the layers' form; it needs\n`transformers` only.",
            rows=(
                ("variant", edit.form.variant),
                ("blocks K", str(edit.form.blocks)),
                ("rank r", str(edit.form.rank)),
                ("fitted to", "the layers' weights" if edit.rows is None else "their outputs on calibration prompts"),
                ("layers", ", ".join(dict.fromkeys(name.split(".", 2)[-1] for name in edit.layers))),
            ),
        )

    def build(self, resident: Resident, edit: Edit, form: CheckpointForm, directory: Path) -> Blueprint:
        assert isinstance(edit, NanoMoeEdit)
        source = resident.model
        model_class = write_native(
            source,
            directory,
            "methods/nanomoe/native.py.jinja",
            family_of(source.config, resident.config.path).title,
            variant=edit.form.variant,
            blocks=edit.form.blocks,
            rank=edit.form.rank,
        )
        config = native_config(source, model_class)
        config.nanomoe_layers = list(edit.layers)
        config.nanomoe_variant = edit.form.variant
        config.nanomoe_blocks, config.nanomoe_rank = edit.form.blocks, edit.form.rank

        def layer(index: int) -> Iterator[tuple[str, Tensor]]:
            yield from layer_state(resident, index).items()
            ordinal = ordinal_of(resident, index)
            if ordinal is not None:
                for name, tensor in resident.original_experts(ordinal).items():
                    yield experts_prefix(source) + name, tensor

        return Blueprint(empty_model(model_class, config, source.dtype), layer)


def block_mixed_linear_use(module: Any, config: Any) -> ModuleUse:
    """Use of `BlockMixedLinear` in `native.py.jinja`: both factors and M."""
    mixing = 0 if module.mixing is None else module.mixing.numel()
    if module.mixing is not None and module.mixing.dim() == 2:
        mixing *= module.u.shape[2]  # each scalar multiplies a latent vector of a block
    return ModuleUse(0, module.u.numel() + module.v.numel() + mixing)


NANOMOE = Method(
    edit=NanoMoeEdit,
    applicator=NanoMoeApplicator,
    exporter=NanoMoeExporter(),
    usage=UsageReaders(mixed=_mixed_layers),
    module_uses={"BlockMixedLinear": block_mixed_linear_use},
)
