"""Loading, layout, facts and fingerprints of checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.loading import load_config, load_model, load_tokenizer, own_dtype
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.layers import check_router, find_moe_layers
from moevolve.workers.model.describe import describe_model
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.profiling.outline import outline_model

Checkpoints = Callable[[str], Path]
Configs = Callable[..., ModelConfig]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "hunyuan_v1_moe", "qwen3_next", "gpt_oss"])
def test_loads_for_inference(family: str, model_config: Configs, tokens: Tensor) -> None:
    config = model_config(family, dtype="bfloat16")
    model, tokenizer = load_model(config)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    # Some families keep parameters of their linear attention or their routers in float32.
    exempt = ("conv", "mlp.gate.wg", *(model._keep_in_fp32_modules_strict or ()))
    parameters = {name: each for name, each in model.named_parameters() if each.ndim > 1}
    matrices = {name: each for name, each in parameters.items() if not any(part in name for part in exempt)}
    assert {parameter.dtype for parameter in matrices.values()} == {torch.bfloat16}
    assert tokenizer("the quick brown fox")["input_ids"]


def test_describing_reads_headers_and_the_beginnings_of_tensors(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][-1] = torch.nan
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = ModelConfig(str(directory))
    assert describe_model(config).experts == 6
    with pytest.raises(UserError, match=r"embed_tokens.weight has 32 of 3104 numbers that aren't finite"):
        load_model(config)
    tensors["model.embed_tokens.weight"][0, 3] = torch.inf
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model.safetensors: tensor model.embed_tokens.weight has 1 of 1024 numbers"):
        describe_model(config)
    tensors["model.embed_tokens.weight"] = torch.full((97, 32), 1e5)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    load_model(config)
    with pytest.raises(UserError, match=r"embed_tokens.weight has numbers beyond 65504, .* set model.dtype to bf"):
        load_model(replace(config, dtype="float16"))


# Classes of `transformers` that put their own steps in place of those of tokenizer.json.
OWN_STEPS = ("GPT2Tokenizer", "GPTNeoXTokenizerFast", "LlamaTokenizerFast")


@pytest.mark.parametrize("kind", OWN_STEPS)
def test_texts_are_divided_as_the_file_says(kind: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """SmolLM2 and Granite say GPT-2's class, and that every digit is a token; DeepSeek says Llama's, and bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model", ignore=shutil.ignore_patterns("*token*"))
    order = ["</s>", "1", "2", "12", "a", "Ġ", "Ġa", "aa", "-"]
    merges = [("1", "2"), ("a", "a"), ("Ġ", "a")]
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(order)}, merges=merges))
    digits, whole = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=False)
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([digits, whole]), decoders.ByteLevel()
    inner.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": kind, "eos_token": "</s>", "unk_token": "</s>", "bos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    tokenizer = load_tokenizer(ModelConfig(str(folder)))
    text, tokens = "aa 12-a a", ["aa", "Ġ", "1", "2", "-", "a", "Ġa"]
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == [order.index(token) for token in tokens]
    assert tokenizer.decode([order.index(token) for token in tokens]) == text


def test_blanks_are_those_of_the_file(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Llama 2's puts a blank before each part of a text, also before a blank; its class, before a first word only."""
    from tokenizers import AddedToken, Tokenizer, models

    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model", ignore=shutil.ignore_patterns("*token*"))
    inner = Tokenizer(models.BPE(vocab={"</s>": 0, "<unk>": 1, "▁": 2, "a": 3, "▁a": 4}, merges=[("▁", "a")]))
    inner.add_tokens([AddedToken("<turn>", normalized=False)])
    blanks = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    stored = json.loads(inner.to_str()) | {"normalizer": {"type": "Sequence", "normalizers": blanks}}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    tokenizer = load_tokenizer(ModelConfig(str(folder)))
    for text, tokens in {"a": [4], " a": [2, 4], "a<turn>a": [4, 5, 4]}.items():
        assert inner.encode(text).ids == tokenizer(text, add_special_tokens=False)["input_ids"] == tokens, text


@pytest.mark.parametrize("in_file", [False, True])
def test_texts_begin_as_the_settings_say(in_file: bool, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """DeepSeek's tokenizer_config.json asks for Llama's class and a BOS; its tokenizer.json adds none."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    folder = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model", ignore=shutil.ignore_patterns("*token*"))
    inner = Tokenizer(models.BPE(vocab={"</s>": 0, "<s>": 1, "a": 2}, merges=[]))
    inner.add_special_tokens(["</s>", "<s>"])
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    begun = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.post_processor = begun if in_file else processors.ByteLevel(trim_offsets=False)
    inner.save(str(folder / "tokenizer.json"))
    stored = [1] * in_file
    for kind, adds, first in (
        ("LlamaTokenizerFast", True, [1]),
        ("LlamaTokenizerFast", False, []),
        ("LlamaTokenizerFast", None, stored),
        ("PreTrainedTokenizerFast", not in_file, stored),  # tokenizer.json alone says it for other classes
    ):
        said = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(said | {"add_bos_token": adds}))
        tokenizer = load_tokenizer(ModelConfig(str(folder)))
        assert tokenizer("aa")["input_ids"] == [*first, 2, 2]
        assert tokenizer("aa", add_special_tokens=False)["input_ids"] == [2, 2]


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    for path in (str(tmp_path / "nowhere"), "./nowhere", "a/b/c"):
        with pytest.raises(UserError, match="no such directory"):
            describe_model(ModelConfig(path))
        with pytest.raises(UserError, match="no such directory"):
            ResidentModel.load(ModelConfig(path))


def test_pickled_weights_are_never_loaded(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("mixtral"), tmp_path / "pickled")
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights are never loaded"):
        ResidentModel.load(ModelConfig(str(directory)))
    with pytest.raises(UserError, match="pickled weights are never loaded"):
        describe_model(ModelConfig(str(directory)))


def test_remote_code_needs_consent(checkpoint: Checkpoints, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint("mixtral"), tmp_path / "remote")
    settings = json.loads((directory / "config.json").read_text())
    settings |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="config can't be read"):
        describe_model(ModelConfig(str(directory)))


def test_a_config_with_a_wrong_value_is_named(model_config: Configs, tmp_path: Path) -> None:
    settings = json.loads((Path(model_config("mixtral").path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"hidden_size": "wide"}))
    with pytest.raises(UserError, match=r"its config can't be read: .*hidden_size.*'wide'"):
        load_config(ModelConfig(str(tmp_path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(model_config: Configs) -> None:
    with pytest.raises(UserError, match="no CUDA device"):
        ResidentModel.load(replace(model_config("mixtral"), device="cuda"))


def test_importing_the_facts_is_cheap() -> None:
    code = (
        "import moevolve.workers.contract.facts, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float32", "quantization_config": {"quant_method": "mxfp4"}}, "bfloat16"),
    ],
)
def test_auto_is_the_checkpoints_own_dtype(
    changes: dict[str, object], expected: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    settings = {key: value for key, value in (json.loads(file.read_text()) | changes).items() if value is not None}
    file.write_text(json.dumps(settings))
    config = ModelConfig(str(tmp_path / "model"), device="cpu")
    assert own_dtype(config) == describe_model(config).dtype == outline_model(config).facts.dtype == expected
    assert own_dtype(replace(config, dtype="float32")) is None
    assert describe_model(replace(config, dtype="float32")).dtype_bytes == 4
    if "quantization_config" not in changes:
        assert {parameter.dtype for parameter in load_model(config)[0].parameters()} == {getattr(torch, expected)}


def test_a_checkpoint_that_says_no_dtype_asks_for_one(checkpoint: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    settings = json.loads(file.read_text())
    config = ModelConfig(str(tmp_path / "model"), device="cpu")
    for said, message in ((None, "says no dtype"), ("float64", "says dtype float64")):
        file.write_text(json.dumps({**settings, "dtype": said}))
        for attempt in (describe_model, load_model):
            with pytest.raises(UserError, match=rf"{message}; set model\.dtype to one of float32, bfloat16, float16"):
                attempt(config)
    assert describe_model(replace(config, dtype="float16")).dtype == "float16"


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_routers_that_answer_otherwise_are_refused(
    family: str, model_config: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V3's routers returned only logits in transformers 5.8."""
    model, tokenizer = load_model(model_config(family))
    layer = find_moe_layers(model, family)[0]
    check_router(layer, family)
    kind = type(layer.router)
    whole = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden: whole(self, hidden)[0])
    with pytest.raises(UserError, match=r"router of layer \d gives a Tensor, .*`pip check`"):
        ResidentModel(model, tokenizer, model_config(family))
