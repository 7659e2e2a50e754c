"""Where an edit meets the model: the contract of applicators, and what they work on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moevolve.workers.families.layers import DenseLayer, MoELayer
from moevolve.workers.methods.base import Edit

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
    """

    model: PreTrainedModel = field(repr=False)
    moe_layers: tuple[MoELayer, ...] = field(repr=False)
    dense_layers: tuple[DenseLayer, ...] = field(repr=False)
    device: torch.device
    on_host: bool


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
