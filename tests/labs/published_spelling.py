"""Gives tiny checkpoints the spelling of published ones, which transformers 4 wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moevolve.workers.families.registry import expert_family

MORE = {"transformers_version": "4.56.2", "a_field_that_nobody_knows": {"kept": [1, None]}}
"""Fields that the installed transformers writes otherwise, or not at all."""


def spell_as_published(folder: Path, **more: Any) -> dict[str, Any]:
    """Rewrite the JSON files of a checkpoint that the installed transformers has written; returns the config.json."""
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    rope = settings.get("rope_parameters") or {}
    if "rope_theta" in rope:  # those that differ by type of layer have one spelling
        del settings["rope_parameters"]
        scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
        settings["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
        settings |= {name: value for name, value in rope.items() if name not in scaling}
    settings["torch_dtype"] = settings.pop("dtype", None)
    family = expert_family(settings["model_type"])
    if family is not None and family.experts_field not in settings:
        settings[family.experts_field] = settings.pop("num_local_experts")
    settings |= MORE | more
    file.write_text(json.dumps(settings, indent=2))
    tokens = folder / "tokenizer_config.json"
    words = json.loads(tokens.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokens.write_text(json.dumps({name: value for name, value in words.items() if name != "backend"}))
    return settings
