"""Exports of all edits: complete or absent, verified, and with a model card."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_checks import Found
from families import edit_of_kind, family_edit
from huggingface_hub import ModelCard
from live_bytes import LiveBytes
from safetensors.torch import load_file, save_file
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.card import Agreement, ExportCard, ExportError, ExportScore
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.methods import Blueprint
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export import export, folder
from moevolve.workers.export.export import export_model
from moevolve.workers.export.metadata import source_license
from moevolve.workers.export.verify import compare, verify
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.export import EepExporter
from moevolve.workers.methods.registry import METHODS
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
Outsider = Callable[[list[Path], Tensor], Found]

CARD = ExportCard(
    title="A small model",
    base_model="someone/base|model",
    base_fingerprint="f00d",
    search_name="trial",
    search_id="42",
    individual="trial#17",
    lineage=("trial#9 (swap)", "trial#3 (random)"),
    scores=(
        ExportScore("rte", "dev", 0.75, 200, 0.69, 0.81),
        ExportScore("rte", "search", 0.8, 300),
        ExportScore("web", "test", 0.1, 40, 0.08, 0.125, "perplexity", "inverse_perplexity"),
        ExportScore("rte", "test", 0.7, 277, 0.65, 0.75, metric="accuracy"),
    ),
    full_scores=(ExportScore("rte", "dev", 0.9, 200, 0.85, 0.93),),
)


def test_the_card_tells_where_the_model_comes_from(model_config: Configs, tmp_path: Path) -> None:
    edit = family_edit("mixtral", "prune")
    report = export_model(model_config("mixtral"), edit, tmp_path / "out", CARD)
    card = (report.directory / "README.md").read_text()
    for text in (
        "# A small model",
        "someone/base\\|model",
        "f00d",
        "trial#17",
        "from 6 to 4 experts",
        edit.phenotype_hash,
    ):
        assert text in card
    for row in (
        "| this model | rte | dev | 75.0 % | 69.0 - 81.0 | 200 |\n| this model | rte | search | 80.0 % | - | 300 |\n",
        "| this model | web | test | 10.00 ppl | 8.000 - 12.50 | 40 |\n",
        "| 277 |\n| full model | rte | dev | 90.0 % | 85.0 - 93.0 | 200 |\n\n",
        "Perplexities (ppl) are better where they are lower.",
    ):
        assert row in card
    assert "1. trial#9 (swap)\n2. trial#3 (random)\n" in card
    assert f"{report.parameters:,}" in card


def test_the_hub_reads_the_metadata_of_the_card(model_config: Configs, tmp_path: Path) -> None:
    """Licence of the source, the base model, and results on `test` in the hub's form."""
    source = tmp_path / "source"
    shutil.copytree(model_config("mixtral").path, source)
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: own\nlanguage: [en]\n---\n# Base\n")
    model, card = replace(model_config("mixtral"), path=str(source)), replace(CARD, base_model="someone/base")
    export_model(model, family_edit("mixtral", "prune"), tmp_path / "out", card)
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.base_model, data.license, data.license_name) == ("someone/base", "other", "own")
    assert data.library_name == "transformers"
    assert data.tags == ["mixture-of-experts", "expert-pruning", "moevolve"] and data.language is None
    found = data.eval_results
    results = [(each.dataset_name, each.dataset_split, each.metric_type, each.metric_value) for each in found]
    assert results == [("web", "test", "perplexity", 10.0), ("rte", "test", "accuracy", 70.0)]
    assert found[0].metric_name == "perplexity (ppl), lower is better"


def test_a_licence_is_found_in_the_card_or_the_config(tmp_path: Path) -> None:
    assert source_license(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"license": "mit", "model_type": "mixtral"}')
    assert source_license(tmp_path) == {"license": "mit"}
    for card in ("# No metadata\n", "---\n: : [\n---\n", "---\ntags: [a]\n---\n", "---\n- a\n---\n"):
        (tmp_path / "README.md").write_text(card)
        assert source_license(tmp_path) == {"license": "mit"}, card
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert source_license(tmp_path) == {"license": "apache-2.0"}


def test_a_taken_target_is_refused_and_untouched(model_config: Configs, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "note").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        export_model(model_config("mixtral"), family_edit("mixtral", "prune"), tmp_path / "taken", CARD)
    with pytest.raises(UserError, match="is a file"):
        export_model(model_config("mixtral"), family_edit("mixtral", "prune"), tmp_path / "taken" / "note", CARD)
    assert (tmp_path / "taken" / "note").read_text() == "mine"


def test_a_full_disk_is_told_beforehand(model_config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match="no room"):
        export_model(model_config("mixtral"), family_edit("mixtral", "prune"), tmp_path / "out", CARD)
    assert list(tmp_path.iterdir()) == []


def corrupted(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the files of exports between writing and verification."""

    def verified(directory: Path, *arguments: Any) -> Agreement:
        file = directory / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
        return verify(directory, *arguments)

    monkeypatch.setattr(export, "verify", verified)


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


def test_a_changed_tensor_is_named_and_the_files_are_kept(
    model_config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last bits of values, far below every tolerance, or of an expert that no test token chooses."""
    other = EXPERT.replace("experts.3", "experts.4")
    wrong = f"tensor {EXPERT} in the files isn't what was written; decoder layer 1 differs .* by"
    cases: dict[str, Callable[[dict[str, Tensor]], object]] = {
        rf"{wrong} 0\.\d+ of its output": lambda tensors: tensors[EXPERT].mul_(1.5),
        f"{wrong} .* of its output": lambda tensors: tensors[EXPERT].view(torch.int32)[0].bitwise_xor_(1),
        f"files lack 1 tensors, such as {EXPERT}": lambda tensors: tensors.pop(EXPERT),
        f"files have unexpected 1 tensors, such as {other}": lambda tensors: tensors.update({other: torch.ones(1)}),
    }
    resident, kept = ResidentModel.load(model_config("mixtral")), []
    for told, change in cases.items():
        kept.append("out.unverified" if not kept else f"out.unverified-{len(kept) + 1}")
        with monkeypatch.context() as patch:
            corrupted(patch, change)
            with pytest.raises(ExportError, match=told) as caught:
                export_model(resident, family_edit("mixtral", "prune"), tmp_path / "out", CARD)
        assert str(caught.value).endswith(f"the files are kept in {tmp_path / kept[-1]}, don't use them")
        assert (tmp_path / kept[-1] / "model.safetensors").is_file()
        assert isinstance(resident.applied, IdentityEdit)
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_files_stay_where_there_is_no_room_to_verify_them(
    model_config: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(export, "verify", verified)
    with pytest.raises(ExportError, match=r"cpu has no room .*; export with --device cpu; the files are kept"):
        export_model(model_config("mixtral"), family_edit("mixtral", "prune"), tmp_path / "out", CARD)
    assert [path.name for path in tmp_path.iterdir()] == ["out.unverified"]


class ScalingDown(EepExporter):
    """An exporter with wrong experts in one layer."""

    def build(self, *arguments: Any) -> Blueprint:
        found = super().build(*arguments)

        def layer(index: int) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in found.layer(index):
                yield name, tensor * 1.5 if index == 1 and name == "mlp.experts.down_proj" else tensor

        return replace(found, layer=layer)


class Settling(EepExporter):
    """An exporter with wrong settings."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def build(self, *arguments: Any) -> Blueprint:
        found = super().build(*arguments)
        for name, value in self.settings.items():
            setattr(found.model.config, name, value)
        return found


@pytest.mark.parametrize(
    ("exporter", "part"),
    [
        (ScalingDown(), "decoder layer 1"),
        (Settling(norm_topk_prob=False), "decoder layer 0"),
        (Settling(rms_norm_eps=0.1), "final norm"),
    ],
)
def test_what_an_exporter_gets_wrong_is_found(
    exporter: EepExporter, part: str, model_config: Configs, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(METHODS, EepEdit, replace(METHODS[EepEdit], exporter=exporter))
    with pytest.raises(ExportError, match=f"{part} differs .* its tensors are what was written"):
        export_model(model_config("qwen3_moe"), family_edit("qwen3_moe", "prune"), tmp_path / "out", CARD)


@pytest.mark.parametrize("kind", ["both", "full"])
def test_no_more_than_a_layer_and_a_half_is_held_beside_the_model(
    kind: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    # Threads of their own would be out of the counter's sight.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_local_experts": 8, "num_hidden_layers": 4}
    shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    larger = MixtralConfig.from_pretrained(tmp_path / "model", **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        MixtralForCausalLM(larger).save_pretrained(tmp_path / "model")
    resident = ResidentModel.load(ModelConfig(str(tmp_path / "model"), device="cpu"))
    edit = IdentityEdit() if kind == "full" else edit_of_kind(4, 8, kind)
    with resident.edited(edit):
        pass  # what the edit itself takes is there from now on
    with LiveBytes() as counter:
        export_model(resident, edit, tmp_path / "out", CARD)
    written = load_file(tmp_path / "out" / "model.safetensors").items()
    layer = sum(tensor.nbytes for name, tensor in written if name.startswith("model.layers.2."))
    assert layer > (8 if kind == "full" else 4) * 3 * 256 * 256 * 4
    # The rest is for activations.
    assert layer / 4 < counter.peak < 1.5 * layer + (1 << 18), f"{counter.peak / layer:.2f} layers"


def test_not_a_number_is_no_agreement() -> None:
    states = torch.zeros((10, 3))
    assert compare("all", [states], [states], torch.float32).holds
    broken = states.clone()
    broken[:2, 0] = float("nan")
    assert not compare("all", [states], [broken], torch.float32).holds
    assert not compare("all", [states], [broken], torch.bfloat16).holds


def test_differences_are_measured_by_what_a_part_adds_at_a_position() -> None:
    given = torch.tensor([[1000.0, 0.0], [1.0, 0.0]])
    expected = given + torch.tensor([[4.0, 0.5], [0.5, 0.25]])
    found = expected + torch.tensor([[0.0, 0.04], [0.01, 0.0]])
    outcome = compare("all", [expected], [found], torch.float32, [given])
    assert outcome.max_difference == pytest.approx(0.02, rel=1e-3) and outcome.positions == 2 and not outcome.holds
    # One step of rounding at a value that is large beside what is added is free.
    rounded = expected.bfloat16()
    rounded[0, 0] += 4
    assert compare("all", [expected.bfloat16()], [rounded], torch.bfloat16, [given.bfloat16()]).max_difference == 0
