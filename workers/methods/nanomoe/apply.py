"""NanoMoE edits on a resident model: linear layers give way to block-mixed ones, and come back as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.evaluators.errors import CandidateError, UserError
from moevolve.kernels.block_mix import block_mix
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.methods import ModelParts, host_tensor
from moevolve.workers.families.layers import find_linears
from moevolve.workers.methods.nanomoe.edit import BlockForm, NanoMoeEdit
from moevolve.workers.methods.nanomoe.mixing import Metric, fit_layer, refine_factors
from moevolve.workers.methods.nanomoe.moments import input_moments


class BlockMixedLinear(nn.Module):
    """A linear layer as `blockdiag(U) M blockdiag(V) x + b`.

    Attributes:
        u: [K, d2 / K, r].
        v: [K, r, d1 / K].
        mixing: M's parameters; None for plain low rank.
        bias: [d2], or None.
    """

    def __init__(self, u: Tensor, v: Tensor, mixing: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        self.u = nn.Parameter(u, requires_grad=False)
        self.v = nn.Parameter(v, requires_grad=False)
        self.mixing = None if mixing is None else nn.Parameter(mixing, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d1] to [..., d2]."""
        return block_mix(x, self.u, self.v, self.mixing, self.bias)


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a layer's fit depends on beside the layer; `rows` is empty where layers are fitted to their weights."""

    form: BlockForm
    rounds: int
    seed: int | None
    rows: str

    @classmethod
    def of(cls, edit: NanoMoeEdit) -> _Origin:
        return cls(edit.form, edit.fit, edit.start_seed, "" if edit.rows is None else edit.rows.fingerprint)


@dataclass(frozen=True, slots=True)
class _Fit:
    """What a layer's factors start from: fitted to its weight once.

    Attributes:
        origin: what it depends on.
        u, v: on the layer's device and in its dtype: candidates that aren't refined have these very tensors.
        mixing: float64 on the device.
    """

    origin: _Origin
    u: Tensor
    v: Tensor
    mixing: Tensor


@dataclass(frozen=True, slots=True)
class _StandIn:
    """The last module made for a layer, and all that it was made from."""

    origin: _Origin
    refine: int
    mixing: NDArray[np.float32]
    module: BlockMixedLinear


class NanoMoeApplicator:
    """Block-mixed linear layers (NanoMoE, Eq. 1) on a resident model.

    A layer's truncated singular value decomposition, or fit, is made when the layer is first edited and kept; factors
    given M follow from it alone, so that a candidate doesn't depend on those before it. Layers whose M is that of the
    candidate before keep their factors, and without refining all candidates share them.
    """

    def __init__(self, parts: ModelParts) -> None:
        """Find the linear layers."""
        self._decoder: nn.Module = parts.model.get_decoder()
        self._linears = find_linears(parts.model)
        self._fits: dict[str, _Fit] = {}
        self._made: dict[str, _StandIn] = {}
        self._moments: dict[str, Tensor] = {}
        """On the host, float32: kept where candidates are refined to outputs."""
        self._shown: set[str] = set()

    @torch.inference_mode(False)  # factors are kept, and an export outside of inference mode shares them
    def apply(self, edit: Edit) -> None:
        """See `Applicator.apply`."""
        assert isinstance(edit, NanoMoeEdit)
        self._check(edit)
        self.revert()
        self._fit_missing(edit)
        for name, mixing in zip(edit.layers, edit.mixing, strict=True):
            self._show(name, self._stand_in(edit, name, mixing))
            self._shown.add(name)

    def revert(self) -> None:
        """See `Applicator.revert`."""
        for name in self._shown:
            self._show(name, self._linears[name])
        self._shown.clear()

    def _show(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self._decoder.get_submodule(parent), child, module)

    def _stand_in(self, edit: NanoMoeEdit, name: str, mixing: NDArray[np.float32]) -> BlockMixedLinear:
        made, origin = self._made.get(name), _Origin.of(edit)
        same = made is not None and (made.origin, made.refine) == (origin, edit.refine)
        if made is not None and same and np.array_equal(made.mixing, mixing):
            return made.module
        linear = self._linears[name]
        with _solving(name):
            u, v, full = self._factors(edit, name, mixing)
        u, v, full = (part.to(linear.weight.dtype).contiguous() for part in (u, v, full))
        if not all(bool(part.isfinite().all()) for part in (u, v, full)):
            raise CandidateError(f"the factors of {name} are not finite")
        module = BlockMixedLinear(u, v, full if full.numel() else None, linear.bias)
        self._made[name] = _StandIn(origin, edit.refine, mixing.copy(), module)
        return module

    def _factors(self, edit: NanoMoeEdit, name: str, mixing: NDArray[np.float32]) -> tuple[Tensor, Tensor, Tensor]:
        """U, V and M's parameters of one layer, on its device."""
        fit, weight = self._fits[name], self._linears[name].weight
        if edit.form.variant == "low_rank":
            return fit.u, fit.v, fit.mixing
        full = fit.mixing + (host_tensor(mixing).double() - host_tensor(edit.form.unmixed)).to(weight.device)
        if not edit.refine:
            return fit.u, fit.v, full
        # The factors make up for what M loses in the layer's dtype.
        full = full.to(weight.dtype).double()
        metric = None if edit.rows is None else Metric.of(self._moments[name].to(weight.device))
        u, v = refine_factors(weight, fit.u.double(), fit.v.double(), full, edit.refine, metric)
        return u, v, full

    def _fit_missing(self, edit: NanoMoeEdit) -> None:
        """Fit an edit's layers that weren't; the model is unedited."""
        origin = _Origin.of(edit)
        keeps = edit.rows is not None and edit.refine > 0
        missing = [
            name
            for name in edit.layers
            if name not in self._fits or self._fits[name].origin != origin or (keeps and name not in self._moments)
        ]
        if edit.rows is None:
            for name in missing:
                self._fits[name] = self._fit(edit, name, None)
            return
        linears = {name: self._linears[name] for name in missing}
        for name, moments in input_moments(self._decoder, linears, edit.rows):
            self._fits[name] = self._fit(edit, name, Metric.of(moments))
            self._moments.pop(name, None)
            if keeps:
                self._moments[name] = moments.cpu()

    def _fit(self, edit: NanoMoeEdit, name: str, metric: Metric | None) -> _Fit:
        form, weight = edit.form, self._linears[name].weight
        rounds = 0 if form.variant == "low_rank" else edit.fit
        start, rng = host_tensor(form.unmixed), self._start_rng(edit, name)
        with _solving(name):
            u, v, mixing = fit_layer(weight, form.rank, form.blocks, start, rounds, metric, rng)
        u, v = (part.to(weight.dtype).contiguous() for part in (u, v))
        return _Fit(_Origin.of(edit), u, v, mixing)

    def _start_rng(self, edit: NanoMoeEdit, name: str) -> np.random.Generator | None:
        """Of a layer's random start: the same whichever other layers an edit has."""
        if edit.start_seed is None:
            return None
        return np.random.default_rng((edit.start_seed, list(self._linears).index(name)))

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


@contextmanager
def _solving(name: str) -> Iterator[None]:
    """Make a system without a solution the candidate's fault."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]  # missing in torch's types only
        raise CandidateError(f"the factors of {name} can't be solved for: {error}") from error
