"""What a checkpoint's config.json says of its experts, read as JSON: importing torch and transformers takes seconds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from moevolve.kernels.routing_rule import RoutingGroups
from moevolve.workers.checkpoints.files import gguf_file, local_directory, read_json
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.base import DenseFamily
from moevolve.workers.families.registry import FAMILIES, only_inside

# Names of the number of experts beside the family's own: files that transformers wrote may have another than published
# ones.
_EXPERTS = ("num_experts", "num_local_experts")
# Fields with the number of shared experts, which are as wide as routed ones unless another field has their width.
_SHARED, _SHARED_WIDTH = ("n_shared_experts", "num_shared_experts"), "moe_shared_expert_intermediate_size"
_WIDTH = "moe_intermediate_size"


@dataclass(frozen=True, slots=True)
class StatedModel:
    """A model by its config.json alone.

    Attributes:
        family: Its model type.
        experts, active: Experts per MoE layer and per token; 0 for a dense model.
        groups: Routing groups, without limits where the file leaves that to the defaults of its family.
        own_form: True if smaller checkpoints have the checkpoint's own form: its weights are quantised, or the model is
            a part of a multimodal one that transformers doesn't load alone.
        shares_width: True if shared experts are as wide as routed ones, so that these can't be narrower alone.
    """

    family: str
    experts: int = 0
    active: int = 0
    groups: RoutingGroups = field(default=RoutingGroups())
    quantised: bool = False
    own_form: bool = False
    shares_width: bool = False


def stated_model(config: ModelConfig) -> StatedModel | None:
    """Describe a model on this machine; None without a config.json here, or if it doesn't say what is asked.

    Raises:
        UserError: The path is wrong, or the file isn't JSON.
    """
    file = _config_here(config)
    content = None if file is None else read_json(file)
    content = content if isinstance(content, dict) else {}
    found = content if content.get("model_type") in FAMILIES else content.get("text_config")
    text: dict[str, Any] = found if isinstance(found, dict) else {}
    family = FAMILIES.get(str(text.get("model_type")))
    if family is None:
        return None
    packed = any(each.get("quantization_config") is not None for each in (content, text))
    quantised = gguf_file(config) is not None or packed
    own_form = quantised or only_inside(family.model_type)
    if isinstance(family, DenseFamily):
        return StatedModel(family.model_type, quantised=quantised, own_form=own_form)
    experts = next((text[name] for name in (family.experts_field, *_EXPERTS) if name in text), None)
    active = text.get(family.active_field)
    if type(experts) is not int or type(active) is not int:
        return None
    groups = RoutingGroups()
    with suppress(AttributeError, TypeError, ValueError):  # fields that the file leaves out
        groups = family.rule(cast(Any, None), cast(Any, SimpleNamespace(**text))).groups
    shares_width = family.width_field == _WIDTH and _SHARED_WIDTH not in text and any(map(text.get, _SHARED))
    return StatedModel(family.model_type, experts, active, groups, quantised, own_form, shares_width)


def _config_here(config: ModelConfig) -> Path | None:
    """Return the path of a checkpoint's config.json, of a hub id in the hub's cache; None if there is none."""
    folder = local_directory(config)
    if folder is not None:
        return folder / "config.json" if (folder / "config.json").is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(config.path, "config.json", revision=config.revision)
    return Path(found) if isinstance(found, str) else None
