"""A plain checkpoint as a GGUF file: llama.cpp's names and orders, numbers of 8 bits, and the same tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest
import torch
from edit_checks import assert_close
from gguf_checkpoints import ARCHITECTURES, DENSE, SETTINGS, converted, reverted
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.loading import load_model
from moevolve.workers.contract.card import ExportError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export import quantise_gguf as module
from moevolve.workers.export.gguf_tokenizer import gguf_vocabulary
from moevolve.workers.export.quantise import quantise
from moevolve.workers.export.quantise_gguf import check_gguf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT = Path(__file__).parents[3] / "configs" / "demo" / "text"
KIND = "gguf-q8_0"
WRITTEN = [*(family for family in ARCHITECTURES if family != "gpt_oss"), *DENSE]
SENTENCE = "def f(x):\n    return x + 12  # the sum</s>"


@pytest.fixture
def source(tiny_model: Callable[..., PreTrainedModel], tmp_path: Path) -> Callable[..., Path]:
    """Write a family's tiny checkpoint with a tokenizer of bytes, whose vocabulary is a little smaller."""

    def make(family: str, **settings: Any) -> Path:
        ends = {"vocab_size": 2050, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
        model = tiny_model(family, **(SETTINGS[family] | ends | settings))
        model.save_pretrained(tmp_path / "small")
        for file in TEXT.glob("tokenizer*"):
            shutil.copy(file, tmp_path / "small")
        return tmp_path / "small"

    return make


def alone(folder: Path) -> ModelConfig:
    """The file without the config and the tokenizer beside it."""
    (folder / "alone").mkdir()
    return ModelConfig(str(shutil.move(folder / "model.gguf", folder / "alone")), device="cpu", dtype="float32")


@pytest.mark.parametrize("family", WRITTEN)
def test_every_family_is_written_as_llama_cpp_reads_it(
    family: str, source: Callable[..., Path], tmp_path: Path
) -> None:
    found = quantise(source(family), tmp_path / "out", KIND)
    small, _ = load_model(ModelConfig(str(tmp_path / "small"), device="cpu", dtype="float32"))
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    state = load_file(tmp_path / "small" / "model.safetensors")
    expected, numbers = converted(state, small.config), {}
    for tensor in reader.tensors:
        name, exact = tensor.name, expected.pop(tensor.name).float()
        numbers[name] = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        is_plain = exact.ndim == 1 or "ffn_gate_inp" in name
        assert tensor.tensor_type.name == ("F32" if is_plain else "Q8_0"), name
        assert (numbers[name] - exact).norm() <= found.difference * exact.norm(), name
    assert not expected and 0 < found.difference < 0.01 and 0 < found.matrices < len(numbers)
    read, tokenizer = load_model(alone(tmp_path / "out"))
    ids = torch.arange(60).reshape(3, 20) * 30
    exact = small(ids).logits
    difference = (read(ids).logits - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert difference.median() < 0.1, "rounding can send a token to another expert"
    save_file(reverted(numbers, state, small.config), tmp_path / "small" / "model.safetensors", {"format": "pt"})
    rounded, _ = load_model(ModelConfig(str(tmp_path / "small"), device="cpu", dtype="float32"))
    assert_close(read(ids).logits, rounded(ids).logits, 1e-5)
    check_tokens(tokenizer, tmp_path / "small")


def check_tokens(tokenizer: Any, folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize(SENTENCE) == theirs.tokenize(SENTENCE)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_transformers_reads_the_same_file(family: str, source: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    quantise(source(family), tmp_path / "out", KIND)
    ours, _ = load_model(ModelConfig(str(tmp_path / "out" / "model.gguf"), device="cpu", dtype="float32"))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", config=ours.config, dtype="float32"
    ).eval()
    ids = torch.arange(60).reshape(3, 20) * 30
    with torch.no_grad():
        assert_close(theirs(ids).logits, ours(ids).logits, 1e-5)


def test_the_card_says_what_was_done_and_a_template_goes_along(source: Callable[..., Path], tmp_path: Path) -> None:
    folder = source("qwen3_moe", moe_intermediate_size=48)
    (folder / "README.md").write_text("# small\n")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    quantise(folder, tmp_path / "out", KIND)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("# small\n\n## Quantised\n") and "GGUF" in card
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    kinds = {each.name: each.tensor_type.name for each in reader.tensors}
    assert (kinds["blk.0.ffn_down_exps.weight"], kinds["blk.0.ffn_up_exps.weight"]) == ("F16", "Q8_0")
    told = {key: reader.fields[key].contents() for key in ("tokenizer.chat_template", "tokenizer.ggml.pre")}
    assert told == {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.pre": "gpt-2"}
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    assert types[:2] == [3, 3] and types[-2:] == [5, 5] and set(types[2:-2]) == {1}
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_wrong_order_is_found(source: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "as_stored", lambda name, values, settings: values.squeeze(0))
    with pytest.raises(ExportError, match=r"[qk]_proj.weight, read back, differs by"):
        quantise(source("mixtral"), tmp_path / "out", KIND)
    assert (tmp_path / "out.unverified").is_dir()


def test_what_gguf_has_no_place_for_is_named(source: Callable[..., Path], tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    for settings, message in (
        ({"rope_parameters": rope}, "rope_parameters {"),
        ({"norm_topk_prob": False}, "norm_topk_prob False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ):
        with pytest.raises(UserError, match=f"don't tell {message}"):
            check_gguf(ModelConfig(str(source("qwen3_moe", **settings))))
    folder = source("qwen3_moe")
    check_gguf(ModelConfig(str(folder)))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="GGUF has no name for a BPE tokenizer that divides texts like this one"):
        check_gguf(ModelConfig(str(folder)))
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma"}))
    with pytest.raises(UserError, match="GGUF is written of mixtral, olmoe, qwen2_moe, qwen3_moe, llama, not of gemma"):
        check_gguf(ModelConfig(str(folder)))


def test_merges_of_characters_become_scores(tmp_path: Path) -> None:
    """As of Llama 2 and Mixtral: SentencePiece's vocabulary, in which llama.cpp merges what scores highest."""
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("▁", "hello")]
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helo", *map("".join, merges)]
    bpe = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    content = json.loads(Tokenizer(bpe).to_str())
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]}
    content["added_tokens"] = [{"id": 1, "content": "<s>", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = gguf_vocabulary(tmp_path / "tokenizer.json", len(pieces) + 1)
    assert (found.model, found.divided, found.begins) == ("llama", "default", True)
    assert [*found.tokens] == [*pieces, f"[PAD{len(pieces)}]"]
    assert found.types[:3] == [2, 3, 6] and found.types[258:] == [1] * 10 + [5]
    assert list(found.scores[-6:]) == [-0.0, -1.0, -2.0, -3.0, -4.0, 0.0]
