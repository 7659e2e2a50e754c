"""The JSON files and the tokenizer of a stock export are the source's, in its spelling."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dense_edits import divided
from edit_checks import CARD, Residents, write_source
from families import edit_of_kind
from gguf_checkpoints import SETTINGS, lone_gguf
from published_spelling import spell_as_published

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.model.describe import describe_model

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE")


@pytest.mark.parametrize(
    ("family", "resized"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("gpt_oss", {"num_local_experts": 4}),
        ("deepseek_v3", {"n_routed_experts": 4, "num_nextn_predict_layers": 0}),
    ],
)
def test_fields_are_changed_in_place(
    family: str, resized: dict[str, Any], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint(family), tmp_path / "source")
    more = {"num_nextn_predict_layers": 1} if "num_nextn_predict_layers" in resized else {}
    packing = {"quantization_config": None, "auto_map": {"AutoConfig": "code.Config"}}
    before = spell_as_published(source, rope_theta=1e6, torch_dtype="bfloat16", **more, **packing)
    (source / "generation_config.json").write_text('{"temperature": 0.6}')  # transformers 5 wouldn't write this
    (source / "LICENSE").write_text("as you like")
    for name in ("code.py", "quantize_config.json"):
        (source / name).write_text("{}")
    config = ModelConfig(str(source), device="cpu", dtype="float32")
    facts = describe_model(config)
    edit = edit_of_kind(len(facts.moe_layers), facts.experts, "prune", 4, 1, "logits")
    assert export_model(config, edit, tmp_path / "stock", CARD).form == "stock"
    changed = before | resized | {"num_experts_per_tok": 1}
    after = json.loads((tmp_path / "stock" / "config.json").read_text())
    assert list(after) == [name for name in before if name not in packing]
    assert after == {name: changed[name] for name in after} | {"torch_dtype": "float32"}
    assert "Loads in: transformers, transformers 4.57" in (tmp_path / "stock" / "README.md").read_text()
    files = {file.name for file in (tmp_path / "stock").iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors", *COPIED}
    for name in COPIED:
        assert (tmp_path / "stock" / name).read_bytes() == (source / name).read_bytes()
    write_source(config, edit, tmp_path / "source-form")
    kept = json.loads((tmp_path / "source-form" / "config.json").read_text())
    assert kept == changed and list(kept) == list(before)


def test_a_link_out_of_the_folder_is_not_published(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    cache = tmp_path / "models--owner--name"
    source = shutil.copytree(checkpoint("mixtral"), cache / "snapshots" / "0123")
    (cache / "blobs").mkdir()
    (source / "generation_config.json").rename(cache / "blobs" / "4567")
    (source / "generation_config.json").symlink_to("../../blobs/4567")
    (source / "COPYING").symlink_to("config.json")
    (tmp_path / "NOTICE").write_text("noticed")
    (source / "NOTICE").symlink_to(tmp_path / "NOTICE")
    config, edit = ModelConfig(str(source), device="cpu", dtype="float32"), edit_of_kind(3, 6, "prune", 4, 1, "logits")
    export_model(config, edit, tmp_path / "linked", CARD)
    files = {file.name for file in (tmp_path / "linked").iterdir() if not file.is_symlink()}
    assert {"generation_config.json", "COPYING", "NOTICE"} < files
    (tmp_path / "secret").write_text("secret")
    (source / "additional_chat_templates").mkdir()
    for link in (source / "LICENSE", source / "additional_chat_templates" / "tools.jinja"):
        link.symlink_to(tmp_path / "secret")
        with pytest.raises(UserError, match=f"{link.name} is a link out of the model's folder; put the file itself"):
            export_model(config, edit, tmp_path / "out", CARD)
        link.unlink()
        assert not (tmp_path / "out").exists()


def both_spellings(directory: Path, theta: float) -> None:
    settings = json.loads((directory / "config.json").read_text())
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"] == theta
    assert settings["dtype"] == settings["torch_dtype"] == "float32"
    assert settings["num_experts"] == settings["num_local_experts"] == 6
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast" and "extra_special_tokens" not in tokenizer


def test_a_class_without_a_published_config_has_both_spellings(resident: Residents, tmp_path: Path) -> None:
    export_model(resident("llama"), divided(1, bias=0), tmp_path / "out", CARD)
    both_spellings(tmp_path / "out", 10000.0)


def test_a_gguf_file_alone_has_both_spellings(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    alone = {"vocab_size": 260, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 259}
    model = tiny_model("qwen3_moe", **(SETTINGS["qwen3_moe"] | alone), rope_parameters=rope)
    (tmp_path / "source").mkdir()
    config = lone_gguf(model, tmp_path / "source" / "tiny.gguf")
    export_model(config, edit_of_kind(3, 6, "prune", 6, 2), tmp_path / "out", CARD)
    both_spellings(tmp_path / "out", 1e6)
