"""What tests of edits and of exports do alike: compute with an edit applied, and compare."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from moevolve.workers.contract.card import ExportCard, ExportReport, MtpLayers
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.source import export_source, plan_source
from moevolve.workers.model.resident import ResidentModel

CARD = ExportCard("A small model", "someone/base", "f00d", "trial", "42", "trial#17", (), ())

Residents = Callable[..., ResidentModel]
Computed = tuple[Tensor, list[list[int]]]
Found = list[tuple[list[list[list[float]]], list[list[int]], str]]


def addresses(model: ResidentModel) -> tuple[int, ...]:
    """Of the expert tensors the model runs on now: equal addresses mean that no weights were copied."""
    return tuple(tensor.data_ptr() for layer in model.layers for tensor in layer.expert_tensors().values())


def write_source(
    model: ModelConfig,
    edit: Edit,
    directory: Path,
    card: ExportCard = CARD,
    mtp: MtpLayers = "drop",
    requantise: bool = False,
) -> ExportReport:
    """Plan an export in the checkpoint's format, and write it."""
    return export_source(model, edit, plan_source(model, edit, mtp), directory, card, requantise)


@torch.inference_mode()
def logits(model: ResidentModel, edit: Edit | None, ids: Tensor) -> Tensor:
    if edit is None:
        return model.model(ids).logits
    with model.edited(edit):
        return model.model(ids).logits


@torch.inference_mode()
def computed(model: ResidentModel, edit: Edit, ids: Tensor) -> Computed:
    """Logits, and how the edited model goes on with a prompt."""
    prompt = model.tokenizer("the quick brown", return_tensors="pt")
    with model.edited(edit):
        text = model.model.generate(**prompt, max_new_tokens=4, do_sample=False)
        return model.model(ids).logits, text.tolist()


def digest(model: ResidentModel) -> str:
    """Of every bit of the model's state."""
    whole = hashlib.sha256()
    for name, tensor in sorted(model.model.state_dict().items()):
        whole.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert torch.isfinite(expected).all()
    assert float((found - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


def assert_same_elsewhere(expected: Mapping[Path, Computed], found: Found) -> None:
    """What exports compute in a process without moevolve; a directory's name ends with its form."""
    for (directory, (scores, text)), (other, other_text, module) in zip(expected.items(), found, strict=True):
        scale = max(1.0, float(scores.abs().max()))
        assert float((torch.tensor(other) - scores).abs().max()) <= 2e-5 * scale, directory
        assert other_text == text, directory
        assert module == ("transformers" if directory.name.endswith("stock") else "transformers_modules"), directory
