"""The fingerprint of a checkpoint covers every file that can change a score, and nothing else."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints import fingerprint
from moevolve.workers.checkpoints.fingerprint import model_fingerprint, pinned_revision
from moevolve.workers.contract.settings import ModelConfig

Checkpoints = Callable[[str], Path]


@pytest.fixture
def folder(checkpoint: Checkpoints, tmp_path: Path) -> Path:
    """A new checkpoint for each test."""
    return shutil.copytree(checkpoint("mixtral"), tmp_path / "model")


def of(folder: Path) -> str:
    return model_fingerprint(ModelConfig(str(folder)))


def change(file: Path, **settings: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | settings))


def change_a_weight(at: Path) -> None:
    weights = load_file(at / "model.safetensors")
    weights["model.norm.weight"][-1] += 1
    save_file(weights, at / "model.safetensors", metadata={"format": "pt"})


EDITS: dict[str, Callable[[Path], None]] = {
    "a weight": change_a_weight,
    "architecture": lambda at: change(at / "config.json", num_experts_per_tok=1),
    "end token": lambda at: change(at / "generation_config.json", eos_token_id=[2, 5]),
    "no generation config": lambda at: (at / "generation_config.json").unlink(),
    "normaliser": lambda at: change(at / "tokenizer.json", normalizer={"type": "Lowercase"}),
    "beginning token": lambda at: change(at / "tokenizer_config.json", bos_token="<unk>"),
    "chat template, a field": lambda at: change(at / "tokenizer_config.json", chat_template="{{ messages }}"),
    "chat template, a file": lambda at: (at / "chat_template.jinja").write_text("{{ messages }}"),
    "chat template, JSON": lambda at: change(at / "chat_template.json", chat_template="{{ messages }}"),
    "special tokens": lambda at: change(at / "special_tokens_map.json", eos_token="<unk>"),
    "added tokens": lambda at: change(at / "added_tokens.json", new=97),
    "which file has which weights": lambda at: change(
        at / "model.safetensors.index.json", weight_map={"a": "model.safetensors"}
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_whatever_can_change_a_score_changes_it(folder: Path, edit: str) -> None:
    before = of(folder)
    EDITS[edit](folder)
    assert of(folder) != before


def test_large_files_are_hashed_whole_and_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    whole = fingerprint._sha256
    monkeypatch.setattr(fingerprint, "_sha256", lambda file: hashed.append(file.name) or whole(file))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "_CACHED_SIZE", 0)
    before, file = of(folder), folder / "model.safetensors"
    assert of(folder) == before and hashed == ["model.safetensors"]
    state, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # as some tools restore it
    assert of(folder) != before and len(hashed) == 2
    (kept,) = (tmp_path / "cache" / "moevolve").iterdir()
    kept.write_text("[")  # an entry that can't be read is made anew
    after = of(folder)
    assert after != before and len(hashed) == 3 and of(folder) == after and len(hashed) == 3


def test_what_a_file_says_counts_not_how_it_is_written(folder: Path) -> None:
    change(folder / "model.safetensors.index.json", weight_map={"a": "model.safetensors"}, metadata={"total_size": 1})
    before = of(folder)
    volatile = {
        "config.json": {"transformers_version": "99.0", "_name_or_path": "elsewhere"},
        "generation_config.json": {"transformers_version": "99.0", "_from_model_config": False},
        "tokenizer_config.json": {"name_or_path": "elsewhere", "is_local": False, "special_tokens_map_file": "/a/b"},
        "model.safetensors.index.json": {"metadata": {"total_size": 1, "total_parameters": 2}},
        "tokenizer.json": {},
    }
    for name, fields in volatile.items():
        content = json.loads((folder / name).read_text()) | fields
        turned = dict(reversed(content.items()))
        (folder / name).write_text(json.dumps(turned, indent=7))
    assert of(folder) == before


def test_transformers_may_save_it_again(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert of(tmp_path / "again") == of(folder)


def test_files_that_nothing_reads_do_not_count(folder: Path) -> None:
    before = of(folder)
    for name in ("README.md", ".gitattributes", "LICENSE", "pytorch_model.bin", "training_args.json", "modeling.py"):
        (folder / name).write_text("anything")
    assert of(folder) == before


@pytest.mark.parametrize("naming", ["config.json", "tokenizer_config.json"])
def test_code_counts_where_a_config_names_it(folder: Path, naming: str) -> None:
    change(folder / naming, auto_map={"AutoTokenizer": ["code.Tokenizer", None]})
    (folder / "code.py").write_text("import helpers")
    before = of(folder)
    (folder / "helpers.py").write_text("")
    after = of(folder)
    (folder / "helpers.py").write_text("1")
    assert len({before, after, of(folder)}) == 3


def test_a_broken_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json: not valid JSON"):
        of(folder)


def vocabulary_files() -> set[str]:
    """Names of vocabulary files of all tokenizers in the installed `transformers`, read from their source."""
    import transformers

    found = set()
    for source in Path(transformers.__file__).parent.glob("**/tokenization_*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id.lower() == "vocab_files_names" for target in node.targets
            )
            if named and isinstance(node.value, ast.Dict):
                found |= {value.value for value in node.value.values if isinstance(value, ast.Constant)}
    return found


def test_the_files_of_every_tokenizer_count(folder: Path) -> None:
    names = vocabulary_files()
    # And those that are found by their names alone.
    names |= {"tokenizer.4.0.0.json", "tokenizer.model.v3", "tekken.json", "tiktoken.model", "qwen.tiktoken"}
    assert {"tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model"} <= names
    before = of(folder)
    missed = []
    for name in sorted(names - {file.name for file in folder.iterdir()}):
        (folder / name).write_text("{}")
        if of(folder) == before:
            missed.append(name)
        (folder / name).unlink()
    assert not missed
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    assert of(folder) != before


@pytest.fixture
def hub(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Fill the hub's cache with `owner/name`; returns a function that moves its main branch to a commit."""
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--owner--name"

    def move(commit: str) -> None:
        shutil.copytree(checkpoint("mixtral"), repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return move


def test_a_hub_id_is_its_commit(hub: Callable[[str], None], tmp_path: Path) -> None:
    model = ModelConfig("owner/name")
    with pytest.raises(UserError, match="owner/name: not found on the hub"):
        model_fingerprint(model)
    first, second = "1" * 40, "2" * 40
    hub(first)
    pinned = replace(model, revision=pinned_revision(model))
    before = model_fingerprint(model)
    assert pinned.revision == first
    assert model_fingerprint(pinned) == before
    hub(second)  # where nothing but the commit differs: a tokenizer that isn't downloaded yet may
    assert model_fingerprint(model) != before
    assert pinned_revision(pinned) == first
    assert model_fingerprint(pinned) == before


def test_a_folder_has_no_commit(folder: Path) -> None:
    assert pinned_revision(ModelConfig(str(folder))) is None
