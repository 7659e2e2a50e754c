"""A device that counts: tensors that say `cuda`, compute on the CPU, and run out of memory at a given capacity.

Code under test sees `tensor.device.type == "cuda"` and runs as on a GPU: what it makes with `device="cuda"` or moves
there is a `MeteredTensor`, a wrapper around a CPU tensor; tensors of both sides don't mix, as they don't on a GPU. A
storage counts once, however many views of it there are, from its allocation to the end of its last view.

Large blocks that are allocated as such (weights, buffers, moved tensors) lie in shared mappings. The kernel books those
apart from a process's private memory, so `RLIMIT_DATA` and `RssAnon` speak of the host's side.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from real_size.products import exchanged

CUDA = torch.device("cuda", 0)
_ALIGNED = 512
"""What torch's allocator rounds blocks on a GPU up to."""
_MAPPED = 1 << 20
"""Blocks of so many bytes and more that are allocated without being computed are mapped."""
_PLACING = ("aten::to", "aten::_to_copy", "aten::cpu", "aten::cuda")
_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::zeros", "aten::new_zeros", "aten::zeros_like")
"""Operators that only take memory; fresh mappings are of zeros."""
_ACROSS = ("aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::set_")
"""Operators that take tensors of both sides: copies, and indices from the host."""


class Block:
    """One storage on the device, alive as long as a tensor over it is."""

    __slots__ = ("__weakref__", "_device", "bytes", "mapped", "storage")

    def __init__(self, device: MeteredDevice, storage: torch.UntypedStorage, mapped: bool) -> None:
        self._device, self.storage, self.mapped = device, storage, mapped
        self.bytes = -(-storage.nbytes() // _ALIGNED) * _ALIGNED

    def __del__(self) -> None:
        del self.storage  # first, or it is the host's for a moment
        self._device._freed(self)


class MeteredTensor(Tensor):
    """A tensor that says it is on a GPU; `inner` is where its numbers are.

    To torch's own C++ code it is on the CPU, for builds without CUDA can't guard a device that they don't know: what
    asks that code where a tensor is has a method here.
    """

    inner: Tensor
    block: Block
    device_of: MeteredDevice

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block, device: MeteredDevice) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
        )
        made.inner, made.block, made.device_of = inner, block, device
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Metered({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = next(leaf.device_of for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, cls))
        return device.run(func, args, kwargs or {})

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: MeteredTensor) -> None:
        # Torch would exchange the wrapper's own storage, which nobody reads.
        self.inner, self.block = other.inner, other.block

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        copies = kwargs.pop("copy", False)
        device, dtype, _, layout = torch._C._nn._parse_to(*_where(args), **kwargs)
        dtype = self.dtype if dtype is None else dtype
        if device is not None and device.type != "cuda":
            return (
                torch.empty_like(self.inner, dtype=dtype).copy_(self.inner)
                if device.type == "cpu"
                else self._elsewhere(device)
            )
        if dtype == self.dtype and not copies:
            return self
        return torch.ops.aten._to_copy(self, dtype=dtype, device=CUDA, memory_format=layout)  # type: ignore[no-any-return]

    def _elsewhere(self, device: torch.device) -> Tensor:
        return self.inner.to(device)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return self.to("cpu")

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return self.inner.numpy(force=True)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def is_shared(self) -> bool:
        return False

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """With its counterpart, what `nn.Module.to` asks for to move parameters in place, so that tied ones stay so."""
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Tensor:
        raise NotImplementedError("metered tensors aren't traced")


class OutOfMemory(torch.OutOfMemoryError):
    """What a GPU raises."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What has been held at most, in bytes.

    Attributes:
        device: on the device.
        host: private memory of the process beyond what it held when the device was made, device blocks left out.
    """

    device: int
    host: int


class _Mode(TorchDispatchMode):
    def __init__(self, device: MeteredDevice) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing is compiled, and skipping Dynamo costs every operation something."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.run(func, args, kwargs or {})


class MeteredDevice:
    """One GPU of a given capacity. Use it within `installed`.

    Attributes:
        capacity: bytes; an allocation beyond it raises `torch.OutOfMemoryError`.
        live: bytes that are allocated now.
        peak: the most since the last `reset`.
    """

    def __init__(self, capacity: int = 1 << 62) -> None:
        self.capacity = capacity
        self.live = self.peak = 0
        self._private = 0  # of live, what lies in the process's private memory
        self._computing = False  # results that aren't booked yet are none of the host's
        self._blocks: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        _give_back()
        self._host_base, self._host_peak = private_bytes(), 0

    def reset(self) -> None:
        """Begin a measurement: peaks are those of what is held now, and what was freed goes back to the kernel."""
        _give_back()
        with self._lock:
            self.peak = self.live
            self._host_peak = 0
        self.look()

    def look(self) -> None:
        """Take the host's memory into the reading; `installed` does it every few milliseconds."""
        with self._lock:
            self._host_peak = max(self._host_peak, private_bytes() - self._private - self._host_base)

    def read(self) -> Reading:
        """Peaks since the last `reset`."""
        self.look()
        return Reading(self.peak, self._host_peak)

    # -- running operators

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operator of torch on tensors of either side."""
        name = func._schema.name
        leaves = tree_flatten((args, kwargs))[0]
        ours = [leaf for leaf in leaves if isinstance(leaf, MeteredTensor)]
        if name in _PLACING:
            return self._place(func, args, kwargs, leaves)
        if name in ("aten::is_pinned", "aten::_pin_memory", "aten::pin_memory"):
            return self._pin(name, args[0])
        if name == "aten::_has_compatible_shallow_copy_type":
            return isinstance(args[0], MeteredTensor) == isinstance(args[1], MeteredTensor)
        named = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        here = bool(ours) if named is None else named.type == "cuda"
        if kwargs.get("pin_memory"):
            kwargs = kwargs | {"pin_memory": False}
        if ours and name not in _ACROSS:
            _check_sides(func, leaves)
        args, kwargs = tree_map(_on_host, (args, kwargs))
        if here and name in _EMPTY:
            return self._made(func, args, kwargs)
        if here and name == "aten::clone" and _large(args[0]):
            return self._copied(args[0], args[0].dtype, kwargs.get("memory_format"))
        if not here:
            return func(*args, **kwargs)
        return self._computed(exchanged, (func, args, kwargs), {}, ours)

    def _computed(
        self, compute: Callable[..., Any], args: Any, kwargs: dict[str, Any], ours: list[MeteredTensor]
    ) -> Any:
        """What an operator gives, as the device's from the beginning on."""
        self._computing = True
        try:
            return self._taken(compute(*args, **kwargs), ours)
        finally:
            self._computing = False

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        shape = func(*args, **(kwargs | {"device": "meta"}))
        if shape.nbytes < _MAPPED or not shape.is_contiguous():
            return self.adopt(func(*args, **kwargs))
        return self._mapped(shape.shape, shape.dtype)

    def _mapped(self, shape: torch.Size, dtype: torch.dtype) -> MeteredTensor:
        """A contiguous block in a shared mapping; a fresh one is of zeros."""
        size = shape.numel() * dtype.itemsize
        self._check_room(size)
        self.look()
        inner = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(dtype).view(shape)
        return self.adopt(inner, mapped=True)

    def _copied(self, source: Tensor, dtype: torch.dtype, layout: torch.memory_format | None) -> Tensor:
        dense = source.is_contiguous() or layout == torch.contiguous_format
        if not dense or source.numel() * dtype.itemsize < _MAPPED:
            kept = torch.preserve_format if layout is None else layout
            return self.adopt(torch.empty_like(source, dtype=dtype, memory_format=kept).copy_(source))
        made = self._mapped(source.shape, dtype)
        made.inner.copy_(source)
        return made

    def _place(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> Tensor:
        source, name = args[0], func._schema.name
        was = isinstance(source, MeteredTensor)
        named = next((leaf.type for leaf in leaves if isinstance(leaf, torch.device)), None)
        if name == "aten::to" and func._overloadname == "other":
            named = "cuda" if isinstance(args[1], MeteredTensor) else "cpu"
        named = {"aten::cpu": "cpu", "aten::cuda": "cuda"}.get(name, named)
        becomes = was if named is None else named == "cuda"
        dtypes = [leaf for leaf in leaves if isinstance(leaf, torch.dtype)]
        dtype = dtypes[0] if dtypes else args[1].dtype if func._overloadname == "other" else source.dtype
        inner = source.inner if was else source
        if (becomes and not was) or (becomes and name == "aten::_to_copy"):
            return self._copied(inner, dtype, kwargs.get("memory_format"))
        if was and not becomes:
            return torch.empty_like(inner, dtype=dtype, device="cpu").copy_(inner)
        if not was:  # to a dtype, or to where nothing is computed
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        args, kwargs = tree_map(_on_host, (args, kwargs))
        taken: Tensor = self._computed(func, args, kwargs, [source])
        return taken

    def _pin(self, name: str, tensor: Tensor) -> Any:
        """Pinned memory is the host's; torch rounds it up to a power of two."""
        if name == "aten::is_pinned":
            return not isinstance(tensor, MeteredTensor) and bool(getattr(tensor, "_pinned", False))
        if isinstance(tensor, MeteredTensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor', only dense CPU tensors can be pinned")
        size = max(tensor.nbytes, 1)
        room = torch.zeros(1 << (size - 1).bit_length(), dtype=torch.uint8).fill_(1)
        pinned = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        pinned._pinned = True  # type: ignore[attr-defined]
        return pinned

    def _taken(self, result: Any, ours: list[MeteredTensor]) -> Any:
        """What an operator gave, as the device's."""
        known = {id(each.inner): each for each in ours}

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return known[id(leaf)] if id(leaf) in known else self.adopt(leaf)

        return tree_map(take, result)

    # -- booking

    def adopt(self, inner: Tensor, mapped: bool = False) -> MeteredTensor:
        """A CPU tensor as one of the device's; its storage is booked unless it is already.

        Raises:
            OutOfMemory: there is no room.
        """
        storage = inner.untyped_storage()
        with self._lock:
            block = self._blocks.get(storage._cdata)
            if block is None:
                self._check_room(storage.nbytes())
                block = self._blocks[storage._cdata] = Block(self, storage, mapped)
                self._booked(block, block.bytes)
        # A view of a tensor that was made outside of inference mode is none of its tensors.
        with torch.inference_mode(inner.is_inference()):
            return MeteredTensor(inner, block, self)

    def _check_room(self, size: int) -> None:
        if self.live + size > self.capacity:
            gib = 1 << 30
            raise OutOfMemory(
                f"CUDA out of memory. Tried to allocate {size / gib:.2f} GiB. GPU 0 has a total capacity of "
                f"{self.capacity / gib:.2f} GiB of which {(self.capacity - self.live) / gib:.2f} GiB is free."
            )

    def _booked(self, block: Block, size: int) -> None:
        self.live += size
        self._private += 0 if block.mapped else size
        self.peak = max(self.peak, self.live)

    def _freed(self, block: Block) -> None:
        with self._lock:
            self._booked(block, -block.bytes)

    # -- installing

    @contextmanager
    def installed(self) -> Iterator[MeteredDevice]:
        """For the length of a `with` block, let this be the process's one CUDA device."""
        # Torch remembers by identity which functions make tensors, from when it first needs to know.
        _device_constructors()
        ends = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ends,), daemon=True)
        with ExitStack() as stack:
            for target, replaced in self._replacements().items():
                stack.enter_context(patch(target, replaced))
            stack.enter_context(patch.dict("os.environ", {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
            stack.enter_context(_Mode(self))
            watcher.start()
            try:
                yield self
            finally:
                ends.set()
                watcher.join()

    def _watch(self, ends: threading.Event) -> None:
        while not ends.wait(0.005):
            if not self._computing:
                self.look()

    def _replacements(self) -> dict[str, Any]:
        properties = SimpleNamespace(name="metered", total_memory=self.capacity, major=9, minor=0)
        answers: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "ipc_collect": lambda: None,
            "get_device_name": lambda device=None: "metered",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: properties,
            "is_bf16_supported": lambda including_emulation=True: True,
            "memory_allocated": lambda device=None: self.live,
            "memory_reserved": lambda device=None: self.live,
            "max_memory_allocated": lambda device=None: self.peak,
            "reset_peak_memory_stats": lambda device=None: self.reset(),
            "get_per_process_memory_fraction": lambda device=None: 1.0,
            "set_per_process_memory_fraction": lambda fraction, device=None: None,
            "mem_get_info": lambda device=None: (self.capacity - self.live, self.capacity),
        }
        found: dict[str, Any] = {f"torch.cuda.{name}": answer for name, answer in answers.items()}
        found |= {f"torch.Tensor.{name}": moves for name, moves in self._moves().items()}
        found |= {f"torch.{name}": _made_on_host(getattr(torch, name)) for name in ("tensor", "as_tensor")}
        # Triton compiles for real devices only.
        return found | {"moevolve.kernels.expert_merge.has_triton": lambda: False}

    def _moves(self) -> dict[str, Any]:
        """Methods of plain tensors that name a device: torch's own look for it before any mode is asked."""
        plainly = Tensor.to

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            args = _where(args)
            named = {key: value for key, value in kwargs.items() if key != "copy"}
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **named)
            if device is None or device.type != "cuda" or isinstance(tensor, MeteredTensor):
                return plainly(tensor, *args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return self._copied(tensor, dtype or tensor.dtype, layout)

        def cuda(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return to(tensor, CUDA)

        def pin_memory(tensor: Tensor, device: object = None) -> Tensor:
            pinned: Tensor = self._pin("aten::_pin_memory", tensor)
            return pinned

        def is_pinned(tensor: Tensor, device: object = None) -> bool:
            return bool(self._pin("aten::is_pinned", tensor))

        return {"to": to, "cuda": cuda, "pin_memory": pin_memory, "is_pinned": is_pinned}


def _made_on_host(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory that reads Python's numbers, which become the host's first, as on a GPU."""

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        there = None if device is None else torch.device(device)
        if isinstance(data, MeteredTensor):
            return data.clone() if there is None else data.to(there)
        if there is None or there.type != "cuda":
            return factory(data, *args, device=there, **kwargs)
        return factory(data, *args, **kwargs).to(CUDA)

    return make


def _where(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `to`, with what a tensor of the device stands for in its place."""
    return (CUDA, args[0].dtype, *args[1:]) if args and isinstance(args[0], MeteredTensor) else args


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, MeteredTensor):
        return leaf.inner
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def _large(tensor: Tensor) -> bool:
    return tensor.nbytes >= _MAPPED


def _check_sides(func: Any, leaves: list[Any]) -> None:
    """Numbers of no dimension may come from the host; what else does is an error, as on a GPU."""
    strange = [
        leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, MeteredTensor) and leaf.dim()
    ]
    if strange:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func})"
        )


def _give_back() -> None:
    """Return freed host memory to the kernel."""
    ctypes.CDLL(None).malloc_trim(0)


def private_bytes() -> int:
    """Private memory of this process that is resident, without mapped files and shared mappings."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon; the lab needs Linux")
