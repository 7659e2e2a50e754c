"""What a method works on and what it must offer: everything that workers need to know of one kind of edit.

A method stands in its own folder, and in one line of `moevolve.workers.methods.registry`. It knows nothing of those
who call it: a resident model is to it what `Resident` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.contract.card import CheckpointForm, ExportSummary
from moevolve.workers.contract.edits import Calibration, Edit, Tokens
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.contract.usage import MixedLayer, RoutedLayer
from moevolve.workers.families.layers import DenseLayer, MoELayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def host_tensor(array: NDArray[Any]) -> Tensor:
    """A host tensor over `array`, copied only where torch can't take it: arrays that Ray delivers are read-only."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


@dataclass(frozen=True)
class ModelParts:
    """A resident model's parts, as loaded.

    Attributes:
        model: the whole.
        moe_layers: its MoE layers, in order of depth.
        dense_layers: its dense feed-forward networks, in order of depth.
        device: where the model runs, when it isn't spread over several devices.
        on_host: whether the original experts stay in host memory.
        beside: bytes on the device that passes need beside weights and experts; None if that isn't known.
        applicator: the applicator of another kind of edits, for one that stands on it.
    """

    model: PreTrainedModel = field(repr=False)
    moe_layers: tuple[MoELayer, ...] = field(repr=False)
    dense_layers: tuple[DenseLayer, ...] = field(repr=False)
    device: torch.device
    on_host: bool
    beside: int | None
    applicator: Callable[[type], Applicator] = field(repr=False)


class Resident(Protocol):
    """What calibrators and exporters see of a resident model (`moevolve.workers.model.resident.ResidentModel`)."""

    @property
    def model(self) -> PreTrainedModel:
        """The `transformers` model, in eval mode, as it is edited now."""
        ...

    @property
    def config(self) -> ModelConfig:
        """How it was loaded."""
        ...

    @property
    def layers(self) -> tuple[MoELayer, ...]:
        """Handles of its MoE layers as loaded; empty for a dense model."""
        ...

    @property
    def dense_layers(self) -> tuple[DenseLayer, ...]:
        """Handles of its dense feed-forward networks as loaded; empty for a model of experts."""
        ...

    def original_experts(self, ordinal: int) -> Mapping[str, Tensor]:
        """The experts of a MoE layer as they were loaded, by name, wherever they are kept; not to be changed."""
        ...

    def rows(self, sequences: Sequence[Tokens]) -> list[tuple[Tokens, ...]]:
        """Divide sequences, in their order, into rows that `run` takes: several short ones share a row."""
        ...

    def run(self, row: Sequence[Tokens]) -> None:
        """Run the sequences of one row up to the output layer, for what hooks see of them; call it in inference mode.

        Hooks see [1, tokens, ...] of all sequences, one after the other. No sequence attends to another.
        """
        ...


class Applicator(Protocol):
    """Makes one kind of edit on a resident model. Constructed once from its `ModelParts`, while it is unedited."""

    def apply(self, edit: Edit) -> None:
        """Make `edit` in place, over whatever edit of this kind was made before.

        Raises:
            CandidateError: the edit's values are at fault.
            UserError: the edit doesn't fit this model.
        """
        ...

    def revert(self) -> None:
        """Bring back the unedited model, bit for bit."""
        ...


@runtime_checkable
class ReportingApplicator(Applicator, Protocol):
    """An applicator that has something to tell of how an edit came out on this model."""

    def report(self) -> tuple[tuple[str, str], ...]:
        """Of the edit that is on the model: titles and values, for a table."""
        ...

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What of it is too long for a table, by name: kept beside a checkpoint, in `neurons.npz`."""
        ...


@runtime_checkable
class ExpertsOwner(Applicator, Protocol):
    """An applicator that takes over the experts of MoE layers, and may keep them elsewhere."""

    def original_experts(self, ordinal: int) -> Mapping[str, Tensor]:
        """The experts of a MoE layer as they were loaded, fused, by name, wherever they are kept; not to be changed.

        Args:
            ordinal: number of the layer among the MoE layers.
        """
        ...


Calibrator = Callable[[Resident, Sequence[Tokens], Any], Calibration]
"""Measures an unedited resident model on token sequences, as a recipe says."""


@dataclass(frozen=True)
class Blueprint:
    """An exported model that isn't in memory.

    Attributes:
        model: on the meta device, with the config that is to be written, its tensors shared that are.
        layer: the tensors of one of its decoder layers, by their names within it, each made when it is asked for: none
            is kept while the next one is made. Experts are fused, as the model has them. Outside the decoder layers it
            has the resident model's tensors.
    """

    model: PreTrainedModel = field(repr=False)
    layer: Callable[[int], Iterator[tuple[str, Tensor]]] = field(repr=False)


class Exporter(Protocol):
    """Makes checkpoints of one kind of edit."""

    def obstacle(self, resident: Resident, edit: Edit) -> str | None:
        """Why no class of `transformers` computes the same as the edited model; None where a stock checkpoint is exact.

        Args:
            resident: with `edit` applied, and maybe what follows it up.
            edit: of this kind.

        Raises:
            UserError: the edit has no checkpoint of any form.
        """
        ...

    def summary(self, resident: Resident, edit: Edit, form: CheckpointForm) -> ExportSummary:
        """What is to be said of the resident model with `edit` applied."""
        ...

    def build(self, resident: Resident, edit: Edit, form: CheckpointForm, directory: Path) -> Blueprint:
        """The model to write.

        Args:
            resident: with `edit` applied, and maybe what follows it up (`FollowUpEdit`),
                so weights are taken as they are now; tensors are shared with it where they can be.
            edit: of this kind.
            form: see `CheckpointForm`.
            directory: where the checkpoint goes; the native form's modelling code is written into it here.
        """
        ...


RoutingReader = Callable[[Any, tuple[Any, ...], Any], tuple[Tensor, Tensor]]
"""Reads a router's choices off a forward pass: from a module, its inputs and its output to which experts the tokens
chose, 0 or 1 [tokens, E], and by what outputs are scaled, [tokens, E]."""


def _as_counted(layer: RoutedLayer, position: int, edit: Any) -> RoutedLayer:
    return layer


def _none_mixed(decoder: nn.Module, edit: Any) -> tuple[MixedLayer, ...]:
    return ()


@dataclass(frozen=True)
class UsageReaders:
    """How a method's part is read when a model's experts are watched at work.

    Attributes:
        routing: by the type of module that routes in a layer, how its choices are read. Modules are watched whatever
            edit the model has.
        described: a layer of experts with what an edit of this method says of them. Takes the counted layer, its
            number among the watched layers, and the edit.
        mixed: the block-mixed linear layers of a decoder that has an edit of this method.
    """

    routing: Mapping[type[nn.Module], RoutingReader] = field(default_factory=dict)
    described: Callable[[RoutedLayer, int, Any], RoutedLayer] = _as_counted
    mixed: Callable[[nn.Module, Any], tuple[MixedLayer, ...]] = _none_mixed


@dataclass(frozen=True, slots=True)
class ModuleUse:
    """What a token does with a module's own part; see `moevolve.workers.profiling.costs`.

    Attributes:
        idle: parameters that it passes by.
        products: entries of matrices that it multiplies with.
        inner: which modules within are still to be looked at.
    """

    idle: int
    products: int
    inner: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Method:
    """One kind of edit, and all that workers can do with it.

    Attributes:
        edit: the type of its edits; a method is found by it.
        applicator: makes what applies them to a model.
        owns_experts: whether that is an `ExpertsOwner`. It is made when a model of experts is loaded, before any edit
            and before the model is placed; unedited models of experts are exported as this method's. One method is.
        exporter: makes checkpoints of them; None refuses to. Edits that follow up others have the others'.
        calibrators: by the type of recipe, what measures a model for genomes of this kind.
        usage: how its part is read when a model is watched.
        module_uses: by class name, what a token does with a module of its native checkpoints (`native.py.jinja`) that
            has matrices of its own, from the module and the model's config.
    """

    edit: type
    applicator: Callable[[ModelParts], Applicator]
    owns_experts: bool = False
    exporter: Exporter | None = None
    calibrators: Mapping[type, Calibrator] = field(default_factory=dict)
    usage: UsageReaders = field(default_factory=UsageReaders)
    module_uses: Mapping[str, Callable[[Any, Any], ModuleUse]] = field(default_factory=dict)
