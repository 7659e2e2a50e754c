"""NanoMoE as a method: linear layers of a resident model are replaced by block-mixed ones, observed and exported.

Exports are always in native form: no stock family has block-mixed linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.kernels.block_mix import block_mix
from moevolve.workers.checkpoints.native import native_config, write_native
from moevolve.workers.checkpoints.state import empty_model, experts_prefix, layer_state, ordinal_of, unedited_parameters
from moevolve.workers.contract.capacity import release_freed_memory
from moevolve.workers.contract.card import CheckpointForm, ExportSummary
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.methods import (
    Applicator,
    Blueprint,
    Method,
    ModelParts,
    Resident,
    host_tensor,
)
from moevolve.workers.families.decoder import decoder_of
from moevolve.workers.families.layers import find_linears
from moevolve.workers.families.registry import family_of
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.methods.nanomoe.mixing import Metric, fit_layer
from moevolve.workers.methods.shared.input_statistics import InputMoments, memory_batches


class BlockMixedLinear(nn.Module):
    """The linear layer `blockdiag(U) M blockdiag(V) x + b`.

    Attributes:
        u: Blocks U_i, [K, d2 / K, r].
        v: Blocks V_j, [K, r, d1 / K].
        mixing: M's parameters; None for plain low rank.
        bias: Bias [d2], or None.
    """

    def __init__(self, u: Tensor, v: Tensor, mixing: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.u = nn.Parameter(u, requires_grad=False)
        self.v = nn.Parameter(v, requires_grad=False)
        self.mixing = None if mixing is None else nn.Parameter(mixing, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs [..., d1] to outputs [..., d2]."""
        return block_mix(x, self.u, self.v, self.mixing, self.bias)


@dataclass(frozen=True, slots=True)
class _Fit:
    """A layer's fitted factors.

    Attributes:
        u, v: Factors on the layer's device and in its dtype; all candidates use these very tensors.
        mixing: M's fitted parameters, float64 on the device.
    """

    u: Tensor
    v: Tensor
    mixing: Tensor


class NanoMoeApplicator(Applicator):
    """Block-mixed linear layers (NanoMoE, Eq. 1) on a resident model.

    A layer's truncated singular value decomposition, or fit, is computed when the layer is first edited, and kept. All
    candidates share its factors, and bring their own M.
    """

    def __init__(self, parts: ModelParts) -> None:
        self._decoder: nn.Module = decoder_of(parts.model)
        self._linears = find_linears(parts.model)
        # Weights that aren't needed now may be on the host.
        self._device = parts.device if parts.on_host else None
        self._fits: dict[str, _Fit] = {}
        self._fitted_for: tuple[BlockForm, int, str] | None = None
        self._replaced: set[str] = set()

    @torch.inference_mode(False)  # factors are kept, and an export outside inference mode shares them
    def apply(self, edit: Edit) -> None:
        assert isinstance(edit, NanoMoeEdit)
        self._check(edit)
        self.revert()
        self._fit_missing(edit)
        for name, mixing in zip(edit.layers, edit.mixing, strict=True):
            self._install(name, self._module(edit, name, mixing))
            self._replaced.add(name)

    def revert(self) -> None:
        for name in self._replaced:
            self._install(name, self._linears[name])
        self._replaced.clear()

    def _install(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self._decoder.get_submodule(parent), child, module)

    def _module(self, edit: NanoMoeEdit, name: str, mixing: NDArray[np.float32]) -> BlockMixedLinear:
        fit, linear = self._fits[name], self._linears[name]
        if edit.form.variant == "low_rank":
            return BlockMixedLinear(fit.u, fit.v, None, linear.bias)
        change = host_tensor(mixing).double() - host_tensor(edit.form.unmixed)
        full = (fit.mixing + change.to(fit.mixing.device)).to(linear.weight.dtype)
        if not full.isfinite().all():
            raise CandidateError(f"the factors of {name} are not finite")
        return BlockMixedLinear(fit.u, fit.v, full, linear.bias)

    def _fit_missing(self, edit: NanoMoeEdit) -> None:
        """Fit those of an edit's layers that aren't yet. Call it while the model is unedited."""
        key = (edit.form, edit.fit, "" if edit.rows is None else edit.rows.fingerprint)
        if key != self._fitted_for:
            self._fits, self._fitted_for = {}, key
        missing = {name: self._linears[name] for name in edit.layers if name not in self._fits}
        if edit.rows is None:
            for name in missing:
                self._fits[name] = self._fit(edit, name, None)
            return
        for name, moments in input_moments(self._decoder, missing, edit.rows):
            self._fits[name] = self._fit(edit, name, Metric.of(moments))
        if missing:
            release_freed_memory()

    def _fit(self, edit: NanoMoeEdit, name: str, metric: Metric | None) -> _Fit:
        form, weight = edit.form, self._linears[name].weight
        weight = weight if self._device is None else weight.to(self._device)
        rounds = 0 if form.variant == "low_rank" else edit.fit
        try:
            u, v, mixing = fit_layer(weight, form.rank, form.blocks, host_tensor(form.unmixed), rounds, metric)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # missing in torch's types only
            raise CandidateError(f"the factors of {name} can't be solved for: {error}") from error
        u, v = (part.to(weight.dtype).contiguous() for part in (u, v))
        if not (u.isfinite().all() and v.isfinite().all()):
            raise CandidateError(f"the factors of {name} are not finite")
        return _Fit(u, v, mixing)

    def _check(self, edit: NanoMoeEdit) -> None:
        for name in edit.layers:
            linear = self._linears.get(name)
            if linear is None:
                raise UserError(
                    f"the edit is for a linear layer {name}, which the model doesn't have; use the model it was "
                    "searched on"
                )
            sizes = linear.weight.shape
            if edit.form.rank > min(sizes) or any(size % edit.form.blocks for size in sizes):
                raise UserError(
                    f"{edit.form.blocks} blocks of rank {edit.form.rank} don't fit linear layer {name} "
                    f"[{sizes[0]}, {sizes[1]}]; use the model the edit was searched on"
                )
        if not edit.finite:
            raise CandidateError("a mixing parameter is not finite")


def input_moments(decoder: nn.Module, linears: Mapping[str, nn.Linear], rows: FitRows) -> Iterator[tuple[str, Tensor]]:
    """Second moments of layers' inputs over all tokens: pairs of name and float32 [d1, d1] on the layer's device.

    Call it while the model is unedited. Sequences run one by one.
    """
    for batch in memory_batches(linears, lambda name: 8 * linears[name].in_features ** 2):
        moments = _measure_moments(decoder, {name: linears[name] for name in batch}, rows)
        for name in batch:
            yield name, moments.pop(name).moment.float()


@torch.inference_mode()
def _measure_moments(decoder: nn.Module, linears: Mapping[str, nn.Linear], rows: FitRows) -> dict[str, InputMoments]:
    device = next(decoder.parameters()).device
    moments: dict[str, InputMoments] = {}

    def observe(name: str, inputs: Tensor) -> None:
        if name not in moments:
            moments[name] = InputMoments(inputs.shape[-1], inputs.device)
        moments[name].add(inputs.flatten(0, -2))

    with ExitStack() as stack:
        for name, linear in linears.items():
            hook = linear.register_forward_pre_hook(lambda _, args, name=name: observe(name, args[0]))
            stack.callback(hook.remove)
        for tokens in rows.sequences:
            decoder(input_ids=torch.tensor([tokens], device=device), use_cache=False)
    return moments


class NanoMoeExporter:
    """Exports block-mixed models."""

    def obstacle(self, resident: Resident, edit: Edit) -> str | None:
        return "no family has block-mixed linear layers"

    def summary(self, resident: Resident, edit: Edit, form: CheckpointForm) -> ExportSummary:
        assert isinstance(edit, NanoMoeEdit)
        title = family_of(resident.model.config, resident.config.path).title
        what = "low-rank" if edit.form.variant == "low_rank" else "block-mixed"
        return ExportSummary(
            experts=edit.form.blocks,
            active=edit.form.blocks,
            parameters_before=unedited_parameters(resident),
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


NANOMOE = Method(
    edit=NanoMoeEdit,
    applicator=NanoMoeApplicator,
    exporter=NanoMoeExporter(),
)
