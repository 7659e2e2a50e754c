"""From an edit's arrays to torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def host_tensor(array: NDArray[Any]) -> Tensor:
    """A host tensor over `array`, copied only where torch can't take it: arrays that Ray delivers are read-only."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))
