"""Weights that all workers of a node have once, where they run the model on the CPU.

Tensors that `transformers` takes from a checkpoint's files as they are stay mapped from there, the same pages for every
process. Those that it changes while it loads them (experts are fused, dtypes converted) are each process's own. So the
first worker writes its weights as they are loaded into a file, and all map that one, copy on write: what a worker
changes stays its own.

The file has no name, so it is gone with the last process that has it open, whatever ended that one. Others find it
through `/proc`, by what a small register says under a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.config import ModelConfig
from moevolve.workers.families.registry import expert_family
from moevolve.workers.model.fingerprint import model_fingerprint
from moevolve.workers.model.loading import DTYPES, dtype_of, load_config, load_model, resolve_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_FORM = 1
"""Of the files: counts up when another one can't be read as before."""

_LINE = 64
"""Bytes of a cache line. Products of tensors that begin elsewhere in one may differ in their last digits (oneMKL,
"Conditional Numerical Reproducibility")."""

_PADDING = ":padding"
"""What names of tensors end with that are no weights, but what lies between them."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}
"""What safetensors calls the dtypes of models' tensors."""


def load_shared(config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Like `load_model`, the same bits, with weights that the processes of this node which ask for them have once.

    Where nothing is gained (on a GPU, or where the weights are mapped from the checkpoint anyway) or it can't be done
    (no room for the file, not on Linux), the weights are the process's own; the log says why.

    Raises:
        UserError: see `load_model`.
    """
    if not _gains(config):
        return load_model(config)
    own = None
    try:
        key = _key(config)
        with _register(key) as register:
            found = [path for line in register if _is_of(path := Path(line.strip()), key)]
            if not found:
                own = load_model(config)
            # Open for as long as this process lives: others find it here.
            file = _write(own[0], key) if own else os.open(found[0], os.O_RDONLY)
            try:
                shared = _load_from(file, config)
                if own is not None:
                    _compare(own[0], shared[0])
            except BaseException:
                os.close(file)
                raise
            register.truncate(0)
            register.writelines(f"{path}\n" for path in (*found, f"/proc/{os.getpid()}/fd/{file}"))
    except (OSError, RuntimeError, SafetensorError, UserError) as error:
        log.warning("model %s: its weights aren't shared with other workers of this node: %s", config.path, error)
        return own or load_model(config)
    return shared


def _gains(config: ModelConfig) -> bool:
    if sys.platform != "linux" or config.trust_remote_code or config.device_map is not None:
        return False
    settings = load_config(config)
    changed = expert_family(settings.model_type) is not None or settings.dtype != DTYPES[dtype_of(config, settings)]
    return changed and resolve_device(config).type == "cpu"


def _key(config: ModelConfig) -> str:
    """What tells weights apart that differ, or that other versions may lay out differently."""
    import transformers

    versions = (_FORM, transformers.__version__, torch.__version__)
    dtype = dtype_of(config, load_config(config))
    return hashlib.sha256(repr((model_fingerprint(config), dtype, versions)).encode()).hexdigest()


@contextmanager
def _register(key: str) -> Iterator[IO[str]]:
    """The lines that say where files of a key are, locked: one process at a time finds, or else writes one.

    Raises:
        OSError: the folder for it can't be had, or others could write there.
    """
    folder = Path(tempfile.gettempdir()) / f"moevolve-weights-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder for its owner alone (chmod 700); remove it")
    with os.fdopen(os.open(folder / key, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+") as register:
        fcntl.flock(register, fcntl.LOCK_EX)
        yield register


def _is_of(path: Path, key: str) -> bool:
    """Whether a process still has the file; another process may have its number by now, or another file that one."""
    try:
        if not path.is_file():
            return False
        with safe_open(path, "pt") as file:
            return bool((file.metadata() or {}).get("key") == key)
    except (OSError, SafetensorError):
        return False


def _write(model: PreTrainedModel, key: str) -> int:
    """Write the weights to a file without a name, as safetensors.

    A tensor begins where it does in memory, relative to cache lines; padding is tensors, too, because the format allows
    for no gaps.

    Returns:
        The file, open to be read.

    Raises:
        OSError: there is no room.
    """
    # A tied tensor once, by its first name: the model made of them ties it again.
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        tensors.setdefault(tensor.data_ptr(), (name, tensor))
    header: dict[str, object] = {
        "__metadata__": {"key": key, "generation_config": model.generation_config.to_json_string()}
    }
    parts: list[Tensor] = []
    end = 0
    for name, tensor in tensors.values():
        padding = torch.zeros((tensor.data_ptr() - end) % _LINE, dtype=torch.uint8)
        for title, part in ((f"{name}{_PADDING}", padding), (name, tensor)):
            offsets = [end, end := end + part.nbytes]
            header[title] = {"dtype": _NAMES[part.dtype], "shape": list(part.shape), "data_offsets": offsets}
            parts.append(part)
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _LINE)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < len(text) + end:
        raise OSError(f"{tempfile.gettempdir()} (TMPDIR) has {free >> 20} MiB left, and they take {end >> 20} MiB")
    with tempfile.TemporaryFile() as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            file.write(part.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        return os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)


def _load_from(file: int, config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import GenerationConfig

    with safe_open(f"/proc/self/fd/{file}", "pt") as tensors:
        names = [name for name in tensors.keys() if not name.endswith(_PADDING)]  # noqa: SIM118
        weights = {name: tensors.get_tensor(name) for name in names}
        generation = json.loads(tensors.metadata()["generation_config"])
    model, tokenizer = load_model(config, weights)
    model.generation_config = GenerationConfig.from_dict(generation)
    return model, tokenizer


def _compare(own: PreTrainedModel, shared: PreTrainedModel) -> None:
    """Check that nothing of a model is lost in its file.

    Raises:
        RuntimeError: the models differ.
    """
    others = _tensors(shared)
    for name, tensor in _tensors(own).items():
        other = others.get(name)
        if other is None or _form(tensor) != _form(other) or not torch.equal(tensor, other):
            raise RuntimeError(f"its {name} came back from a file changed")


def _tensors(model: PreTrainedModel) -> Mapping[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()
