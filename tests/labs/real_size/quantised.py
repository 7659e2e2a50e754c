"""Quantised checkpoints at full width on a CPU with little memory: written in their formats, and asked verb by verb.

Everything is as in `published` but the vocabularies, which are cut down, and the number of layers.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf_checkpoints import converted, metadata
from packed_checkpoints import scheme

from real_size.checkpoint import value_bytes, write_checkpoint
from real_size.meter import private_bytes
from real_size.published import SPECS, Spec, stored_tensors
from real_size.tokenizers import write_tokenizer

_FEW = {"vocab_size": 32_000}
_INT4 = {
    "quantization_config": scheme("pack-quantized", 128, type="int", strategy="group")
    | {"quantization_status": "compressed"}
}
FORMATS: dict[str, Spec] = {
    "mxfp4": replace(SPECS["gpt-oss-20b"], changes=_FEW),
    "int4": replace(SPECS["qwen3-30b-a3b"], layers=2, changes=_FEW | _INT4),
    "gguf": replace(SPECS["mixtral-8x7b"], changes=_FEW),
    "fp8": replace(SPECS["deepseek-v4-flash"], changes=SPECS["deepseek-v4-flash"].changes | _FEW),
}
"""Models by format. Mixtral's vocabulary is the published one."""
EXPERTS_GB = 4.0
"""Memory of the machine that is imagined, in units of 10^9 bytes; three quarters of it are for experts."""
_SEARCH = "large"
_IDS = torch.arange(3, 19)[None]


def write_model(kind: str, folder: Path) -> Path:
    """Write the model of a format; returns what `model.path` is."""
    if kind != "gguf":
        return write_checkpoint(FORMATS[kind], folder)
    folder.mkdir(parents=True)
    config = FORMATS[kind].config
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(FORMATS[kind].name, config, folder)
    return _write_gguf(config, folder / "model.gguf")


def _write_gguf(config: dict[str, Any], file: Path) -> Path:
    """Write a GGUF file tensor by tensor: matrices in Q4_K, vectors and routers in float32."""
    from transformers import AutoConfig

    made = AutoConfig.for_model(config["model_type"], **{k: v for k, v in config.items() if k != "model_type"})
    state = {each.name: torch.empty(each.shape, device="meta") for each in stored_tensors(config)}
    tensors = {name: tuple(each.shape) for name, each in converted(state, made).items()}
    keys = metadata(made)
    writer = gguf.GGUFWriter(file, keys.pop("general.architecture"))
    for key, value in keys.items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    for name, shape in tensors.items():
        kind = _type_of(name, shape)
        writer.add_tensor_info(name, shape, np.dtype(np.float32), _size(shape, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in tensors.items():
        writer.write_tensor_data(_gguf_bytes(shape, _type_of(name, shape)))
    writer.close()
    return file


def _type_of(name: str, shape: tuple[int, ...]) -> Type:
    return Type.F32 if len(shape) == 1 or "gate_inp" in name else Type.Q4_K


def _size(shape: tuple[int, ...], kind: Type) -> int:
    numbers, width = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape, dtype=np.int64)) // numbers * width


def _gguf_bytes(shape: tuple[int, ...], kind: Type) -> np.ndarray[Any, Any]:
    if kind == Type.F32:
        some = np.frombuffer(value_bytes("F32", "ones" if len(shape) == 1 else "weight", shape[-1]), np.uint8)
        return np.resize(some, _size(shape, kind))
    _, width = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(shape).integers(0, 256, (65_521, width), dtype=np.uint8)
    # A number is scale * (6 bits) * (4 bits) - minimum * (6 bits), and 4 bits are 7.5 on average.
    scale = np.array([0.006 / shape[-1] ** 0.5, 0.045 / shape[-1] ** 0.5], np.float16)
    blocks[:, :4] = scale.view(np.uint8)
    return np.resize(blocks.reshape(-1), _size(shape, kind))


def write_run(kind: str, model: Path, task: Path, folder: Path) -> Path:
    """Write a search of four random prunings and of one repair."""
    spec = FORMATS[kind]
    repair = {"tokens": 512, "ridge_lambdas": [0.01]}
    phases: list[dict[str, Any]] = [
        {"kind": "prune", "evaluations": 4, "initial": 4},
        {"kind": "repair", "evaluations": 1, "initial": 1, "repair": repair},
    ]
    if "requantise" not in verbs_of(kind) and kind != "gguf":
        del phases[1]
    run = {
        "name": _SEARCH,
        "model": {"path": str(model), "device": "cpu", "originals": "disk"},
        "tasks": [str(task)],
        "genome": {"kind": "eep", "experts": spec.retained, "groups": 1, "router_space": spec.router_space},
        "phases": phases,
        "engine": {"threads": 1, "chat_template": "none"},
        "workers": {"count": 1, "num_gpus": 0},
        "final": {"rerank": 0, "test": False},
    }
    path = folder / "run.json"
    path.write_text(json.dumps(run))
    return path


# -- in processes of their own


@contextmanager
def _metered(found: dict[str, Any]) -> Iterator[None]:
    """Put the CPU seconds of a `with` block, and the process's largest private memory in bytes, into a dict."""
    ends, peaks = threading.Event(), [0]

    def watch() -> None:
        while not ends.wait(0.005):
            peaks.append(max(peaks.pop(), private_bytes()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.process_time()
    yield
    found["seconds"] = time.process_time() - began
    ends.set()
    watcher.join()
    found["private"] = peaks[0]


def ask(verb: str, folder: str, model: str) -> dict[str, Any]:
    """Do one verb, after those before it in `VERBS`.

    Args:
        verb: Which.
        folder: Folder with `run.json`, for the store and the exports.
        model: Value of `model.path`.

    Returns:
        `seconds` of the CPU, the most `private` bytes, and a `note`.
    """
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    found["note"] = VERBS[verb](Path(folder), model, found)
    return found


def _read(folder: Path, model: str, found: dict[str, Any]) -> str:
    """Unpack every tensor, one at a time."""
    from moevolve.workers.checkpoints.loading import load_config, packing
    from moevolve.workers.contract.settings import ModelConfig

    with _metered(found):
        config = ModelConfig(model, device="cpu")
        packed = packing(config, load_config(config))
        assert packed is not None
        size = sum(each[...].nbytes for each in packed.tensors(torch.bfloat16).values())
    return f"{size / 1e9:.2f} GB in 16 bits"


def _search(folder: Path, model: str, found: dict[str, Any]) -> str:
    from larger_than_memory import search

    with _metered(found):
        done = search(str(folder / "run.json"), str(folder), None, EXPERTS_GB)
    if done["failures"]:
        raise RuntimeError(done["failures"][0])
    (folder / "best.json").write_text(json.dumps(done["best"]))
    return f"{done['individuals']} individuals"


def _individual(folder: Path, phase: str) -> str:
    return f"{_SEARCH}:{json.loads((folder / 'best.json').read_text())[phase]}"


def _exported(folder: Path, phase: str, found: dict[str, Any]) -> Any:
    from moevolve.search.interface.export import ExportRequest
    from moevolve.store.repository import Store
    from moevolve.workers.contract.capacity import CAPACITY

    os.environ[CAPACITY] = str(EXPERTS_GB)
    with Store.open(f"sqlite:///{folder}/store.db") as store, _metered(found):
        return ExportRequest(_individual(folder, phase), folder / phase, requantise=phase == "repair").answer(store)


def _export(folder: Path, model: str, found: dict[str, Any]) -> str:
    """Prune, and compare the bytes of what is kept with the source's."""
    report = _exported(folder, "prune", found)
    edit, _ = _edit(folder, "prune")
    kept = [row.argmax(axis=1).tolist() for row in edit.expert_merging]
    compared = _compare(Path(model), folder / "prune", kept)
    return f"{report.size_bytes / 1e9:.2f} GB, {compared} tensors of experts equal, byte for byte"


def _requantise(folder: Path, model: str, found: dict[str, Any]) -> str:
    report = _exported(folder, "repair", found)
    changes = "; ".join(value for _, value in report.changes)
    return f"{report.size_bytes / 1e9:.2f} GB, {report.anew} tensors anew: {changes}"


def _edit(folder: Path, phase: str) -> tuple[Any, Any]:
    """The edit of the best individual of a phase, and the settings of the unedited model."""
    from moevolve.search.running.candidates import find_candidate
    from moevolve.store.repository import Store

    with Store.open(f"sqlite:///{folder}/store.db") as store:
        subject = find_candidate(store, _individual(folder, phase))
    return subject.edit, subject.config.model


def _compare(model: Path, exported: Path, kept: list[list[int]]) -> int:
    """Compare experts' tensors with those of the source; returns how many there are."""
    before, after = (_bytes_of(each) for each in (model, exported))
    count = 0
    for name in filter(_is_of_experts, after):
        parts = name.split(".")
        experts = kept[int(parts[parts.index("blk" if parts[0] == "blk" else "layers") + 1])]
        if "experts" in parts and parts[parts.index("experts") + 1].isdigit():
            place = parts.index("experts") + 1
            source = ".".join([*parts[:place], str(experts[int(parts[place])]), *parts[place + 1 :]])
            pairs = [(before[source](None), after[name](None))]
        else:
            pairs = [(before[name](old), after[name](new)) for new, old in enumerate(experts)]
        if not all(np.array_equal(one, other) for one, other in pairs):
            raise RuntimeError(f"tensor {name} isn't the source's")
        count += 1
    return count


def _is_of_experts(name: str) -> bool:
    return ".experts." in name or "_exps." in name


def _bytes_of(place: Path) -> dict[str, Callable[[int | None], Any]]:
    """Functions that read the bytes of a tensor, or of one expert of a fused one, by name."""
    from safetensors import safe_open

    files = sorted(place.glob("*.gguf")) if place.is_dir() else [place]
    if files:
        tensors = {each.name: each.data for each in gguf.GGUFReader(files[0]).tensors}
        return {name: lambda row, data=data: data if row is None else data[row] for name, data in tensors.items()}
    found = {}
    for file in place.glob("*.safetensors"):
        opened = safe_open(file, "pt")
        found |= {name: partial(_raw, opened, name) for name in opened.keys()}  # noqa: SIM118 - it isn't a dict
    return found


def _raw(opened: Any, name: str, row: int | None) -> Any:
    tensor = opened.get_tensor(name) if row is None else opened.get_slice(name)[row : row + 1]
    return tensor.contiguous().view(torch.uint8).numpy()


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=_IDS, use_cache=False).logits[0].float()
    return found


def _reload(folder: Path, model: str, found: dict[str, Any]) -> str:
    """Load the pruned checkpoint, and compare its logits with the edited model's."""
    from moevolve.workers.model.resident import ResidentModel

    edit, config = _edit(folder, "prune")
    resident = ResidentModel.load(config)
    with resident.edited(edit):
        expected = _logits(resident.model)
    np.save(folder / "logits.npy", expected.numpy())
    del resident
    path = folder / "prune" / (Path(model).name if Path(model).is_file() else "")
    with _metered(found):
        logits = _logits(ResidentModel.load(replace(config, path=str(path))).model)
    return _difference(expected, logits)


def _transformers(folder: Path, model: str, found: dict[str, Any]) -> str:
    """The same with plain `transformers`, which has the whole pruned model in memory."""
    from transformers import AutoModelForCausalLM

    expected = torch.from_numpy(np.load(folder / "logits.npy"))
    with _metered(found):
        logits = _logits(AutoModelForCausalLM.from_pretrained(folder / "prune", dtype=torch.bfloat16).eval())
    return _difference(expected, logits)


def _difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    if not torch.isfinite(expected).all():
        raise RuntimeError("logits aren't finite")
    if torch.equal(expected, found):
        return "logits equal"
    largest = float((found - expected).abs().max())
    return f"logits differ by {largest:.2g} at most, the largest is {float(expected.abs().max()):.2g}"


VERBS: dict[str, Callable[[Path, str, dict[str, Any]], str]] = {
    "read": _read,
    "search": _search,
    "export": _export,
    "reload": _reload,
    "transformers": _transformers,
    "requantise": _requantise,
}
"""What is asked of a format, in this order."""


def verbs_of(kind: str) -> tuple[str, ...]:
    """The verbs of a format. `transformers` reads a Mixtral in GGUF as a Llama, and K-quants aren't packed anew.

    DeepSeek-V4 isn't repaired.
    """
    left_out = {"gguf": ("transformers", "requantise"), "fp8": ("requantise",)}.get(kind, ())
    return tuple(verb for verb in VERBS if verb not in left_out)
