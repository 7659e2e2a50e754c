"""GGUF checkpoints: they load the numbers that they hold, and what is wrong with one is named."""

from __future__ import annotations

import math
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
from gguf_checkpoints import (
    ARCHITECTURES,
    DENSE,
    SETTINGS,
    converted,
    gguf_checkpoint,
    lone_gguf,
    metadata,
    quantised,
    vocabulary,
    write_gguf,
)
from packed_checkpoints import same_numbers

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.files import gguf_parts, local_directory
from moevolve.workers.checkpoints.fingerprint import model_fingerprint
from moevolve.workers.checkpoints.formats.gguf_metadata import gguf_config
from moevolve.workers.checkpoints.gguf_reader import QuickReader
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.engine.tokenizing import PromptTokenizer, end_tokens
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


# The tokenizer that transformers takes for qwen2 has none of these words; a file of it alone is loaded below.
@pytest.mark.parametrize("family", [each for each in (*ARCHITECTURES, *DENSE) if each != "qwen2"])
def test_every_architecture_loads_its_numbers(family: str, write: Write) -> None:
    same_numbers(*write(family), dtypes=("float32",))


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "phi3", "qwen3", "starcoder2"])
def test_transformers_reads_the_same_of_dense_models(family: str, write: Write) -> None:
    from transformers import AutoModelForCausalLM

    packed, _ = write(family)
    found, file = load_model(packed)[0], Path(packed.path)
    read = {"gguf_file": file.name, "config": found.config, "dtype": "float32"}
    theirs, ours = AutoModelForCausalLM.from_pretrained(file.parent, **read).state_dict(), found.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


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


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "llama", "qwen2", "qwen3"])
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
        ("missing", "tensor blk.0.attn_q_norm.weight, from which .* is made, is missing; fetch it again"),
        ("fused", "tensor blk.0.ffn_gate_exps.weight, .*, is missing, and it has blk.0.ffn_gate_up_exps.weight, which"),
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
        case "fused":  # as convert_hf_to_gguf.py --fuse-gate-up-exps writes it
            gate, kind = stored.pop("blk.0.ffn_gate_exps.weight")
            both = np.concatenate((gate, stored.pop("blk.0.ffn_up_exps.weight")[0]), axis=1)
            write_gguf(file, stored | {"blk.0.ffn_gate_up_exps.weight": (both, kind)}, metadata(model.config))
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


def alone(file: Path, **keys: Any) -> Path:
    """Write a file whose metadata describe a Qwen3-MoE; its tensors are of no use."""
    usual = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 1,
        "qwen3moe.embedding_length": 64,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.key_length": 16,
        "qwen3moe.expert_count": 4,
        "qwen3moe.expert_used_count": 2,
    }
    tensors = {f"blk.{i}.attn_norm.weight": (np.ones(8, np.float32), Type.F32) for i in range(3)}
    write_gguf(file, tensors, usual | keys)
    return file


def test_an_architecture_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A config.json is asked for only where it helps."""
    for name, advice in (("deepseek2", "isn't supported; use the safetensors"), ("gpt-oss", "put the config.json")):
        with pytest.raises(UserError, match=f"architecture '{name}' .*{advice}"):
            gguf_config(alone(tmp_path / f"{name}.gguf", **{"general.architecture": name}))


NEUTRAL: dict[str, Any] = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.dimension_count": 16,
    "attention.value_length": 16,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "expert_gating_func": 1,
    "attention.causal": True,
    "logit_scale": 1.0,
    "rope.scaling.finetuned": False,
}


def test_metadata_that_change_nothing_pass(tmp_path: Path) -> None:
    keys = {f"qwen3moe.{key}": value for key, value in NEUTRAL.items()} | {"quantize.imatrix.file": "a", "other.x": 3}
    assert gguf_config(alone(tmp_path / "a.gguf", **keys)).num_experts == 4
    predicting = alone(tmp_path / "b.gguf", **{"qwen3moe.block_count": 2, "qwen3moe.nextn_predict_layers": 1})
    assert gguf_config(predicting).num_hidden_layers == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.factor", 4.0),
        ("rope.scale_linear", 2.0),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.attn_factor", 1.5),
        ("rope.dimension_count", 8),
        ("attention.causal", False),
        ("expert_weights_norm", False),
        ("expert_weights_scale", 2.5),
        ("expert_gating_func", 2),
        ("logit_scale", 0.5),
        ("attention.sliding_window", 8),
        ("attention.clamp_kqv", 8.0),
        ("attention.head_count", [4]),
        ("unheard_of", 3),
    ],
)
def test_metadata_that_are_not_applied_stop(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"its metadata (have qwen3moe\.)?{key}"):
        gguf_config(alone(tmp_path / "a.gguf", **{f"qwen3moe.{key}": value}))


def test_every_key_that_the_library_knows_is_applied_or_stops(tmp_path: Path) -> None:
    """Whatever a key is set to, the config differs, or the file is refused by the key's name; some keys are notes."""
    notes = {"vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.finetuned", "expert_shared_count"}
    kinds = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
    known = {each for kind in kinds for each in vars(kind).values() if isinstance(each, str) and "{arch}." in each}
    before = gguf_config(alone(tmp_path / "a.gguf")).to_dict()
    passed = set()
    for key in sorted(each.removeprefix("{arch}.") for each in known if each.count("{") == 1):
        value = "odd" if key in ("rope.scaling.type", "tensor_data_layout") else 0.25 if "epsilon" in key else 3
        try:
            found = gguf_config(alone(tmp_path / "a.gguf", **{f"qwen3moe.{key}": value})).to_dict()
        except UserError as error:
            passed |= set() if key in str(error) else {str(error)}
        else:
            passed |= {key} if found == before else set()
    assert passed <= notes


FACTORS = [1.0, 1.293976, 7.667385, 8.0, 8.0, 8.0, 8.0, 8.0]
"""Of Llama 3's scaling by 8, an original context of 64 and a base of 10,000, for heads of 16 numbers."""


@pytest.mark.parametrize("beside", [False, True])
def test_factors_of_rotary_frequencies_are_applied(beside: bool, tiny_model: MakeModel, tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    scaled = {"rope_parameters": rope | {"original_max_position_embeddings": 64}}
    model = tiny_model("llama", **(SETTINGS["llama"] | ALONE | sizes | scaled))
    stored = quantised(converted(model.state_dict(), model.config), Type.F32)
    file, keys = tmp_path / "a.gguf", metadata(model.config) | vocabulary()
    if beside:
        model.config.save_pretrained(tmp_path)

    def write_with(factors: list[float]) -> ModelConfig:
        more = {"rope_freqs.weight": (np.array(factors, np.float32), Type.F32)}
        write_gguf(file, stored | more, keys)
        return ModelConfig(str(file), device="cpu", dtype="float32")

    found, _ = load_model(write_with(FACTORS))
    ids = torch.arange(100)[None]
    assert torch.allclose(found(ids).logits, model(ids).logits, atol=1e-4)
    with pytest.raises(UserError, match=r"rope_freqs.weight"):
        load_model(write_with([1.0, 2.0, *FACTORS[2:]]))


def test_factors_of_long_texts_must_be_those_of_the_config(tiny_model: MakeModel, tmp_path: Path) -> None:
    own = {"short": [1.0, 1.5, 2.0, 2.0, 3.0, 3.0], "long": [1.0, 2.0, 4.0, 4.0, 5.0, 6.0]}
    rope = {f"{name}_factor": each for name, each in own.items()}
    rope |= {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    sizes = {"original_max_position_embeddings": 32, "max_position_embeddings": 128}
    model = tiny_model("phi3", **(SETTINGS["phi3"] | ALONE | sizes | {"rope_parameters": rope}))
    model.config.save_pretrained(tmp_path)
    stored = quantised(converted(model.state_dict(), model.config), Type.F32)
    keys = metadata(model.config) | vocabulary() | {"phi3.rope.scaling.attn_factor": (1 + math.log(4, 32)) ** 0.5}

    def load(factors: dict[str, list[float]], **more: Any) -> PreTrainedModel:
        found = {f"rope_factors_{name}.weight": (np.float32(each), Type.F32) for name, each in factors.items()}
        write_gguf(tmp_path / "a.gguf", stored | found, keys | {f"phi3.{key}": each for key, each in more.items()})
        return load_model(ModelConfig(str(tmp_path / "a.gguf"), device="cpu", dtype="float32"))[0]

    found, ids = load(own), torch.arange(100)[None]
    assert torch.equal(found(ids).logits, model(ids).logits)
    with pytest.raises(UserError, match=r"rotary frequencies, rope_factors_long.weight"):
        load(own | {"long": [1.0] * 6})
    with pytest.raises(UserError, match=r"rope.scaling.attn_factor: 1.0"):
        load(own, **{"rope.scaling.attn_factor": 1.0})


def test_a_file_says_how_texts_begin_and_answers_end(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = tiny_model("llama", **(SETTINGS["llama"] | ALONE))
    stored = quantised(converted(model.state_dict(), model.config), Type.F32)
    keys = metadata(model.config) | vocabulary() | {"tokenizer.ggml.bos_token_id": 258}
    file = tmp_path / "a.gguf"

    def load(**more: Any) -> tuple[Any, Any]:
        write_gguf(file, stored, keys | {f"tokenizer.{key}": value for key, value in more.items()})
        return load_model(ModelConfig(str(file), device="cpu", dtype="float32"))

    ends = {"ggml.eot_token_id": 255, "ggml.eom_token_id": 254}
    # llama.cpp has defaults by the way in which texts are divided.
    begins: list[tuple[bool, dict[str, Any]]] = [(adds, {"ggml.add_bos_token": adds}) for adds in (True, False)]
    for adds, said in [*begins, (True, {"ggml.pre": "llama-bpe"}), (False, {"ggml.pre": "qwen2"})]:
        found, tokenizer = load(**said, **ends)
        prompts = PromptTokenizer.of(found, tokenizer, EngineConfig())
        assert prompts.text("hello") == ((258, 257, 258) if adds else (257, 258))
        assert end_tokens(found, tokenizer, EngineConfig()) == {254, 255, 259}
    # SmolLM2's published files, whose digits are pieces of their own.
    for pre, pieces in {"gpt-2": ["a", "\u01201984"], "smollm": ["a", "\u0120", "1", "9", "8", "4"]}.items():
        steps = load(**{"ggml.pre": pre})[1].backend_tokenizer.pre_tokenizer
        assert [piece for piece, _ in steps.pre_tokenize_str("a 1984")] == pieces
    _, tokenizer = load(**{"chat_template": "a", "chat_templates": ["tool_use"], "chat_template.tool_use": "b"})
    assert tokenizer.chat_template == {"default": "a", "tool_use": "b"}
    for key, value in {"ggml.pre": "deepseek-llm", "ggml.add_space_prefix": True, "ggml.unheard": 3}.items():
        with pytest.raises(UserError, match=f"its tokenizer has {key}: "):
            load(**{key: value})


def test_a_head_beside_a_tied_embedding_is_named(write: Write) -> None:
    packed, _ = write("qwen3_moe")
    file = Path(packed.path).parent / "config.json"
    file.write_text(file.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(UserError, match=r"it has tensor output\.weight, and by its config the output projection"):
        load_model(packed)
