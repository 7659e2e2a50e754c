"""Experts that stay in a checkpoint's files: candidates compute what they do with experts in memory, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from edit_checks import CARD, logits
from families import edit_of_kind, representatives
from gguf_checkpoints import SETTINGS, gguf_checkpoint
from live_bytes import LiveBytes
from packed_checkpoints import LINEAR_FORMATS, MXFP4_SIZES, checkpoint_in_format, mxfp4_checkpoint
from repair_samples import rows_of, sequences_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.checkpoints.loading import load_without_experts, placed
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.messages import EvaluationRequest
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.export.export import export_model
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings
from moevolve.workers.model.resident import ResidentModel
from moevolve.workers.worker import EvaluationWorker

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Configs = Callable[..., ModelConfig]
Checkpoints = Callable[[str], ModelConfig]

KINDS = ("mixtral", "fp8", "mxfp4", "gptq", "fused", "gguf")
MORE = ("fp8_mxfp4", "fp8_matrix", "llama4 int4", "gguf fused")
"""Formats that are read as others of them are, with experts or scales in other tensors."""


@pytest.fixture
def config(
    tiny_model: Callable[..., PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerFast,
    model_config: Configs,
    tmp_path: Path,
) -> Checkpoints:
    """Checkpoints by family, by format, and one whose experts are stored fused."""

    def get(kind: str) -> ModelConfig:
        if kind in ("fp8", "mxfp4", "fp8_mxfp4", "fp8_matrix", "llama4 int4", *LINEAR_FORMATS):
            return checkpoint_in_format(kind, tiny_model, tiny_tokenizer, tmp_path)
        if kind.startswith("gguf"):
            family = "gpt_oss" if kind == "gguf fused" else "mixtral"
            return gguf_checkpoint(tiny_model(family, **SETTINGS[family]), tiny_tokenizer, tmp_path)[0]
        if kind == "fused":
            return fused(tiny_model("qwen3_moe"), tiny_tokenizer, tmp_path / "fused")
        return replace(model_config(kind), dtype="float32")

    return get


def fused(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> ModelConfig:
    """Write a checkpoint with the names and shapes that the model has in memory, as some are published."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file({name: each.contiguous() for name, each in model.state_dict().items()}, folder / "model.safetensors")
    return ModelConfig(str(folder), device="cpu", dtype="float32")


@pytest.mark.parametrize("kind", representatives(KINDS, MORE))
def test_candidates_compute_the_same(kind: str, config: Checkpoints, tokens: Tensor) -> None:
    found = config(kind)
    host, disk = (ResidentModel.load(replace(found, expert_offload=place)) for place in ("host", "disk"))  # type: ignore[arg-type]
    layers = len(host.layers)
    for how in ("mixed", None):
        edit = IdentityEdit() if how is None else edit_of_kind(layers, host.layers[0].count, how, space="logits")
        assert torch.equal(logits(disk, edit, tokens), logits(host, edit, tokens))
    for name, tensor in host.original_experts(0).items():
        assert torch.equal(disk.original_experts(0)[name], tensor)


@pytest.mark.parametrize("kind", representatives(("fp8",), {*KINDS, *MORE}))
def test_short_answers_are_the_same(kind: str, config: Checkpoints) -> None:
    """Token after token, layer after layer."""
    found, examples = (
        config(kind),
        tuple(Example(prompt, ("fox dog",)) for prompt in ("the fox", "dog over the", "fox")),
    )
    split = PreparedSplit("short", "search", "generate", "accuracy", Matching("f1", ()), 5, " ", examples)
    workers = [EvaluationWorker(replace(found, expert_offload=place), EngineConfig()) for place in ("device", "disk")]  # type: ignore[arg-type]
    layers = workers[0].resident.layers
    for edit in (IdentityEdit(), edit_of_kind(len(layers), layers[0].count, "prune", space="logits")):
        here, there = (worker.answer(edit, split) for worker in workers)
        assert here == there
        request = EvaluationRequest(edit, (split.ref,))
        one, other = (worker.evaluate(request, (split,)).results[split.fingerprint] for worker in workers)
        assert (one.score, one.gold_logprob) == (other.score, other.gold_logprob)


def test_no_more_than_one_expert_is_unpacked_beside_those_that_are_kept(
    tiny_model: Callable[..., PreTrainedModel], tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    made = tiny_model("gpt_oss", **MXFP4_SIZES | {"num_local_experts": 32})
    found = mxfp4_checkpoint(made, tiny_tokenizer, tmp_path)[0]
    model, _, stored = load_without_experts(replace(found, expert_offload="disk"))
    parameters = dict(model.get_submodule("model.layers.0.mlp.experts").named_parameters())
    kept = {name: torch.empty((2, *each.shape[1:])) for name, each in parameters.items()}
    whole = sum(each.nbytes for each in parameters.values())
    with LiveBytes() as meter:
        stored.layer(0, parameters).read([5, 9], kept)
    assert 0 < meter.peak < whole / 4


# DeepSeek-V4 (fp8_mxfp4) can't be repaired.
@pytest.mark.parametrize("kind", representatives(("mixtral", "gguf"), {*KINDS, *MORE} - {"fp8_mxfp4"}))
def test_repairs_and_exports_are_the_same(kind: str, config: Checkpoints, tmp_path: Path) -> None:
    found = config(kind)
    written = []
    for place in ("device", "disk"):
        resident = ResidentModel.load(replace(found, expert_offload=place))  # type: ignore[arg-type]
        assert resident.one_layer_at_a_time == (place == "disk")
        rows, layers = rows_of(sequences_of((9, 14, 11))), resident.layers
        edit = RepairedEdit(
            edit_of_kind(len(layers), layers[0].count, "prune", space="logits"),
            RepairSettings((0.1,), neurons=True),
            rows,
        )
        report = export_model(resident, edit, tmp_path / place, CARD)
        written.append(load_file(report.directory / "model.safetensors"))
        assert isinstance(resident.applied, IdentityEdit)
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())


def test_a_missing_expert_is_named_when_the_model_is_loaded(config: Checkpoints, tmp_path: Path) -> None:
    found = config("fused")
    file = Path(found.path) / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    del tensors["model.layers.1.mlp.experts.down_proj"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"tensor \S+layers.1.mlp.experts.0.down_proj.weight isn't in the files"):
        ResidentModel.load(replace(found, expert_offload="disk"))


def test_on_a_cpu_they_stay_on_disk(config: Checkpoints) -> None:
    found = replace(config("mixtral"), expert_offload="disk")
    assert placed(found, "cpu").expert_offload == "disk"
    assert placed(replace(found, expert_offload="host"), "cpu").expert_offload == "device"
