"""Aligned edits: what they compute, and that rearranging the originals leaves nothing behind."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import addresses, logits
from numpy.typing import NDArray
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.config import ModelConfig
from moevolve.workers.export.card import ExportCard
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.base import Edit, IdentityEdit
from moevolve.workers.methods.eep import experts
from moevolve.workers.methods.eep.alignment import Alignment, encode, in_place, step
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.eep.experts import rearrange
from moevolve.workers.model.resident import ResidentModel

Configs = Callable[..., ModelConfig]
Edits = Callable[..., EepEdit]
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
EXPERTS, WIDTH = 6, 24


def random_alignment(layers: int, seed: int = 0, experts: int = EXPERTS, width: int = WIDTH) -> Alignment:
    rng = np.random.default_rng(seed)
    places = np.stack([[rng.permutation(width) for _ in range(experts)] for _ in range(layers)])
    return Alignment(encode(places, rng.random(places.shape) < 0.5))


def aligned(edit: EepEdit, seed: int = 0) -> EepEdit:
    alignment = random_alignment(edit.layers, seed)
    return EepEdit(edit.router_mapping, edit.expert_merging, edit.active, edit.router_space, alignment=alignment)


def close(found: Tensor, expected: Tensor) -> bool:
    scale = max(1.0, float(expected.abs().max()))
    return float((found - expected).abs().max()) <= 1e-5 * scale


def write_rearranged(source: Path, target: Path, alignment: Alignment) -> Path:
    """The checkpoint with every neuron moved by itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for block, layer in zip(blocks, alignment.codes.tolist(), strict=True):
        gate_up, down = (tensor.data.clone() for tensor in (block.experts.gate_up_proj, block.experts.down_proj))
        for expert, codes in enumerate(layer):
            for place, code in enumerate(codes):
                neuron, sign = (code, 1) if code >= 0 else (-1 - code, -1)
                block.experts.gate_up_proj.data[expert, place] = gate_up[expert, neuron]
                block.experts.gate_up_proj.data[expert, WIDTH + place] = sign * gate_up[expert, WIDTH + neuron]
                block.experts.down_proj.data[expert, :, place] = sign * down[expert, :, neuron]
    shutil.copytree(source, target)
    (target / "model.safetensors").unlink()
    model.save_pretrained(target)
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_moving_neurons_changes_no_function(
    family: str,
    model_config: Configs,
    make_edit: Edits,
    moe_layers: Callable[[str], int],
    checkpoint: Callable[[str], Path],
    plain_logits: Callable[..., Tensor],
    tokens: Tensor,
    tmp_path: Path,
) -> None:
    """The model and any pruning of it are the same functions; merges aren't, and aligned edits compute theirs."""
    moved = write_rearranged(checkpoint(family), tmp_path / "moved", random_alignment(moe_layers(family)))
    there = ResidentModel.load(ModelConfig(str(moved), device="cpu"))
    here = ResidentModel.load(model_config(family))
    for edit in (IdentityEdit(), make_edit(family, "prune"), make_edit(family, "crossed", retained=3, active=1)):
        assert close(logits(there, edit, tokens), logits(here, edit, tokens))
    for originals in ("device", "host"):
        model = ResidentModel.load(model_config(family, originals=originals))
        for kind in ("merged", "both", "mixed"):
            edit = make_edit(family, kind)
            found = logits(model, aligned(edit), tokens)
            assert close(found, plain_logits(moved, edit, tokens))
            assert close(found, logits(there, edit, tokens))
            assert close(found, logits(model, edit, tokens)) == bool(edit.one_hot_merging.all())


@pytest.mark.parametrize("settings", [{}, {"originals": "host"}, {"dtype": "bfloat16"}])
def test_what_ran_before_leaves_no_trace(
    settings: dict[str, str], model_config: Configs, make_edit: Edits, tokens: Tensor
) -> None:
    """Whatever order the originals were left in, every edit and the unedited model compute the same bits."""
    config = model_config("olmoe", **settings)
    edits: list[Edit] = [
        IdentityEdit(),
        aligned(make_edit("olmoe", "merged"), 1),
        make_edit("olmoe", "prune"),
        aligned(make_edit("olmoe", "mixed"), 2),
        make_edit("olmoe", "mixed"),
        aligned(make_edit("olmoe", "mixed"), 1),
    ]
    fresh = [logits(ResidentModel.load(config), edit, tokens) for edit in edits]
    model = ResidentModel.load(config)
    loaded = [[tensor.clone() for tensor in model.original_experts(i).values()] for i in range(3)]
    for i in np.random.default_rng(0).permutation(np.repeat(np.arange(len(edits)), 4)):
        assert torch.equal(logits(model, edits[i], tokens), fresh[i])
    logits(model, edits[1], tokens)
    model.restore()
    for layer, (before, expert) in enumerate(zip(loaded, model.layers, strict=True)):
        for old, new in zip(before, model.original_experts(layer).values(), strict=True):
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))
        if not settings.get("originals"):
            assert torch.equal(before[1], expert.experts.down_proj.data)  # type: ignore[union-attr, operator]


def test_nothing_moves_between_edits_of_one_alignment(
    model_config: Configs, make_edit: Edits, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[Any] = []
    monkeypatch.setattr(experts, "rearrange", lambda *args: moves.append(rearrange(*args)))
    model = ResidentModel.load(model_config("mixtral"))
    before = addresses(model)
    for seed in range(5):
        logits(model, aligned(make_edit("mixtral", "mixed", seed=seed)), tokens)
        model.revert()
    assert len(moves) == 3
    assert addresses(model) == before
    logits(model, IdentityEdit(), tokens)
    logits(model, make_edit("mixtral", "prune"), tokens)
    assert len(moves) == 6


def test_the_checkpoint_on_disk_stays_as_it_is(
    model_config: Configs, make_edit: Edits, tokens: Tensor, checkpoint: Callable[[str], Path]
) -> None:
    file = checkpoint("qwen3_moe") / "model.safetensors"
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    logits(ResidentModel.load(model_config("qwen3_moe")), aligned(make_edit("qwen3_moe", "both")), tokens)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("kind", ["merged", "both"])
def test_exports_of_aligned_edits_agree_after_reloading(
    family: str, kind: str, model_config: Configs, make_edit: Edits, tokens: Tensor, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    resident = ResidentModel.load(model_config(family))
    edit = aligned(make_edit(family, kind, space="logits"))
    expected = logits(resident, edit, tokens)
    report = export_model(resident, edit, tmp_path / "out", ExportCard("An aligned one", "base", "f00d"))
    assert report.form == "stock" and report.agreement.holds
    with torch.no_grad():
        assert close(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits, expected)
    assert "their neurons were aligned first" in (tmp_path / "out" / "README.md").read_text()


def test_phenotypes(make_edit: Edits) -> None:
    for kind in ("prune", "crossed", "mapped"):
        edit = make_edit("mixtral", kind)
        assert aligned(edit).alignment is None
        assert aligned(edit).phenotype_hash == edit.phenotype_hash
    for kind in ("merged", "both", "mixed"):
        edit = make_edit("mixtral", kind)
        hashes = {edit.phenotype_hash, aligned(edit, 0).phenotype_hash, aligned(edit, 1).phenotype_hash}
        assert len(hashes) == 3
        wide = Alignment(random_alignment(3).codes.astype(np.int32))
        again = EepEdit(edit.router_mapping, edit.expert_merging, edit.active, alignment=wide)
        assert again.phenotype_hash == aligned(edit, 0).phenotype_hash


def test_steps_lead_from_one_alignment_to_another() -> None:
    rng = np.random.default_rng(0)
    loaded = {
        "gate_up_proj": torch.from_numpy(rng.standard_normal((EXPERTS, 2 * WIDTH, 5))),
        "down_proj": torch.from_numpy(rng.standard_normal((EXPERTS, 5, WIDTH))),
    }
    here, there = (random_alignment(1, seed).codes[0] for seed in (1, 2))
    still = in_place(EXPERTS, WIDTH)

    def moved(*codes: NDArray[Any]) -> list[Tensor]:
        tensors = {name: tensor.clone() for name, tensor in loaded.items()}
        for each in codes:
            rearrange(tensors, each)
        return list(tensors.values())

    for found, expected in (
        (moved(here, step(here, there)), moved(there)),
        (moved(here, step(here, still)), list(loaded.values())),
        (moved(step(still, here)), moved(here)),
        (moved(step(here, here)), list(loaded.values())),
    ):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((2, 3, 4), np.int16), "each of 4 neurons"),
        (np.array([[[0, 1, -3, 2]]], np.int16), "each of 4 neurons"),
        (np.arange(4, dtype=np.int16)[None], "integers"),
        (np.arange(4, dtype=np.float32)[None, None], "integers"),
    ],
)
def test_what_is_no_alignment_is_refused(codes: NDArray[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Alignment(codes)


def test_alignments_of_other_models_are_refused(model_config: Configs, make_edit: Edits, tokens: Tensor) -> None:
    edit = make_edit("mixtral", "both")
    with pytest.raises(UserError, match="3 layers of 6 experts can't have an alignment of 2 of 6"):
        EepEdit(edit.router_mapping, edit.expert_merging, edit.active, alignment=random_alignment(2))
    model = ResidentModel.load(model_config("mixtral"))
    before = logits(model, IdentityEdit(), tokens)
    wide = EepEdit(edit.router_mapping, edit.expert_merging, edit.active, alignment=random_alignment(3, width=25))
    with pytest.raises(UserError, match=r"alignment is for \(3, 6, 25\)"):
        model.apply(wide)
    assert torch.equal(logits(model, IdentityEdit(), tokens), before)


def test_wide_experts_take_wider_integers() -> None:
    places = np.arange(2**15 + 5)[None, None, ::-1]
    alignment = Alignment(encode(places, np.ones(places.shape, np.bool_)))
    assert alignment.codes.dtype == np.int32 and alignment.codes.min() == -places.shape[-1]
    edge = Alignment(encode(np.arange(2**15 - 1)[None, None], np.ones((1, 1, 2**15 - 1), np.bool_)))
    assert edge.codes.dtype == np.int16
