"""Exports in the source checkpoint's format: copied bytes, for plain and for quantised checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from edit_checks import CARD, Found, assert_close, assert_same_elsewhere, computed, logits, write_source
from families import edit_of_kind, representatives
from packed_checkpoints import checkpoint_in_format
from safetensors.torch import load_file, save_file
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints import shards
from moevolve.workers.contract.card import ExportError
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export import source
from moevolve.workers.export.export import export_model
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Configs = Callable[..., ModelConfig]
Outsider = Callable[[list[Path], Tensor], Found]
Checkpoints = Callable[[str], ModelConfig]

FORMATS = ("fp8", "mxfp4", "sharded", "gptq")
"""Shared experts, fused ones, several files, and linear layers one by one; test_pruning has all formats' names."""

MORE = ("fp8_mxfp4", "fp8_matrix", "llama4 int4", "fbgemm", "modelopt fp8", "mxfp8")
"""Tables of the experts of token ids, which test_recent_families prunes, too, fused ones with a scale each, others."""


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model: Callable[..., PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
    model_config: Configs,
) -> Checkpoints:
    """Checkpoints by format, written once: quantised ones, a plain one, and a Mixtral in several files."""
    made: dict[str, ModelConfig] = {}

    def write(kind: str) -> ModelConfig:
        place = tmp_path_factory.mktemp(kind)
        if kind != "sharded":
            return checkpoint_in_format(kind, tiny_model, tiny_tokenizer, place)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shards, "MAX_SHARD_BYTES", 20_000)
            export_model(model_config("mixtral"), IdentityEdit(), place / "mixtral", CARD)
        return ModelConfig(str(place / "mixtral"), device="cpu")

    def get(kind: str) -> ModelConfig:
        if kind not in made:
            made[kind] = write(kind)
        return made[kind]

    return get


def shape_of(kind: str) -> tuple[int, int]:
    """MoE layers and experts of a format's checkpoint."""
    return (2 if kind in ("fp8", "fp8_matrix", "llama4 int4") else 3), 6


def weights(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.glob("*.safetensors*"))}


@pytest.mark.parametrize("kind", representatives(FORMATS, MORE))
def test_keeping_all_experts_gives_equal_files(kind: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    config = checkpoints(kind)
    report = write_source(config, IdentityEdit(), tmp_path / "out")
    assert weights(tmp_path / "out") == weights(Path(config.path))
    assert len(weights(tmp_path / "out")) > (5 if kind == "sharded" else 0)
    for file in Path(config.path).iterdir():
        if file.name not in ("README.md", "config.json"):
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    before, after = (json.loads((Path(at) / "config.json").read_text()) for at in (config.path, tmp_path / "out"))
    # The tiny DeepSeeks' configs promise a layer for multi-token prediction that its files don't have.
    assert after == before | ({"num_nextn_predict_layers": 0} if kind in ("fp8", "fp8_mxfp4") else {})
    assert (report.form, report.experts, report.agreement) == ("source", 6, None)
    assert report.copied == sum(len(load_file(file)) for file in Path(config.path).glob("*.safetensors"))


@pytest.mark.parametrize("kind", representatives(FORMATS, MORE))
def test_a_pruned_checkpoint_computes_what_the_search_measured(
    kind: str, checkpoints: Checkpoints, tokens: Tensor, tmp_path: Path
) -> None:
    config = replace(checkpoints(kind), dtype="float32")
    # Rows of routers in another order than in the source, and experts in a third one.
    edit = edit_of_kind(*shape_of(kind), "crossed", 4, 1, "logits")
    expected = logits(ResidentModel.load(config), edit, tokens)
    report = write_source(config, edit, tmp_path / "out")
    exported = ResidentModel.load(replace(config, path=str(tmp_path / "out")))
    assert_close(logits(exported, None, tokens), expected, 1e-5)
    parameters = sum(each.numel() for each in exported.model.parameters())
    assert (report.experts, report.active, report.parameters) == (4, 1, parameters)
    assert report.size_bytes < sum(file.stat().st_size for file in Path(config.path).iterdir())
    card = (report.directory / "README.md").read_text()
    assert f"{report.parameters:,}" in card and "| checkpoint form | source |" in card and "byte for byte" in card


def test_transformers_alone_loads_it(
    checkpoints: Checkpoints, outsider: Outsider, tokens: Tensor, tmp_path: Path
) -> None:
    expected = {}
    directory, edit = tmp_path / "sharded-stock", edit_of_kind(3, 6, "prune", 4, 2, "logits")
    expected[directory] = computed(ResidentModel.load(checkpoints("sharded")), edit, tokens)
    write_source(checkpoints("sharded"), edit, directory)
    assert_same_elsewhere(expected, outsider(list(expected), tokens))
    # It unpacks MXFP4 to bfloat16, whose rounding depends on how a product is computed.
    edit = edit_of_kind(*shape_of("mxfp4"), "prune", 4, 2, "logits")
    write_source(checkpoints("mxfp4"), edit, tmp_path / "mxfp4")
    ((found, _, _),) = outsider([tmp_path / "mxfp4"], tokens)
    resident = ResidentModel.load(replace(checkpoints("mxfp4"), dtype="float32"))
    assert_close(torch.tensor(found), logits(resident, edit, tokens), 5e-2)


@pytest.mark.parametrize("inside", [False, True])
def test_the_quantisation_config_names_the_experts_that_are_left(
    inside: bool, checkpoints: Checkpoints, make_copy: Callable[[str], ModelConfig], tmp_path: Path
) -> None:
    """Kimi-K2.5 has it inside the settings of its text model."""
    config = make_copy("fp8")
    file = Path(config.path) / "config.json"
    settings = json.loads(file.read_text())
    names = [f"model.layers.1.mlp.experts.{expert}.up_proj" for expert in range(6)]
    settings["quantization_config"]["modules_to_not_convert"] = ["lm_head", *names]
    settings["a_field_of_a_server"] = {"kept": True}
    whole = {"model_type": "kimi_k25", "tie_word_embeddings": False, "text_config": settings}
    file.write_text(json.dumps(whole if inside else settings))
    (file.parent / "LICENSE").write_text("free")
    (file.parent / "pytorch_model.bin").write_bytes(b"pickled")
    edit = edit_of_kind(2, 6, "prune", 4, 2)
    write_source(config, edit, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    found = found["text_config"] if inside else found
    order = edit.expert_merging[0].argmax(axis=1).tolist()
    renamed = [f"model.layers.1.mlp.experts.{order.index(expert)}.up_proj" for expert in sorted(order)]
    assert found.pop("quantization_config")["modules_to_not_convert"] == ["lm_head", *renamed]
    del settings["quantization_config"]
    changed = {name for name in settings if settings[name] != found[name]}
    assert changed == {"n_routed_experts", "num_nextn_predict_layers"} and found.keys() == settings.keys()
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


@pytest.fixture
def make_copy(checkpoints: Checkpoints, tmp_path: Path) -> Callable[[str], ModelConfig]:
    """Copy a checkpoint, so that a test can change its files."""

    def make(kind: str) -> ModelConfig:
        config = checkpoints(kind)
        return replace(config, path=str(shutil.copytree(config.path, tmp_path / f"copied-{kind}")))

    return make


def with_mtp(config: ModelConfig) -> ModelConfig:
    """Add a fourth layer for multi-token prediction to a DeepSeek-V3."""
    file = Path(config.path) / "model.safetensors"
    tensors = load_file(file)
    later = {name.replace("layers.2.", "layers.3."): each for name, each in tensors.items() if ".layers.2." in name}
    save_file(tensors | {name: each.clone() for name, each in later.items()}, file, {"format": "pt"})
    settings = json.loads((file.parent / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (file.parent / "config.json").write_text(json.dumps(settings))
    return config


@pytest.mark.parametrize(("mtp", "predicted"), [("drop", 0), ("prune", 1), ("keep", 1)])
def test_layers_for_multi_token_prediction(
    mtp: Any, predicted: int, make_copy: Callable[[str], ModelConfig], tmp_path: Path
) -> None:
    config = with_mtp(make_copy("fp8"))
    edit = edit_of_kind(2, 6, "prune", 4, 2)
    write_source(config, edit, tmp_path / "out", mtp=mtp)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == predicted
    tensors, original = load_file(tmp_path / "out" / "model.safetensors"), load_file(f"{config.path}/model.safetensors")
    later = {name for name in tensors if ".layers.3." in name}
    counts = {"drop": 0, "prune": 4, "keep": 6}
    assert sum(name.endswith("up_proj.weight") and ".experts." in name for name in later) == counts[mtp]
    if mtp == "keep":
        assert all(torch.equal(tensors[name].view(torch.uint8), original[name].view(torch.uint8)) for name in later)
    ResidentModel.load(replace(config, path=str(tmp_path / "out")))


def test_a_damaged_checkpoint_is_named_and_nothing_is_left(
    make_copy: Callable[[str], ModelConfig], tmp_path: Path
) -> None:
    config = make_copy("fp8")
    file, name = Path(config.path) / "model.safetensors", "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"
    tensors = load_file(file)
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "new").mkdir()
    with pytest.raises(UserError, match=f"tensor {name.removesuffix('_scale_inv')} can't be unpacked"):
        write_source(config, edit_of_kind(2, 6, "prune", 4, 2), tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_an_edit_that_the_format_cannot_express_is_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    reasons: dict[str, Edit] = {
        r"\d+ of model.layers.*down_proj.weight.*add --requantise": edit_of_kind(2, 6, "merged", 4, 2, "logits"),
        "doesn't fold into a smaller router": edit_of_kind(2, 6, "mapped", 4, 2),
        "it leaves neurons out": replace(edit_of_kind(2, 6, "prune", 4, 2), width=12),
        "for 3 MoE layers of 6 experts, the model has 2 of 6; use": edit_of_kind(3, 6, "prune", 4, 2),
        "for 2 MoE layers of 8 experts, the model has 2 of 6; use": edit_of_kind(2, 8, "prune", 4, 2),
    }
    for reason, edit in reasons.items():
        with pytest.raises(UserError, match=reason):
            write_source(checkpoints("fp8"), edit, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_byte_that_the_disk_changes_is_noticed(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = source._write_tensors

    def faulty(plan: Any, part: Path) -> dict[str, int]:
        checksums = original(plan, part)
        content = bytearray((part / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (part / "model.safetensors").write_bytes(content)
        return checksums

    monkeypatch.setattr(source, "_write_tensors", faulty)
    with pytest.raises(ExportError, match=r"tensor \S+ in model.safetensors isn't what the source has"):
        write_source(checkpoints("fp8"), IdentityEdit(), tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["out.unverified"]
