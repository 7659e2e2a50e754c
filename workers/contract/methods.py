"""The interface between workers and methods: what a method gets, and what it provides for its kind of edit.

A method is a folder of `workers/methods` and one line in `moevolve.workers.methods.registry`. It knows a resident model
only as `Resident`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moevolve.workers.contract.card import CheckpointForm, ExportSummary
from moevolve.workers.contract.edits import Calibration, Edit, Tokens
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.contract.usage import RoutedLayer
from moevolve.workers.families.layers import DenseLayer, MoELayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def host_tensor(array: NDArray[np.generic]) -> Tensor:
    """Wrap an array in a host tensor, copying it only if it is read-only or not contiguous."""
    # Arrays that Ray delivers are read-only.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


class ExpertFiles(Protocol):
    """Original experts that stay in a checkpoint's files (`moevolve.workers.checkpoints.stored_experts`)."""

    def layer(self, index: int, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the fused tensors of a decoder layer's experts by name; each is read on access.

        Args:
            index: Index of the decoder layer.
            parameters: Tensors on the meta device with the same names and shapes.
        """

    def forget(self) -> None:
        """Free the layer that is in host memory, if there is one."""


@dataclass(frozen=True)
class ModelParts:
    """A resident model and its parts, unedited.

    Attributes:
        moe_layers: MoE layers, in order of depth; empty for a dense model.
        dense_layers: Dense feed-forward networks, in order of depth; empty for a mixture of experts.
        device: Device of the model, unless it is spread over several.
        on_host: True if the original experts stay in host memory or in files.
        stored: The original experts, if they stay in files.
        pass_bytes: Device memory that forward passes need besides weights and experts, in bytes; None if unknown.
        fits: Folder of fitted layers that other processes of this machine find as well; None for none.
        applicator: Returns the applicator of another edit type, for edits that build on it.
    """

    model: PreTrainedModel = field(repr=False)
    moe_layers: tuple[MoELayer, ...] = field(repr=False)
    dense_layers: tuple[DenseLayer, ...] = field(repr=False)
    device: torch.device
    on_host: bool
    stored: ExpertFiles | None = field(repr=False)
    pass_bytes: int | None
    fits: Path | None
    applicator: Callable[[type], Applicator] = field(repr=False)


class Resident(Protocol):
    """What calibrators and exporters see of a resident model (`moevolve.workers.model.resident.ResidentModel`).

    Attributes:
        model: The `transformers` model in eval mode, with the current edit.
        config: Settings that the model was loaded with.
        layers: Handles of the original MoE layers; empty for a dense model.
        dense_layers: Handles of the original dense feed-forward networks; empty for a mixture of experts.
    """

    model: PreTrainedModel
    config: ModelConfig
    layers: tuple[MoELayer, ...]
    dense_layers: tuple[DenseLayer, ...]

    def original_experts(self, ordinal: int) -> Mapping[str, Tensor]:
        """Original fused experts of a MoE layer, as of an `ExpertsOwner`."""

    def rows(self, sequences: Sequence[Tokens]) -> list[tuple[Tokens, ...]]:
        """Divide sequences, in order, into rows for `run`, packing short sequences into one row."""

    def run(self, rows: Sequence[Sequence[Tokens]]) -> None:
        """Run the sequences of rows through the decoder, without the output head, so that hooks can observe it.

        Hooks of modules within a decoder layer see a row's concatenated sequences as [1, tokens, ...], row after row.
        No sequence attends to another. If original experts aren't on the device, all rows run through a layer before
        the next one. Must be called in inference mode.
        """


class Applicator(ABC):
    """Applies one kind of edit to a resident model. It is constructed once, from the parts of the unedited model."""

    @abstractmethod
    def __init__(self, parts: ModelParts) -> None: ...

    @abstractmethod
    def apply(self, edit: Edit) -> None:
        """Apply `edit` in place, replacing any earlier edit of this kind.

        Raises:
            CandidateError: The edit has invalid values.
            UserError: The edit doesn't fit this model.
        """

    def by_layer(self, edit: Edit, layers: Sequence[int]) -> Iterator[int]:
        """Apply `edit` to one decoder layer at a time; yields each of `layers`, all of them, once it may run.

        A layer is given up when the next one is asked for. The caller reverts. Several edits of mixtures of experts may
        take turns: each has a layer to itself from when it asks for it until another edit asks. For errors see `apply`.
        """
        self.apply(edit)
        yield from layers

    @abstractmethod
    def revert(self) -> None:
        """Restore the unedited model, bit for bit."""

    def report(self) -> tuple[tuple[str, str], ...]:
        """Return the details of the applied edit as rows of a table, (title, value)."""
        return ()


class ExpertsOwner(Applicator):
    """An applicator that takes over the experts of the MoE layers and may keep the originals elsewhere.

    One method has one. It is created when a mixture of experts is loaded, before any edit, and its method exports
    unedited mixtures of experts. If the originals are kept elsewhere, it moves the rest of the model to the device.
    """

    @abstractmethod
    def original_experts(self, ordinal: int) -> Mapping[str, Tensor]:
        """Original fused experts by tensor name, on the device or host, of the MoE layer with this number, from 0.

        They must not be modified.
        """

    @abstractmethod
    def one_layer(self) -> AbstractContextManager[None]:
        """Context manager in which weights that can be loaded again leave the device when another layer runs."""


# Measures an unedited resident model on token sequences, as a measurement says.
Calibrator = Callable[[Resident, Sequence[Tokens], Any], Calibration]


@dataclass(frozen=True)
class Blueprint:
    """A model to be exported, without its tensors in memory.

    Attributes:
        model: Model on the meta device with the config to be written; tied tensors are tied.
        layer: Yields the tensors of the decoder layer with a given index as (name within the layer, tensor), with
            experts fused. Each tensor is created on demand and none is kept. Tensors outside the decoder layers are
            the resident model's.
    """

    model: PreTrainedModel = field(repr=False)
    layer: Callable[[int], Iterator[tuple[str, Tensor]]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ExpertSelection:
    """The experts that a pruned model keeps, by MoE layer in order of depth.

    Attributes:
        routers: The original expert whose router row each kept expert gets.
        experts: The original expert whose weights each kept expert gets.
        active: Active experts per token k.
    """

    routers: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]
    active: int

    @property
    def retained(self) -> int:
        """Experts n' per MoE layer."""
        return len(self.experts[0])


class Exporter(Protocol):
    """Exports checkpoints for one kind of edit.

    The resident model has the edit, or a `FollowUpEdit` of it, applied. For forms see `CheckpointForm`.
    """

    def obstacle(self, resident: Resident, edit: Edit) -> str | None:
        """Reason why no model class of `transformers` computes the edited model; None if a stock checkpoint is exact.

        Raises:
            UserError: The edit can't be exported in any form.
        """

    def summary(self, resident: Resident, edit: Edit, form: CheckpointForm) -> ExportSummary:
        """Describe the resident model with `edit` applied."""

    def build(self, resident: Resident, edit: Edit, form: CheckpointForm, directory: Path) -> Blueprint:
        """Build the model to write, from the resident model's current weights, sharing tensors where possible.

        `directory` is the checkpoint's folder, into which the native form's modelling code is written.
        """


@runtime_checkable
class PruningExporter(Exporter, Protocol):
    """An exporter of edits that drop experts, for which no weights are needed where they do no more than that."""

    def merges(self, edit: Edit) -> str | None:
        """Return what an edit changes besides dropping experts, so that its export needs weights; None if nothing."""

    def selection(self, edit: Edit, facts: ModelFacts) -> ExpertSelection:
        """Return the experts that an edit keeps; of merged ones and of mixed router rows the one that counts most.

        Raises:
            UserError: No smaller model of the family computes the same, or the edit doesn't fit the model.
        """

    def selection_summary(self, edit: Edit, facts: ModelFacts, form_note: str) -> ExportSummary:
        """Describe an edit that `selection` accepts; for `form_note` see `ExportSummary`."""


# Reads a routing decision from a module, its inputs and its output. Returns the chosen experts, 0 or 1 [tokens, E], and
# the factors on their outputs, [tokens, E].
RoutingReader = Callable[[Any, tuple[Tensor, ...], Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Method:
    """One kind of edit and everything that workers can do with it.

    Attributes:
        edit: Type of the edits, by which the method is found.
        exporter: Exporter of the edits; None if they can't be exported. A `FollowUpEdit` uses its base's exporter.
        calibrators: Calibrator by type of measurement.
        routing: Reader of the routing decision by type of the routing module. It applies whatever edit the model has.
        described: Adds what the edit says about the experts to a counted layer. Its arguments are the counted layer,
            the layer's number among the counted layers, and the edit.
        idle: Function from (module, model config) to the number of the module's parameters that a token doesn't use,
            by class name of modules in native checkpoints (`native.py.jinja`) that have such parameters.
    """

    edit: type
    applicator: type[Applicator]
    exporter: Exporter | None = None
    calibrators: Mapping[type, Calibrator] = field(default_factory=dict)
    routing: Mapping[type[nn.Module], RoutingReader] = field(default_factory=dict)
    described: Callable[[RoutedLayer, int, Any], RoutedLayer] = lambda layer, _position, _edit: layer
    idle: Mapping[str, Callable[[Any, PretrainedConfig], int]] = field(default_factory=dict)
