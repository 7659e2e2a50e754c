"""Exports of GGUF checkpoints: copied bytes, in a file that llama.cpp and `transformers` can load."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
import torch
from edit_checks import assert_close, logits, write_source
from families import edit_of_kind
from gguf import GGMLQuantizationType as Type
from gguf_checkpoints import ARCHITECTURES, SETTINGS, gguf_checkpoint, lone_gguf, metadata, vocabulary, write_gguf
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints import headers
from moevolve.workers.checkpoints.files import gguf_parts
from moevolve.workers.checkpoints.formats.gguf import stored_gguf
from moevolve.workers.checkpoints.formats.gguf_metadata import open_parts
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.checkpoints.pruning import KeptTensor
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.gguf import write_gguf as copy_gguf
from moevolve.workers.export.sizes import file_sizes
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Checkpoints = Callable[..., ModelConfig]

LAYERS, EXPERTS = 3, 6


@pytest.fixture
def write(
    tiny_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Checkpoints:
    """Write a family's checkpoint as GGUF; see `gguf_checkpoint`."""

    def checkpoint(family: str = "qwen3_moe", kind: Type = Type.Q8_0, files: int = 1) -> ModelConfig:
        model = tiny_model(family, **SETTINGS[family])
        return gguf_checkpoint(model, tiny_tokenizer, tmp_path / "made", kind, files)[0]

    return checkpoint


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.gguf"))


def exported(config: ModelConfig, directory: Path) -> ModelConfig:
    return replace(config, path=str(directory / Path(config.path).name))


@pytest.mark.parametrize("files", [1, 3])
def test_keeping_all_experts_gives_equal_files(files: int, write: Checkpoints, tmp_path: Path) -> None:
    config = write(files=files)
    report = write_source(config, IdentityEdit(), tmp_path / "out")
    sources = gguf_parts(Path(config.path))
    assert len(sources) == files
    for source in sources:
        assert (tmp_path / "out" / source.name).read_bytes() == source.read_bytes()
    assert report.copied == sum(len(gguf.GGUFReader(source).tensors) for source in sources)
    assert (tmp_path / "out" / "tokenizer.json").exists() and (tmp_path / "out" / "config.json").exists()


def test_a_vocabulary_is_copied(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", **(SETTINGS["qwen3_moe"] | {"vocab_size": 260}))
    (tmp_path / "made").mkdir()
    config = lone_gguf(model, tmp_path / "made" / "tiny.gguf")
    write_source(config, IdentityEdit(), tmp_path / "all")
    assert (tmp_path / "all" / "tiny.gguf").read_bytes() == Path(config.path).read_bytes()
    write_source(config, edit_of_kind(LAYERS, EXPERTS, "prune", 4, 2), tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["README.md", "tiny.gguf"]
    before, after = (gguf.GGUFReader(at) for at in (config.path, tmp_path / "out" / "tiny.gguf"))
    found = {
        key: field.contents()
        for key, field in after.fields.items()
        if not key.startswith("GGUF.") and field.contents() != before.fields[key].contents()
    }
    assert found == {"qwen3moe.expert_count": 4} and before.fields.keys() == after.fields.keys()
    assert load_model(exported(config, tmp_path / "out"))[1]("hello").input_ids == [257, 258]
    assert after.get_field("tokenizer.ggml.tokens").contents() == vocabulary()["tokenizer.ggml.tokens"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "kind", "files"),
    [*((family, Type.Q8_0, 1) for family in ARCHITECTURES if family != "qwen3_moe"), ("qwen3_moe", Type.Q4_0, 2)],
)
def test_a_pruned_file_computes_what_the_search_measured(
    family: str, kind: Type, files: int, write: Checkpoints, tokens: Tensor, tmp_path: Path
) -> None:
    config = write(family, kind, files)
    resident = ResidentModel.load(config)
    # Rows of routers in another order than in the source, and experts in a third one.
    edit = edit_of_kind(LAYERS, EXPERTS, "crossed", 4, 1, "logits")
    expected = logits(resident, edit, tokens)
    report = write_source(config, edit, tmp_path / "out")
    found = ResidentModel.load(exported(config, tmp_path / "out"))
    assert_close(logits(found, None, tokens), expected, 1e-5)
    assert (report.experts, report.active) == (4, 1)
    assert report.parameters == sum(each.numel() for each in found.model.parameters())
    size, predicted = weight_bytes(tmp_path / "out"), file_sizes(config, "source").total(4)
    assert size <= predicted <= size + 64 * len(gguf.GGUFReader(config.path).tensors) * files
    assert f"in GGUF ({', '.join(sorted({kind.name, 'F32'}))})" in (report.directory / "README.md").read_text()
    if files == 1:
        check_for_llama_cpp(tmp_path / "out" / "model.gguf", resident.model.config.hidden_size, config)


def check_for_llama_cpp(file: Path, hidden: int, config: ModelConfig) -> None:
    """Its shapes are reversed: `ffn_up_exps` is {hidden, width, experts}, `ffn_gate_inp` is {hidden, experts}."""
    reader, width = gguf.GGUFReader(file), describe_model(config).expert_neurons
    keys = {key.split(".")[-1]: each.contents() for key, each in reader.fields.items()}
    assert (keys["expert_count"], keys["expert_used_count"]) == (4, 1)
    shapes = {each.name: tuple(int(side) for side in each.shape) for each in reader.tensors}
    for block in range(LAYERS):
        assert shapes[f"blk.{block}.ffn_gate_inp.weight"] == (hidden, 4)
        for part, sides in (("gate", (hidden, width)), ("up", (hidden, width)), ("down", (width, hidden))):
            assert shapes[f"blk.{block}.ffn_{part}_exps.weight"] == (*sides, 4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_llama_cpp_computes_the_same(
    family: str, tiny_model: Callable[..., PreTrainedModel], tokens: Tensor, tmp_path: Path
) -> None:
    reason = "needs llama.cpp: pip install llama-cpp-python, which compiles it"
    llama_cpp = pytest.importorskip("llama_cpp", reason=reason)
    # What llama.cpp takes for granted, since the published models have it; and a rotary embedding that needs no keys.
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    granted = {"olmoe": {"num_key_value_heads": 4}, "gpt_oss": {"swiglu_limit": 7.0, "rope_parameters": rope}}
    vocab_size = len(vocabulary()["tokenizer.ggml.tokens"])
    model = tiny_model(family, **SETTINGS[family] | granted.get(family, {}) | {"vocab_size": vocab_size})
    if family == "gpt_oss":
        model.config.save_pretrained(tmp_path)
    config = lone_gguf(model, tmp_path / "model.gguf", Type.F32)
    edit = edit_of_kind(LAYERS, EXPERTS, "crossed", 4, 1, "logits")
    resident = ResidentModel.load(config)
    write_source(config, edit, tmp_path / "out")
    for file, change in {config.path: None, exported(config, tmp_path / "out").path: edit}.items():
        loaded = llama_cpp.Llama(file, n_ctx=64, logits_all=True, verbose=False)
        loaded.eval(tokens[0].tolist())
        found = torch.tensor(loaded.scores[: tokens.shape[1]])
        assert_close(found, logits(resident, change, tokens)[0], 1e-2)  # its KV cache is in half precision


def test_a_tensor_is_copied_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.arange(1 << 21, dtype=np.float32).reshape(4, -1)
    write_gguf(tmp_path / "whole.gguf", {"experts": (numbers, Type.F32)}, {"general.architecture": "qwen3moe"})
    (stored,) = stored_gguf(open_parts(tmp_path / "whole.gguf")).values()
    monkeypatch.setattr(headers, "_CHUNK", 1 << 16)
    (tmp_path / "part").mkdir()
    tracemalloc.start()
    checksums = copy_gguf(tmp_path / "whole.gguf", tmp_path / "part", [KeptTensor("experts", stored, (3, 1))], {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (copied,) = gguf.GGUFReader(tmp_path / "part" / "whole.gguf").tensors
    assert np.array_equal(copied.data, numbers[[3, 1]])
    assert checksums == {"experts": zlib.crc32(numbers[[3, 1]].tobytes())}
    assert peak < numbers.nbytes / 8


def test_transformers_alone_loads_it(write: Checkpoints, tokens: Tensor, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = write("qwen3_moe")
    edit = edit_of_kind(LAYERS, EXPERTS, "prune", 4, 2, "logits")
    write_source(config, edit, tmp_path / "out")
    settings = load_model(exported(config, tmp_path / "out"))[0].config
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", config=settings, dtype="float32"
    ).eval()
    assert model.config.num_experts == 4
    with torch.no_grad():
        assert_close(model(tokens).logits, logits(ResidentModel.load(config), edit, tokens), 1e-5)


def with_mtp(config: ModelConfig, settings: Any) -> ModelConfig:
    """Add a layer for multi-token prediction, as GLM-4.5's files have it: counted as a block of the model."""
    file = Path(config.path)
    stored = {each.name: (each.data.copy(), each.tensor_type) for each in gguf.GGUFReader(file).tensors}
    later = {name.replace("blk.2.", "blk.3."): each for name, each in stored.items() if name.startswith("blk.2.")}
    keys = metadata(settings) | {"qwen3moe.block_count": 4, "qwen3moe.nextn_predict_layers": 1}
    write_gguf(file, stored | later | {"blk.3.nextn.eh_proj.weight": stored["blk.2.attn_q.weight"]}, keys)
    return config


@pytest.mark.parametrize(("mtp", "blocks"), [("drop", 3), ("prune", 4)])
def test_layers_for_multi_token_prediction(
    mtp: Any, blocks: int, write: Checkpoints, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    config = with_mtp(write(), tiny_model("qwen3_moe", **SETTINGS["qwen3_moe"]).config)
    edit = edit_of_kind(LAYERS, EXPERTS, "prune", 4, 2)
    write_source(config, edit, tmp_path / "out", mtp=mtp)
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    assert reader.fields["qwen3moe.block_count"].contents() == blocks
    assert reader.fields["qwen3moe.nextn_predict_layers"].contents() == blocks - 3
    shapes = {each.name: each.data.shape for each in reader.tensors if each.name.startswith("blk.3.")}
    assert len(shapes) == (13 if mtp == "prune" else 0)
    assert mtp == "drop" or shapes["blk.3.ffn_up_exps.weight"][0] == shapes["blk.3.ffn_gate_inp.weight"][0] == 4
    ResidentModel.load(exported(config, tmp_path / "out"))
    with pytest.raises(UserError, match="--mtp keep: a GGUF file has one number of experts"):
        write_source(config, edit, tmp_path / "keep", mtp="keep")
