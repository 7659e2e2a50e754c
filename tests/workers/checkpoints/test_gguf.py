"""GGUF checkpoints: they load the numbers that they hold, and what is wrong with one is named."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_checkpoints import ARCHITECTURES, DENSE, SETTINGS, gguf_checkpoint, lone_gguf, metadata, write_gguf
from packed_checkpoints import same_numbers

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.files import gguf_parts, local_directory
from moevolve.workers.checkpoints.fingerprint import model_fingerprint
from moevolve.workers.checkpoints.gguf_reader import QuickReader
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.model.describe import describe_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MakeModel = Callable[..., "PreTrainedModel"]
Write = Callable[..., tuple[ModelConfig, ModelConfig]]


@pytest.fixture
def write(tiny_model: MakeModel, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Write:
    """Write a family's checkpoint as GGUF and as safetensors; see `gguf_checkpoint`."""

    def checkpoint(family: str, kind: Type = Type.Q8_0, files: int = 1, **settings: Any) -> Any:
        model = tiny_model(family, **(SETTINGS[family] | settings))
        return gguf_checkpoint(model, tiny_tokenizer, tmp_path / "made", kind, files)

    return checkpoint


@pytest.mark.parametrize("family", [*ARCHITECTURES, *DENSE])
def test_every_architecture_loads_its_numbers(family: str, write: Write) -> None:
    same_numbers(*write(family), dtypes=("float32",))


@pytest.mark.parametrize("kind", [Type.F16, Type.Q4_K])
def test_other_types(kind: Type, write: Write) -> None:
    settings = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2} if kind == Type.Q4_K else {}
    same_numbers(*write("qwen3_moe", kind, **settings), dtypes=("bfloat16",))


def test_a_model_in_several_files(write: Write) -> None:
    packed, plain = write("qwen3_moe", files=3)
    assert len(gguf_parts(Path(packed.path))) == 3
    same_numbers(packed, plain, dtypes=("float32",))
    last = packed.path.replace("00001-of", "00003-of")
    assert model_fingerprint(replace(packed, path=last)) == model_fingerprint(packed)
    Path(last).unlink()
    with pytest.raises(UserError, match=r"00003-of-00003.gguf: no such file; a split model needs all its parts"):
        load_model(packed)


ALONE = {"vocab_size": 260, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 259}


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "llama"])
def test_a_file_alone_is_a_checkpoint(family: str, tiny_model: MakeModel, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(family, **(SETTINGS[family] | ALONE))
    config = lone_gguf(model, tmp_path / "tiny.gguf")
    found, tokenizer = load_model(config)
    original = AutoModelForCausalLM.from_config(model.config).eval()
    original.load_state_dict(found.state_dict())
    ids = torch.arange(60).reshape(3, 20) * 4
    assert torch.equal(found(ids).logits, original(ids).logits)
    assert tokenizer("hello").input_ids == [257, 258] and tokenizer.eos_token_id == 259
    facts = describe_model(config)
    assert (facts.family, facts.experts) == (family, 0 if family in DENSE else 6)
    if family.startswith("qwen"):
        # `transformers` reads tensors of these two architectures, but not the width of an expert.
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="tiny.gguf", config=found.config, dtype="float32"
        ).state_dict()
        state = found.state_dict()
        assert state.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("text", "isn't a valid GGUF file"),
        ("architecture", "its architecture is 'qwen3moe', and its config's model type is 'olmoe'"),
        ("shape", r"tensor \S+ has shape .*, and by the config"),
        ("missing", "tensor blk.0.attn_q_norm.weight, from which .* is made, is missing"),
        ("unknown", "tensor blk.1.extra.weight isn't part of a qwen3_moe model"),
        ("layers", r"model.gguf: its config says 1,000,000,000 layers, and its files have \d+ tensors"),
    ],
)
def test_a_damaged_file_is_named(damage: str, message: str, write: Write, tiny_model: MakeModel) -> None:
    packed, _ = write("qwen3_moe")
    file, model = Path(packed.path), tiny_model("qwen3_moe", **SETTINGS["qwen3_moe"])
    stored = {each.name: (each.data.copy(), each.tensor_type) for each in gguf.GGUFReader(file).tensors}
    match damage:
        case "text":
            file.write_text("version https://git-lfs.github.com/spec/v1\n")
        case "architecture":
            tiny_model("olmoe", **SETTINGS["olmoe"]).config.save_pretrained(file.parent)
        case "shape":
            model.config.moe_intermediate_size = 64
            model.config.save_pretrained(file.parent)
            write_gguf(file, stored, metadata(model.config))
        case "layers":
            (file.parent / "config.json").unlink()
            write_gguf(file, stored, metadata(model.config) | {"qwen3moe.block_count": 10**9})
        case _:
            name = stored.pop("blk.0.attn_q_norm.weight")
            extra = {} if damage == "missing" else {"blk.0.attn_q_norm.weight": name, "blk.1.extra.weight": name}
            write_gguf(file, stored | extra, metadata(model.config))
    with pytest.raises(UserError, match=message):
        load_model(packed)


@pytest.mark.parametrize(
    ("stored", "described", "has"), [("llama", "mixtral", "no experts"), ("mixtral", "llama", "experts")]
)
def test_the_config_of_the_other_model_of_an_architecture_is_named(
    stored: str, described: str, has: str, write: Write, tiny_model: MakeModel
) -> None:
    packed, _ = write(stored)
    tiny_model(described, **SETTINGS[described]).config.save_pretrained(Path(packed.path).parent)
    with pytest.raises(UserError, match=f"it has {has}, and its config's model type is '{described}'; replace the"):
        load_model(packed)


def test_a_folder_is_not_a_file(write: Write) -> None:
    packed, _ = write("qwen3_moe")
    folder = Path(packed.path).parent
    with pytest.raises(UserError, match=r"of a folder of GGUF files give one, for example .*/model.gguf"):
        local_directory(replace(packed, path=str(folder)))
    with pytest.raises(UserError, match=r"none.gguf: no such file"):
        local_directory(replace(packed, path=str(folder / "none.gguf")))


def test_a_missing_library_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = write("qwen3_moe")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, QuickReader.__module__)
    with pytest.raises(UserError, match=r"pip install 'moevolve\[quantised\]'"):
        load_model(packed)


@pytest.mark.parametrize("endianess", gguf.GGUFEndian)
def test_metadata_are_read_as_the_library_does(endianess: gguf.GGUFEndian, tmp_path: Path) -> None:
    file = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(file, "llama", endianess=endianess)
    for key, values in {
        "words": ["a", "", "Größe" * 30],
        "numbers": [1, 2**31 - 1],
        "scores": [0.5],
        "nots": [True],
    }.items():
        writer.add_array(key, values)
    writer.add_string("after", "them")
    writer.add_tensor("one", np.arange(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, library = QuickReader(file), gguf.GGUFReader(file)
    assert ours.fields.keys() == library.fields.keys() and ours.data_offset == library.data_offset
    for name, field in library.fields.items():
        same = ours.fields[name]
        assert (same.offset, same.types, same.contents()) == (field.offset, field.types, field.contents())
        assert b"".join(map(bytes, same.parts)) == b"".join(map(bytes, field.parts))
        assert name != "words" or same.data == field.data


def test_an_array_of_numbers_takes_no_more_memory_than_they_do(tmp_path: Path) -> None:
    file, count = tmp_path / "some.gguf", 100_000
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_array("numbers", [7] * count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tracemalloc.start()
    reader = QuickReader(file)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken < 20 * count and sum(reader.fields["numbers"].contents()) == 7 * count
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    with pytest.raises(ValueError, match="reshape"):
        QuickReader(file)


def test_fingerprints_tell_files_apart(write: Write, tmp_path: Path) -> None:
    packed, _ = write("qwen3_moe")
    file = Path(packed.path)
    found = model_fingerprint(packed)
    (file.parent / "other.gguf").write_bytes(b"another model")
    assert model_fingerprint(packed) == found
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert model_fingerprint(packed) != found
