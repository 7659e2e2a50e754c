"""Lists of kept experts: what plain loaders make of them, what they can't say, and files that aren't lists."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edit_checks import CARD, Residents, assert_close, logits
from families import family_edit, sample_rows
from safetensors.torch import load_file, save_file
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.card import ExportReport, ListForm
from moevolve.workers.contract.edits import Edit, IdentityEdit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.lists import export_list, read_list
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.describe import describe_model

Configs = Callable[..., ModelConfig]
Kept = dict[int, list[int]]

GROUPED = "deepseek_v3-grouped"
KEPT: dict[str, tuple[int, Kept]] = {
    "qwen3_moe": (6, {0: [0, 2, 3, 5], 1: [1, 2, 4, 5], 2: [0, 1, 2, 3]}),
    GROUPED: (8, {1: [0, 3, 5, 6], 2: [1, 2, 4, 7]}),
}
"""Experts of a layer, and kept ones; the latter has a dense first layer, and two routing groups of four experts."""


def pruned(variant: str) -> EepEdit:
    experts, kept = KEPT[variant]
    matrices = np.eye(experts, dtype=np.float32)[list(kept.values())]
    return EepEdit(matrices, matrices, 2)


def as_we_write(text: str, variant: str, _: ExportReport) -> Kept:
    found = json.loads(text)
    assert found | {"kept": {}} == {
        "model": "someone/base",
        "experts": KEPT[variant][0],
        "individual": "trial#17",
        "kept": {},
    }
    return {int(layer): kept for layer, kept in found["kept"].items()}


def as_vllm_ascend(text: str, variant: str, report: ExportReport) -> Kept:
    """By the settings that the report names, as the pull request reads them: the first of every line."""
    option, settings = shlex.split(dict(report.changes)["serve with"])
    read = json.loads(settings)
    assert option == "--additional-config" and Path(read["expert_list_file"]).read_text() == text
    first = int(KEPT[variant][0] * (1.0 - read["expert_prune_ratio"]))
    ((layer, _),) = json.loads(text.split("\n", maxsplit=1)[0]).items()
    assert int(layer) == min(KEPT[variant][1])
    return {int(layer): each[:first] for line in text.splitlines() for layer, each in json.loads(line).items()}


def as_easy_ep(text: str, variant: str, _: ExportReport) -> Kept:
    """Row l - 3 is that of layer l of a model whose first three layers are dense."""
    mask, first = np.array(json.loads(text)), min(KEPT[variant][1])
    assert set(mask.flat) == {0.0, 1.0} and mask.shape[1] == KEPT[variant][0]
    return {first + row: [e for e, on in enumerate(mask[row]) if on == 1] for row in range(len(mask))}


READERS: dict[ListForm, Callable[[str, str, ExportReport], Kept]] = {
    "list": as_we_write,
    "vllm-ascend": as_vllm_ascend,
    "easy-ep": as_easy_ep,
}


def loaded_by(kept: Kept, source: Path, folder: Path) -> Any:
    """Load a checkpoint without the other experts: tensors by name, and the number of experts in its config."""
    from transformers import AutoModelForCausalLM

    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer, expert = (re.findall(pattern, name) for pattern in (r"layers\.(\d+)\.", r"experts\.(\d+)\."))
        experts = kept.get(int(layer[0])) if layer else None
        if experts is not None and expert:
            if int(expert[0]) in experts:
                number = experts.index(int(expert[0]))
                tensors[name.replace(f"experts.{expert[0]}.", f"experts.{number}.")] = tensor
        elif experts is not None and ".mlp.gate." in name:
            tensors[name] = tensor[experts]
        else:
            tensors[name] = tensor
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (count,) = config.keys() & {"num_experts", "num_local_experts", "n_routed_experts"}
    retained = len(next(iter(kept.values())))
    (folder / "config.json").write_text(json.dumps(config | {count: retained}))
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


@pytest.mark.parametrize("form", READERS)
@pytest.mark.parametrize("variant", KEPT)
def test_a_loader_that_leaves_the_others_out_has_the_candidate(
    variant: str, form: ListForm, model_config: Configs, resident: Residents, tokens: Tensor, tmp_path: Path
) -> None:
    model, edit = model_config(variant), pruned(variant)
    file = tmp_path / f"kept.{'jsonl' if form == 'vllm-ascend' else 'json'}"
    report = export_list(model, edit, file, form, CARD)
    kept = READERS[form](file.read_text(), variant, report)
    assert kept == KEPT[variant][1] and (report.experts, report.size_bytes) == (4, file.stat().st_size)
    loaded = loaded_by(kept, Path(model.path), tmp_path / "loaded")
    with torch.no_grad():
        assert_close(loaded(tokens).logits, logits(resident(variant), edit, tokens))
    assert report.parameters == sum(each.numel() for each in loaded.parameters())
    np.testing.assert_array_equal(read_list(file, describe_model(model)), list(kept.values()))


def test_the_share_that_vllm_ascend_is_told_keeps_as_many(tmp_path: Path) -> None:
    """For all sizes: 1 - n'/n alone keeps one less of some."""
    assert any(int(n * (1.0 - (1 - k / n))) != k for n in range(2, 513) for k in range(1, n))
    assert all(int(n * (1.0 - (n - k - 0.5) / n)) == k for n in range(2, 513) for k in range(1, n))


@pytest.mark.parametrize(
    ("variant", "edit", "said"),
    [
        ("mixtral", family_edit("mixtral", "merged"), "it merges experts"),
        ("mixtral", family_edit("mixtral", "mapped"), "its router mapping mixes router rows"),
        ("mixtral", family_edit("mixtral", "crossed"), "kept experts have the router rows of others"),
        ("mixtral", family_edit("mixtral", "prune", active=1), "it has 1 active experts per token"),
        ("mixtral", RepairedEdit(family_edit("mixtral", "prune"), RepairSettings(), sample_rows()), "it is repaired"),
        ("mixtral", IdentityEdit(), "it keeps all experts"),
        ("olmoe", family_edit("olmoe", "prune"), "its router mapping acts on the family's routing weights"),
        ("deepseek_v4", family_edit("deepseek_v4", "prune", space="logits"), "its routers have tables"),
    ],
)
def test_a_candidate_that_does_more_is_refused(
    variant: str, edit: Edit, said: str, model_config: Configs, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=rf"--form easy-ep .*: .*{said}.*; export a checkpoint$"):
        export_list(model_config(variant), edit, tmp_path / "kept.json", "easy-ep", CARD)
    assert list(tmp_path.iterdir()) == []


ROW = [0, 1, 1, 0] * 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ('{"1": [0, 5], "1": [0, 6]}', "it has `1` twice"),
        ("3", "expected lists of experts by layer"),
        ({"kept": [0, 5]}, "expected lists of experts by layer"),
        ({"1": [0, 5]}, "layer 2 needs the numbers of the experts that it keeps, from 0 to 7"),
        ({"1": [0, 5], "2": [0, 8]}, "layer 2 needs"),
        ({"1": [0, 5], "2": [0, True]}, "layer 2 needs"),
        ({"1": [0, 5], "2": [0, 5], "3": [0, 5]}, "it names layer 3, which has no experts"),
        ({"1": [0, 5, 5], "2": [0, 5]}, "layer 1 names an expert twice"),
        ({"1": [], "2": [0, 5]}, "layer 1 keeps none or all of 8 experts"),
        ({"1": [*range(8)], "2": [0, 5]}, "cut rankings to the experts to keep"),
        ({"1": [0, 5], "2": [0, 1, 5, 6]}, "some layers keep 2 experts and others 4"),
        ({"1": [0, 1], "2": [0, 5]}, r"layer 1 keeps \[2, 0\] experts of its routing groups"),
        ({"experts": 6, "kept": {}}, "it is for layers of 6 experts, the model's have 8"),
        ([ROW], "a mask has 2 rows, one per MoE layer, of 8 ones and zeros"),
        ([ROW, ROW[1:]], "a mask has 2 rows"),
    ],
)
def test_what_is_no_list_is_refused(content: Any, said: str, model_config: Configs, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError, match=rf"bad\.json: not a list of this model's experts: .*{said}"):
        read_list(file, describe_model(model_config(GROUPED)))


def test_a_layer_that_two_lines_name_is_refused(model_config: Configs, tmp_path: Path) -> None:
    facts, file = describe_model(model_config(GROUPED)), tmp_path / "ranked.jsonl"
    file.write_text('{"2": [6, 3]}\n\n{"1": [5, 0]}\n')
    assert read_list(file, facts).tolist() == [[0, 5], [3, 6]]
    file.write_text('{"2": [6, 3]}\n{"2": [5, 0]}\n')
    with pytest.raises(UserError, match="it names layer 2 again"):
        read_list(file, facts)
