"""Tensors read from headers alone, and one clear line about every fault of a checkpoint's files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.headers import stored_tensors

TENSORS = {
    "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "eighth": torch.arange(10, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "whole": torch.arange(4.0).reshape(2, 2, 1),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 3),
}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    for file, names in (("a.safetensors", ("half", "eighth")), ("b.safetensors", ("whole", "scalar", "empty"))):
        save_file({name: TENSORS[name] for name in names}, tmp_path / file, {"format": "pt"})
    places = {name: "a.safetensors" if name in ("half", "eighth") else "b.safetensors" for name in TENSORS}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return tmp_path


def test_every_tensors_bytes_are_found(sharded: Path) -> None:
    found = stored_tensors(sharded)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape)
        expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert b"".join(found[name].chunks()) == expected
        if tensor.dim() > 1 and len(tensor):
            rows = tensor[[1, 0, 1]].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert b"".join(found[name].chunks((1, 0, 1))) == rows
    assert [found[name].dtype for name in TENSORS] == ["BF16", "F8_E4M3", "F32", "I64", "F32"]


def edited_header(file: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    change(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + size :])


def edited_index(folder: Path, change: Callable[[dict[str, dict[str, str]]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def shortened(file: Path, end: int) -> None:
    file.write_bytes(file.read_bytes()[:end])


FIRST, SECOND = "a.safetensors", "b.safetensors"
DAMAGES: dict[str, Callable[[Path], object]] = {
    r"a.safetensors isn't a valid safetensors file.* shape": lambda at: edited_header(
        at / FIRST, lambda header: header["half"].update(shape=[2, 4])
    ),
    "a.safetensors isn't a valid .*BF12": lambda at: edited_header(
        at / FIRST, lambda header: header["half"].update(dtype="BF12")
    ),
    "a.safetensors isn't a valid .*data_offsets": lambda at: edited_header(
        at / FIRST, lambda header: header["half"].pop("data_offsets")
    ),
    "b.safetensors isn't a valid safetensors file, or ends early": lambda at: shortened(at / SECOND, -3),
    r"b.safetensors isn't .*\(Error while deserializing header": lambda at: shortened(at / SECOND, 30),
    "index.json names b.safetensors, which doesn't exist": lambda at: (at / SECOND).unlink(),
    "says that tensor half is in b.safetensors, and it isn't": lambda at: edited_index(
        at, lambda index: index["weight_map"].update(half=SECOND)
    ),
    "no valid weight_map": lambda at: edited_index(at, dict.clear),
    "names no file": lambda at: edited_index(at, lambda index: index.update(weight_map={})),
    r"names '\.\./a.safetensors', where .* its own folder": lambda at: edited_index(
        at, lambda index: index["weight_map"].update(half="../a.safetensors")
    ),
    "has two sets of weights: model.safetensors, and a.safetensors": lambda at: save_file(
        TENSORS, at / "model.safetensors", {"format": "pt"}
    ),
    r"adapter_config.json: the folder has an adapter.* merge it": lambda at: (at / "adapter_config.json").write_text(
        "{}"
    ),
    "tensor whole is both in": lambda at: save_file({name: TENSORS[name] for name in ("half", "whole")}, at / FIRST),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_a_fault_is_named_in_one_line(sharded: Path, message: str) -> None:
    DAMAGES[message](sharded)
    with pytest.raises(UserError, match=message) as caught:
        stored_tensors(sharded)
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        stored_tensors(tmp_path)


def test_an_index_may_name_one_file_and_say_nothing_else(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    save_file({"half": TENSORS["half"] + 1}, tmp_path / "consolidated.safetensors", {"format": "pt"})
    places = dict.fromkeys(TENSORS, "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert {tensor.file.name for tensor in stored_tensors(tmp_path).values()} == {"model.safetensors"}
