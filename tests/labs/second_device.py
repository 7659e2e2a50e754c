"""A stand-in for a GPU: tensors that say `cuda`, compute on the CPU, and don't mix with the host's.

What code under test makes with `device="cuda"` or moves there is a `DeviceTensor`, a wrapper around a CPU tensor. So
tensors that were left on the host are found without a GPU, as on one: an operator over both raises `RuntimeError`.
Neither memory nor time is that of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CUDA = torch.device("cuda", 0)
_PLACING = ("aten::to", "aten::_to_copy", "aten::cpu", "aten::cuda")
# Operators that take tensors of both sides: copies, and indices from the host.
_ACROSS = ("aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::set_")
_MEMORY = 80 * 10**9


class DeviceTensor(Tensor):
    """A tensor that says it is on a GPU; `inner` is where its numbers are.

    To torch's own C++ code it is on the CPU, for builds without CUDA can't guard a device that they don't know: what
    asks that code where a tensor is has a method here.
    """

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        # A view of a tensor that was made outside of inference mode is none of its tensors.
        with torch.inference_mode(inner.is_inference()):
            made: Self = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=inner.device,
            )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"DeviceTensor({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: DeviceTensor) -> None:
        # Torch would exchange the wrapper's own storage, which nobody reads.
        self.inner = other.inner

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        copies = kwargs.pop("copy", False)
        device, dtype, _, layout = torch._C._nn._parse_to(*_where(args), **kwargs)
        dtype = self.dtype if dtype is None else dtype
        if device is not None and device.type != "cuda":
            return self.inner.to(device) if device.type == "meta" else _copied(self.inner, dtype)
        if dtype == self.dtype and not copies:
            return self
        return torch.ops.aten._to_copy(self, dtype=dtype, device=CUDA, memory_format=layout)  # type: ignore[no-any-return]

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
        raise NotImplementedError("these tensors aren't traced")


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator of torch on tensors of either side."""
    name = func._schema.name
    leaves = tree_flatten((args, kwargs))[0]
    ours = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    if name in _PLACING:
        return _place(func, args, kwargs, leaves)
    if name == "aten::_has_compatible_shallow_copy_type":
        return isinstance(args[0], DeviceTensor) == isinstance(args[1], DeviceTensor)
    named = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    here = bool(ours) if named is None else named.type == "cuda"
    if ours and name not in _ACROSS:
        _check_sides(func, leaves)
    args, kwargs = tree_map(_on_host, (args, kwargs))
    kwargs.pop("pin_memory", None)
    if name == "aten::histc" and not args[0].is_floating_point():  # CPUs count no integers
        return DeviceTensor(func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype))
    found = func(*args, **kwargs)
    return _taken(found, ours) if here else found


def _taken(result: Any, ours: list[DeviceTensor]) -> Any:
    """What an operator gave, as the device's."""
    known = {id(each.inner): each for each in ours}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else DeviceTensor(leaf)

    return tree_map(take, result)


def _place(func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any]) -> Tensor:
    source, name = args[0], func._schema.name
    was = isinstance(source, DeviceTensor)
    named = next((leaf.type for leaf in leaves if isinstance(leaf, torch.device)), None)
    like = args[1] if name == "aten::to" and func._overloadname == "other" else None
    if like is not None:
        named = "cuda" if isinstance(like, DeviceTensor) else "cpu"
    named = {"aten::cpu": "cpu", "aten::cuda": "cuda"}.get(name, named)
    becomes = was if named is None else named == "cuda"
    if not was and not becomes:  # to a dtype, or to where nothing is computed
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    dtypes = [leaf for leaf in leaves if isinstance(leaf, torch.dtype)]
    dtype = dtypes[0] if dtypes else source.dtype if like is None else like.dtype
    inner = source.inner if was else source
    if becomes and was and name != "aten::_to_copy":
        args, kwargs = tree_map(_on_host, (args, kwargs))
        return _taken(func(*args, **kwargs), [source])  # type: ignore[no-any-return]
    copied = _copied(inner, dtype, kwargs.get("memory_format"))
    return DeviceTensor(copied) if becomes else copied


def _copied(source: Tensor, dtype: torch.dtype, layout: torch.memory_format | None = None) -> Tensor:
    kept = torch.preserve_format if layout is None else layout
    return torch.empty_like(source, dtype=dtype, device="cpu", memory_format=kept).copy_(source)


def _where(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of `to`, with what a tensor of the device stands for in its place."""
    return (CUDA, args[0].dtype, *args[1:]) if args and isinstance(args[0], DeviceTensor) else args


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, DeviceTensor):
        return leaf.inner
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def _check_sides(func: Any, leaves: list[Any]) -> None:
    """Numbers of no dimension may come from the host; what else does is an error, as on a GPU."""
    if any(isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor) and leaf.dim() for leaf in leaves):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func})"
        )


@contextmanager
def second_device() -> Iterator[None]:
    """For the length of a `with` block, let the process have one CUDA device."""
    # Torch remembers by identity which functions make tensors, from when it first needs to know.
    _device_constructors()
    with ExitStack() as stack:
        for target, replaced in _replacements().items():
            stack.enter_context(patch(target, replaced))
        stack.enter_context(patch.dict("os.environ", {"HF_DEACTIVATE_ASYNC_LOAD": "1"}))
        stack.enter_context(_Mode())
        yield


def _replacements() -> dict[str, Any]:
    answers = {
        "is_available": True,
        "is_initialized": True,
        "_lazy_init": None,
        "device_count": 1,
        "current_device": 0,
        "synchronize": None,
        "empty_cache": None,
        "get_device_name": "second",
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(name="second", total_memory=_MEMORY, major=9, minor=0),
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
        "get_per_process_memory_fraction": 1.0,
        "set_per_process_memory_fraction": None,
        "mem_get_info": (_MEMORY, _MEMORY),
    }
    found: dict[str, Any] = {f"torch.cuda.{name}": _answering(answer) for name, answer in answers.items()}
    plainly = Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """`Tensor.to`, which would look for the device before any mode is asked."""
        named = {key: value for key, value in kwargs.items() if key != "copy"}
        device, dtype, _, layout = torch._C._nn._parse_to(*_where(args), **named)
        if device is None or device.type != "cuda" or isinstance(tensor, DeviceTensor):
            return plainly(tensor, *_where(args), **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return DeviceTensor(_copied(tensor, dtype or tensor.dtype, layout))

    found |= {"torch.Tensor.to": to, "torch.Tensor.cuda": lambda tensor, *args, **kwargs: to(tensor, CUDA)}
    found |= {"torch.Tensor.pin_memory": lambda tensor, device=None: tensor}
    found |= {f"torch.{name}": _made_on_host(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    return found


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _made_on_host(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory that reads Python's numbers, which become the host's first, as on a GPU."""

    def make(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        there = None if device is None else torch.device(device)
        if isinstance(data, DeviceTensor):
            return data.clone() if there is None else data.to(there)
        if there is None or there.type != "cuda":
            return factory(data, *args, device=there, **kwargs)
        return factory(data, *args, **kwargs).to(CUDA)

    return make
