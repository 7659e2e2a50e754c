"""The GPU of this machine in the place of a metered device, by the counts of torch's allocator."""

from __future__ import annotations

import torch

from real_size.meter import Reading, private_bytes


class CudaDevice:
    """One GPU.

    Attributes:
        capacity: Its bytes.
    """

    def __init__(self) -> None:
        self.capacity = torch.cuda.get_device_properties(0).total_memory
        self._host = private_bytes()

    @property
    def peak(self) -> int:
        """Most bytes in tensors since the last `reset`."""
        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._host = private_bytes()

    def read(self) -> Reading:
        """Peak of the device since the last `reset`, and how much more of the host is held than then."""
        torch.cuda.synchronize()
        return Reading(self.peak, max(0, private_bytes() - self._host))
