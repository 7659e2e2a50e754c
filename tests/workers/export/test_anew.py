"""Source exports of repaired and merged individuals: what is written anew, and that everything else is copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from edit_checks import write_source
from families import edit_of_kind
from packed_checkpoints import checkpoint_in_format
from repair_samples import rows_of, sequences_of
from safetensors.torch import load_file

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import Plain
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PACKED = ("fp8", "mxfp4", "gptq")
"""Formats with shared experts, fused experts, and linear layers one by one. Packers are tried in test_nearest."""


@pytest.fixture
def write(
    tiny_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Callable[[str], ModelConfig]:
    def checkpoint(kind: str) -> ModelConfig:
        made = checkpoint_in_format(kind, tiny_model, tiny_tokenizer, tmp_path / "made")
        return replace(made, dtype="float32")

    return checkpoint


def pruned(kind: str) -> Any:
    return edit_of_kind(2 if kind == "fp8" else 3, 6, "prune", 4, 2, "logits")


def repaired(base: Any) -> RepairedEdit:
    settings = RepairSettings(ridge_lambdas=(0.1, 1.0, 10.0, 100.0))
    return RepairedEdit(base, settings, rows_of(sequences_of([12] * 24)))


def raw(file: Path) -> dict[str, bytes]:
    tensors = load_file(file / "model.safetensors")
    return {name: each.reshape(-1).view(torch.uint8).numpy().tobytes() for name, each in tensors.items()}


def exported(config: ModelConfig, edit: Edit, directory: Path, requantise: bool = False) -> dict[str, bytes]:
    write_source(config, edit, directory, requantise=requantise)
    return raw(directory)


def changed(one: dict[str, bytes], other: dict[str, bytes]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if one[name] != other[name]}


def experts_of(config: ModelConfig, edit: Edit | None) -> list[dict[str, torch.Tensor]]:
    resident = ResidentModel.load(config)
    if edit is not None:
        resident.apply(edit)
    count = 4
    return [{name: each.data[:count].clone() for name, each in x.expert_tensors().items()} for x in resident.layers]


@pytest.mark.parametrize("kind", PACKED)
def test_a_repair_writes_the_down_projections_anew(
    kind: str, write: Callable[[str], ModelConfig], tmp_path: Path
) -> None:
    config, base = write(kind), pruned(kind)
    copied = exported(config, base, tmp_path / "pruned")
    edit = repaired(base)
    with pytest.raises(UserError, match=r"\d+ of model\.layers\.\*\.mlp\.experts\.\S*down_proj\S* .*--requantise"):
        write_source(config, edit, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    found = exported(config, edit, tmp_path / "out", requantise=True)
    names = changed(copied, found)
    assert names and all("down_proj" in name and "experts." in name for name in names)
    assert any("shared" in name for name in names) == (kind == "fp8")
    assert "requantised" in (tmp_path / "out" / "README.md").read_text()
    wanted, read = experts_of(config, edit), experts_of(replace(config, path=str(tmp_path / "out")), None)
    differences = []
    for one, other in zip(wanted, read, strict=True):
        assert torch.equal(one["gate_up_proj"], other["gate_up_proj"])
        differences.append(float((one["down_proj"] - other["down_proj"]).norm() / one["down_proj"].norm()))
    # A layer whose fit doesn't help is left alone.
    assert 0 < max(differences) < (0.05 if kind == "fp8" else 0.2)


@pytest.mark.parametrize("kind", ["int4", "fp8_mxfp4", "fp8_matrix"])
def test_merged_experts_are_written_anew(kind: str, write: Callable[[str], ModelConfig], tmp_path: Path) -> None:
    config, edit = write(kind), edit_of_kind(2 if kind == "fp8_matrix" else 3, 6, "mixed", 4, 1, "logits")
    found = exported(config, edit, tmp_path / "out", requantise=True)
    copied = exported(config, replace(edit, **pruned_like(edit)), tmp_path / "pruned")
    names = changed(copied, found)
    assert all(".experts." in name or ".gate." in name for name in names)
    # The last layer's experts are one-hot rows, so they are the source's.
    assert not any(".layers.2." in name and ".experts." in name for name in names)


def pruned_like(edit: Any) -> dict[str, Any]:
    """Every row of both matrices replaced by its largest entry alone."""
    made = {}
    for name in ("router_mapping", "expert_merging"):
        matrix = getattr(edit, name)
        rows = torch.zeros(matrix.shape)
        rows.scatter_(2, torch.from_numpy(abs(matrix)).argmax(2, keepdim=True), 1.0)
        made[name] = rows.numpy()
    return made


def test_equal_numbers_of_plain_tensors_keep_their_bits() -> None:
    before = torch.tensor([1.0, 2.00390625, 3.0])
    (after,) = Plain().pack(torch.tensor([1.0, 2.0, 4.0]).bfloat16(), {"": before}).values()
    assert after.tolist() == [1.0, 2.00390625, 4.0]
