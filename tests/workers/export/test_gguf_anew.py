"""GGUF exports of repaired and merged individuals: what is written anew and as which type; the rest is copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import pytest
from edit_checks import logits, write_source
from families import edit_of_kind
from gguf import GGMLQuantizationType as Type
from gguf_checkpoints import SETTINGS, gguf_checkpoint
from repair_samples import rows_of, sequences_of
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

WIDE = {"hidden_size": 256, "moe_intermediate_size": 256}
"""Sides that blocks of K-quants divide."""

RETYPED = (
    "1 of blk.*.ffn_down_exps.weight, 1 of blk.*.ffn_gate_exps.weight, 1 of blk.*.ffn_up_exps.weight "
    "from Q4_K to Q8_0, because the gguf library can't pack Q4_K"
)


@pytest.fixture
def write(
    tiny_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Callable[[str, Type], ModelConfig]:
    def checkpoint(family: str, kind: Type) -> ModelConfig:
        model = tiny_model(family, **(SETTINGS[family] | (WIDE if kind == Type.Q4_K else {})))
        return gguf_checkpoint(model, tiny_tokenizer, tmp_path / "made", kind)[0]

    return checkpoint


def pruned(how: str = "prune") -> Any:
    return edit_of_kind(3, 6, how, 4, 2, "logits")


def repaired(base: Any) -> RepairedEdit:
    settings = RepairSettings(ridge_lambdas=(1.0, 100.0))
    return RepairedEdit(base, settings, rows_of(sequences_of([12] * 12)))


def stored(directory: Path) -> dict[str, tuple[str, bytes]]:
    reader = gguf.GGUFReader(directory / "model.gguf")
    return {each.name: (each.tensor_type.name, each.data.tobytes()) for each in reader.tensors}


def changed(one: Path, other: Path) -> set[str]:
    before, after = stored(one), stored(other)
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def differences(config: ModelConfig, edit: Edit, directory: Path) -> dict[str, float]:
    """Largest difference of the file's experts from the edited model's, by matrix."""
    edited, found = ResidentModel.load(config), ResidentModel.load(replace(config, path=str(directory / "model.gguf")))
    edited.apply(edit)
    worst: dict[str, float] = {}
    for one, other in zip(edited.layers, found.layers, strict=True):
        for name, meant in one.expert_tensors().items():
            read, kept = other.expert_tensors()[name].data, meant.data[:4]
            worst[name] = max(worst.get(name, 0.0), float((read - kept).norm() / kept.norm()))
    return worst


@pytest.mark.parametrize(
    ("family", "kind", "most"),
    [
        ("qwen3_moe", Type.Q4_0, 0.1),
        ("gpt_oss", Type.MXFP4, 0.2),
        ("gpt_oss", Type.BF16, 0.005),
    ],
)
def test_a_repair_writes_the_down_projections_anew(
    family: str, kind: Type, most: float, write: Callable[[str, Type], ModelConfig], tmp_path: Path
) -> None:
    config, base = write(family, kind), pruned()
    write_source(config, base, tmp_path / "pruned")
    edit = repaired(base)
    if kind != Type.BF16:
        with pytest.raises(UserError, match=r"\d of blk\.\*\.ffn_down_exps\.weight would .*--requantise"):
            write_source(config, edit, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()
    report = write_source(config, edit, tmp_path / "out", requantise=kind != Type.BF16)
    names = changed(tmp_path / "pruned", tmp_path / "out")
    assert names and all(".ffn_down_exps." in name for name in names) and report.anew == len(names)
    found = differences(config, edit, tmp_path / "out")
    assert found.pop("gate_up_proj") == 0 and 0 < found["down_proj"] < most
    kinds = {stored(tmp_path / "out")[name][0] for name in names if name.endswith("weight")}
    assert kinds == {kind.name} and "written as another type" not in dict(report.changes)


@pytest.mark.parametrize(("kind", "tolerance"), [(Type.F16, 2e-3), (Type.Q4_K, 0.05)])
def test_merged_experts_compute_what_the_search_measured(
    kind: Type, tolerance: float, write: Callable[[str, Type], ModelConfig], tokens: Tensor, tmp_path: Path
) -> None:
    """Experts of one tensor share its type, so what the library can't pack is written as Q8_0 as a whole."""
    config, edit = write("qwen3_moe", kind), pruned("mixed")
    report = write_source(config, edit, tmp_path / "out", requantise=kind != Type.F16)
    expected = logits(ResidentModel.load(config), edit, tokens)
    found = logits(ResidentModel.load(replace(config, path=str(tmp_path / "out" / "model.gguf"))), None, tokens)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    # Rounding can send a token to another expert.
    assert float(error.median()) < tolerance
    before, after = stored(Path(config.path).parent), stored(tmp_path / "out")
    for matrix in ("gate", "up", "down"):
        name = f"blk.2.ffn_{matrix}_exps.weight"  # only the rows of the layer in the middle aren't one-hot
        assert after[name][0] == kind.name
        slab = len(before[name][1]) // 6
        source = {before[name][1][i * slab : (i + 1) * slab] for i in range(6)}
        assert {after[name][1][i * slab : (i + 1) * slab] for i in range(4)} <= source
        assert after[f"blk.1.ffn_{matrix}_exps.weight"][0] == ("Q8_0" if kind == Type.Q4_K else kind.name)
    said = dict(report.changes).get("written as another type", "")
    assert said == (RETYPED if kind == Type.Q4_K else "")
    assert said in (tmp_path / "out" / "README.md").read_text()
