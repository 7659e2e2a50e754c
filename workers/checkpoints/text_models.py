"""The text models of multimodal checkpoints: the family that computes the same on text, and their tensors' names there.

The text models of Qwen3.5, Kimi-K2.5 and others are of a supported family. Others are of classes that differ from one
in the positions of images only (rotary embeddings in three dimensions, which are equal for text), and have no causal
language model of their own in `transformers`: they load as that family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from moevolve.workers.checkpoints.headers import EXPERT
from moevolve.workers.families.registry import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ReadableTensor(Protocol):
    """A tensor that is read from its files on `tensor[...]`, or some of its experts on `tensor[first:last]`."""

    def __getitem__(self, which: EllipsisType | slice) -> Tensor: ...

    def empty(self) -> Tensor:
        """Return a tensor of the same shape and dtype on the meta device; nothing is read."""


# Model type of the family that computes the same as a text model, and the settings that it has no field for.
SAME_ON_TEXT: dict[str, tuple[str, dict[str, bool]]] = {
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_omni_moe_text": ("qwen3_moe", {}),
    "glm4v_moe_text": ("glm4_moe", {"use_qk_norm": False}),
}

# Model types of checkpoints whose text models' tensors have names that `transformers` knows for a multimodal model type
# only, and the latter.
_NAMED_BY_WHOLE = {
    "minimax_m3_vl": "minimax_m3_vl",
    "step3p7": "step3p7",
    "step3p5": "step3p7",
    "mistral_large4": "mistral_large4",
}

# Beginnings of the names of other parts in checkpoints whose text models have the names that they have alone.
_PARTS_BESIDE = (
    "vision_model.",
    "vit_large_projector.",
    "vision_encoder.",
    "pre_mm_projector_norm.",
    "patch_merger.",
    "vision_language_adapter.",
)

# Beginnings of the names of text models' tensors in multimodal checkpoints, and in those of their family.
_STEMS = (("model.language_model.", "model."), ("language_model.model.", "model."), ("language_model.", ""))
# Beginnings of the names of a multimodal model's modules for text.
_TEXT_PARTS = ("model.language_model.", "lm_head.")

_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")


def text_config(settings: PretrainedConfig) -> PretrainedConfig:
    """Return the config of a checkpoint's text model as its family has it; `settings` itself without a text model."""
    text = inner = settings.get_text_config()
    family, fixed = SAME_ON_TEXT.get(text.model_type, (text.model_type, {}))
    if settings.model_type in FAMILIES or family not in FAMILIES:
        return settings
    if family != text.model_type:
        from transformers import CONFIG_MAPPING

        kind = CONFIG_MAPPING[family]
        # A family reads some settings that its class doesn't declare, as Qwen3-MoE reads head_dim.
        names = {each.name for each in (*fields(kind), *fields(text)) if each.init}
        found = {name: getattr(text, name) for name in sorted(names) if hasattr(text, name)}
        rope = {name: value for name, value in text.rope_parameters.items() if name not in _IMAGE_POSITIONS}
        text = kind(**{**found, "rope_parameters": rope, **fixed})
    text.tie_word_embeddings = getattr(settings, "tie_word_embeddings", text.tie_word_embeddings)
    for name in ("quantization_config", "dtype"):
        stated = [value for each in (inner, settings) if (value := getattr(each, name, None)) is not None]
        if stated:
            setattr(text, name, stated[0])
    return text


@contextmanager
def published_names(whole: PretrainedConfig) -> Iterator[None]:
    """Context manager in which `transformers` knows the names of a text model's tensors in a checkpoint.

    The config is that of the `whole` checkpoint.
    """
    from transformers.conversion_mapping import (
        PermuteForRope,
        WeightRenaming,
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    text = whole.get_text_config().model_type
    if whole.model_type not in _NAMED_BY_WHOLE:
        yield
        return
    own = get_checkpoint_conversion_mapping(text) or []
    names = []
    for each in get_checkpoint_conversion_mapping(_NAMED_BY_WHOLE[whole.model_type]):
        source, target = each.source_patterns[0], each.target_patterns[0]
        # Anchored patterns rename whole parts of a multimodal model; of the text model, some are renamed already.
        if source.startswith("^"):
            if text_name(source.replace("\\", "").removeprefix("^")) is None and target.startswith(_TEXT_PARTS):
                names.append(WeightRenaming(source, text_name(target) or target))
        elif not any(isinstance(operation, PermuteForRope) for operation in getattr(each, "operations", ())):
            names.append(each)
    register_checkpoint_conversion_mapping(text, [*names, *own], overwrite=True)
    try:
        yield
    finally:
        register_checkpoint_conversion_mapping(text, own, overwrite=True)


def text_fields(settings: dict[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Return the part of a config.json that describes the text model, whose config as its family has it is `config`."""
    # Qwen3-Omni's model of text is inside one that reads images and sounds.
    outer = settings.get("thinker_config", settings)
    inner = outer.get("text_config", {})
    kind = str(inner.get("model_type"))
    return inner if config.model_type in (kind, SAME_ON_TEXT.get(kind, ("", {}))[0]) else settings


def text_name(name: str) -> str | None:
    """Return the name, or its beginning, that a tensor of a multimodal checkpoint has in its text model's family.

    Returns:
        The name; None if it isn't that of a text model's tensor, or the checkpoint isn't multimodal.
    """
    if name.startswith("thinker."):  # Qwen3-Omni's model of text, beside the one that talks
        inner = name.removeprefix("thinker.")
        return text_name(inner) or (inner if inner.startswith(("model.", "lm_head.")) else None)
    return next((new + name.removeprefix(old) for old, new in _STEMS if name.startswith(old)), None)


@dataclass(frozen=True, slots=True)
class _Turned:
    """Fused experts that a checkpoint may store transposed, as Qwen3-VL's does.

    Attributes:
        tensor: The stored tensor [n, ...], which is returned on `tensor[...]`, and some of its experts on a slice.
        shape: Shape of an expert in the family.
    """

    tensor: ReadableTensor
    shape: tuple[int, int]

    def __getitem__(self, which: EllipsisType | slice) -> Tensor:
        return self._turned(self.tensor[which])

    def empty(self) -> Tensor:
        return self._turned(self.tensor.empty())

    def _turned(self, values: Tensor) -> Tensor:
        return values if tuple(values.shape[1:]) == self.shape else values.mT.contiguous()


@dataclass(frozen=True, slots=True)
class _Numbered:
    """Fused experts [n, in, out] whose matrices [out, in] are stored one by one.

    `matrices` has those of every expert that are put side by side.
    """

    matrices: tuple[tuple[ReadableTensor, ...], ...]

    def __getitem__(self, which: EllipsisType | slice) -> Tensor:
        chosen = self.matrices if which is ... else self.matrices[which]
        return torch.stack([torch.cat([each[...] for each in expert]).mT for expert in chosen])

    def empty(self) -> Tensor:
        return torch.stack([torch.cat([each.empty() for each in expert]).mT for expert in self.matrices])


# Ends of the names of a Llama-4 expert's matrices that are stored one by one, by the name of the fused tensor.
_LLAMA4_EXPERTS = {"gate_up_proj": (".gate_proj.weight", ".up_proj.weight"), "down_proj": (".down_proj.weight",)}


def _llama4_tensors(tensors: Mapping[str, ReadableTensor]) -> Mapping[str, ReadableTensor]:
    """Fuse the experts of a Llama-4 that are stored one by one and transposed.

    That is how `transformers` runs, and stores, those that compressed-tensors has quantised.
    """
    fused: dict[str, ReadableTensor] = {}
    blocks: dict[str, dict[int, dict[str, ReadableTensor]]] = {}
    for name, tensor in tensors.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            fused[name] = tensor
        else:
            blocks.setdefault(match["block"], {}).setdefault(int(match["expert"]), {})[match["rest"]] = tensor
    for block, experts in blocks.items():
        for name, ends in _LLAMA4_EXPERTS.items():
            matrices = tuple(tuple(experts[i][end] for end in ends if end in experts[i]) for i in sorted(experts))
            if all(len(each) == len(ends) for each in matrices):
                fused[f"{block}.{name}"] = _Numbered(matrices)
    return fused


def text_tensors(tensors: Mapping[str, ReadableTensor], config: PretrainedConfig) -> Mapping[str, ReadableTensor]:
    """Return the tensors of a checkpoint's text model by their names in its family; all if it has no other part.

    The config is the text model's as its family has it.
    """
    named = {text_name(name): tensor for name, tensor in tensors.items()}
    if set(named) <= {None}:
        found = {name: tensor for name, tensor in tensors.items() if not name.startswith(_PARTS_BESIDE)}
    else:
        # Some checkpoints have the text model's head beside the text model.
        found = {name: tensor for name, tensor in tensors.items() if name.startswith("lm_head.")}
        found |= {name: tensor for name, tensor in named.items() if name is not None}
        width = getattr(config, "moe_intermediate_size", 0)
        hidden = getattr(config, "moe_hidden_size", config.hidden_size)
        shapes = {".experts.gate_up_proj": (2 * width, hidden), ".experts.down_proj": (hidden, width)} if width else {}
        for name, tensor in found.items():
            found[name] = next((_Turned(tensor, shape) for end, shape in shapes.items() if name.endswith(end)), tensor)
    return _llama4_tensors(found) if config.model_type == "llama4_text" else found
