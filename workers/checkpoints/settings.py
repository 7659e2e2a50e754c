"""Which settings in a checkpoint's files are read: one that would change results and isn't applied stops by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from moevolve.evaluators.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Only(NamedTuple):
    """A setting that is read if it has one of some values, or none; any other means `otherwise`."""

    values: tuple[object, ...]
    otherwise: str


# What is known of settings by key: where one is applied, why it can't matter, or which values it may have.
Settings = dict[str, str | Only]

# Values that every program takes for a setting that isn't there.
_NOT_SET: tuple[object, ...] = (None, False, "", [], {})


def check_settings(settings: Mapping[str, Any], known: Settings, where: str) -> None:
    """Refuse settings that change results and aren't applied: those that `known` doesn't list or allow.

    Args:
        settings: Settings as stored.
        known: What is known of each.
        where: The place of the settings, for messages, for example `quantization_config`.

    Raises:
        UserError: One isn't known, or has a value that isn't.
    """
    for key, value in settings.items():
        meaning = known.get(key)
        if value in _NOT_SET or isinstance(meaning, str):
            continue
        said = f"{where} has {key}: {_short(value)}"
        if meaning is None:
            raise UserError(
                f"{said}, which nothing here reads; remove it there if results don't depend on it, or use another "
                "checkpoint"
            )
        if (value.lower() if isinstance(value, str) else value) not in meaning.values:
            only = " or ".join(repr(each) for each in meaning.values)
            raise UserError(
                f"{said}: {meaning.otherwise}, which isn't supported; use a checkpoint "
                f"{f'with {only}' if only else 'without it'}"
            )


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:77]}..."


# Answers are greedy, whatever servers are told to do by default.
_SAMPLING = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "renormalize_logits", "penalty_alpha", "dola_layers", "num_return_sequences"),
)
_BEAMS = ("length_penalty", "early_stopping", "diversity_penalty", "num_beam_groups")
_LENGTHS = ("max_length", "max_new_tokens", "max_time")
_COMPUTING = (
    *("use_mtp", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "output_attentions"),
    *("output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "is_assistant"),
    *(
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_ensemble_weight",
    ),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "speculation_type", "compile_config", "disable_compile", "continuous_batching_config"),
    *("low_memory", "prefill_chunk_size", "remove_invalid_values", "_from_model_config", "transformers_version"),
)
GENERATION_SETTINGS: Settings = {
    "eos_token_id": "applied",
    **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), "prompts are made without it"),
    **dict.fromkeys(_SAMPLING, "of answers that are drawn"),
    "num_beams": Only((1,), "answers are searched with beams"),
    **dict.fromkeys(_BEAMS, "of answers that are searched with beams"),
    **dict.fromkeys(_LENGTHS, "tasks say how long answers are"),
    "guidance_scale": Only((1,), "two distributions are mixed"),
    "encoder_repetition_penalty": Only((1,), "tokens of prompts count more or less"),
    **dict.fromkeys(_COMPUTING, "how to compute"),
}


def check_generation(settings: Mapping[str, Any], where: str) -> None:
    """Refuse settings of a generation_config.json that force or forbid tokens; those of other programs may stand."""
    from transformers import GenerationConfig

    known = GenerationConfig().to_dict()
    check_settings({key: value for key, value in settings.items() if key in known}, GENERATION_SETTINGS, where)


# Values with which settings of rotary embeddings change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("factor", "attention_factor", "partial_rotary_factor", "mscale", "mscale_all_dim"), (1,)),
    **dict.fromkeys(("extrapolation_factor", "attn_factor", "beta_slow"), (1,)),
    "beta_fast": (32,),
    "truncate": (True,),
}


def check_rope(settings: PretrainedConfig, raw: Mapping[str, Any], path: str) -> None:
    """Refuse settings of rotary embeddings that the code of `transformers` for this type and family doesn't mention.

    Args:
        settings: Config of a text model.
        raw: What it was made from, as stored; empty if that isn't known.
        path: The checkpoint, for messages.

    Raises:
        UserError: There is one; or two settings contradict each other, of which one would be read.
    """
    whole = getattr(settings, "rope_parameters", None)
    if not isinstance(whole, dict) or not whole:
        return
    nested = settings.nested_rope_parameter_keys(whole)
    stored = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if not nested and raw.get(key) is not None and stored.get(key, raw[key]) != raw[key]:
            raise UserError(
                f"model {path}: config.json has {key}: {raw[key]} beside rotary settings that say {stored[key]}; "
                "remove the one that isn't the model's"
            )
    if raw.get("rope_scaling") and raw.get("rope_parameters") and raw["rope_scaling"] != raw["rope_parameters"]:
        raise UserError(
            f"model {path}: config.json has rope_scaling and rope_parameters; remove the one that isn't the model's"
        )
    own = _family_code(type(settings))
    for rope in [whole[key] for key in nested] or [whole]:
        for key, value in (rope or {}).items():
            if not _rope_reads(own, rope, key) and value is not None and value not in _NEUTRAL.get(key, ()):
                raise UserError(
                    f"model {path}: the rotary settings in config.json have {key}: {_short(value)}, which transformers "
                    f"doesn't read for a {settings.model_type} with rope_type {rope['rope_type']!r}, so positions "
                    "would be computed without it; correct rope_type, or remove the setting if it changes nothing"
                )


def _rope_reads(own: str, rope: Mapping[str, Any], key: str) -> bool:
    """Return whether a setting of rotary embeddings is mentioned in a family's code, `own`, or in that of its type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = rope.get("rope_type", "default")
    if key in ("type", "rope_type"):
        return kind == "default" or (kind in ROPE_INIT_FUNCTIONS and "ROPE_INIT_FUNCTIONS" in own)
    if key == "original_max_position_embeddings" and kind in ("default", "linear"):
        return True  # a note of how long texts were before a scaling that these types don't depend on
    if f'"{key}"' in own or f".{key}" in own or key == "rope_theta":
        return True
    # A part of a head that isn't turned is the family's code, except for this type.
    alone = key == "partial_rotary_factor" and kind != "proportional"
    return not alone and kind in ROPE_INIT_FUNCTIONS and f'"{key}"' in inspect.getsource(ROPE_INIT_FUNCTIONS[kind])


def _family_code(kind: type[PretrainedConfig]) -> str:
    """Source of the modules that define a config class and its models."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    classes: Iterable[type] = [
        kind,
        *(MODEL_FOR_CAUSAL_LM_MAPPING[kind].__mro__ if kind in MODEL_FOR_CAUSAL_LM_MAPPING else ()),
    ]
    modules = {each.__module__ for each in classes if each.__module__.startswith(("transformers.models.", "moevolve."))}
    return "".join(inspect.getsource(sys.modules[name]) for name in sorted(modules))


# Keys of every config.json that aren't settings of a class.
_GENERAL = {
    "model_type",
    "architectures",
    "auto_map",
    "torch_dtype",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
}


def unread_settings(raw: Mapping[str, Any], settings: PretrainedConfig) -> list[str]:
    """Return the keys of a config.json that the class of its config doesn't have: notes, or of another program."""
    own = {each.name for each in fields(type(settings))} | set(settings.attribute_map) | _GENERAL
    code = _family_code(type(settings))
    return [key for key in raw if key not in own and not key.startswith("_") and key not in code]
