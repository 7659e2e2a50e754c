"""Reloading an export from disk and comparing it with the edited resident model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moevolve.workers.export.card import Agreement, CheckpointForm
from moevolve.workers.export.native import NATIVE_PREFIX, import_native
from moevolve.workers.model.loading import attention, experts_arguments
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest accepted difference of a logit, as a share of the largest logit."""

_AGREEING = {torch.float32: 1.0, torch.bfloat16: 0.9, torch.float16: 0.9}

PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Question: which of these numbers is the largest: 17, 4 or 23?\nAnswer:",
    "In 1969, two people walked on the Moon for the first time; the third stayed in orbit.",
)


def probe_tokens(resident: ResidentModel) -> tuple[Tensor, ...]:
    """Token sequences to compare on: a few sentences, and one that strides through the vocabulary."""
    vocabulary = int(resident.model.config.vocab_size)
    texts = [resident.tokenizer(text, return_tensors="pt")["input_ids"][:, :64] for text in PROMPTS]
    stride = (torch.arange(48) * 7919 + 13) % vocabulary
    return tuple(ids.to(resident.device) for ids in (*texts, stride[None]) if ids.numel())


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokens: tuple[Tensor, ...]) -> Tensor:
    """Logits at every position of every sequence: float32 [positions, vocabulary], on the host."""
    return torch.cat([model(input_ids=ids, use_cache=False).logits[0].float().cpu() for ids in tokens])


def reload(directory: Path, form: CheckpointForm, resident: ResidentModel) -> PreTrainedModel:
    """Load an export the way the resident model was loaded, from nothing but its files."""
    from transformers import AutoModelForCausalLM

    family = _family_type(directory)
    loader = AutoModelForCausalLM if form == "stock" else import_native(directory)
    model = loader.from_pretrained(
        str(directory),
        dtype=resident.model.dtype,
        use_safetensors=True,
        device_map=resident.config.device_map,
        attn_implementation=attention(resident.config.attn_implementation, family),
        **experts_arguments(resident.config.experts_implementation, family),
    )
    if not resident.config.device_map:
        model.to(resident.device)  # type: ignore[arg-type]  # transformers' decorator hides the signature
    return model.eval()


def _family_type(directory: Path) -> str:
    """Model type of the family that an export is of, or that its modelling code builds on."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return str(config["model_type"]).removeprefix(NATIVE_PREFIX)


def compare(expected: Tensor, found: Tensor, dtype: torch.dtype) -> Agreement:
    """Compare logits position by position.

    Args:
        expected: the edited resident model's, float32 [positions, vocabulary].
        found: the reloaded export's, same shape.
        dtype: parameter dtype of both.
    """
    per_position = (expected - found).abs().amax(dim=1).nan_to_num(nan=float("inf"))
    ranked = per_position.sort().values
    must_agree = max(1, round(_AGREEING[dtype] * len(ranked)))
    scale = max(1.0, float(expected.abs().max()))
    return Agreement(float(ranked[-1]), float(ranked[must_agree - 1]), TOLERANCE[dtype] * scale, len(ranked))
