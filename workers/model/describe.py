"""Facts about a model, derived from its config without loading weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError, opening
from moevolve.workers.checkpoints.fingerprint import model_fingerprint
from moevolve.workers.checkpoints.loading import (
    DTYPES,
    check_weights,
    dtype_of,
    load_config,
    model_without_weights,
    packing,
    raw_config,
)
from moevolve.workers.checkpoints.settings import unread_settings
from moevolve.workers.contract.facts import DenseFacts, LinearFacts, ModelFacts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.families.decoder import decoder_of
from moevolve.workers.families.layers import MoELayer, find_dense_layers, find_linears, find_moe_layers
from moevolve.workers.families.registry import family_of
from moevolve.workers.methods.eep.export import width_obstacle

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def describe_model(config: ModelConfig) -> ModelFacts:
    """Derive the facts about a checkpoint from its config and the headers of its files.

    Raises:
        UserError: The checkpoint can't be read, its files aren't those of its model, or its family isn't supported.
    """
    check_weights(config)
    return replace(describe_config(meta_model(config), config), fingerprint=model_fingerprint(config))


def meta_model(config: ModelConfig) -> PreTrainedModel:
    """Build a checkpoint's model without weights, on the meta device, in the dtype that a worker would use.

    Raises:
        UserError: The config can't be read, or the family isn't supported.
    """
    settings = load_config(config)
    family_of(settings, config.path)
    packing(config, settings)
    return model_without_weights(config, settings, DTYPES[dtype_of(config, settings)])


def describe_config(model: PreTrainedModel, config: ModelConfig) -> ModelFacts:
    """Derive the facts about `meta_model(config)`; the fingerprint, which needs the checkpoint's files, is empty."""
    with opening(f"model {config.path}: it can't be described"):
        settings = model.config
        family = family_of(settings, config.path)
        packed = packing(config, settings)
        layers = find_moe_layers(model, config.path)
        first = layers[0] if layers else None
        unread = _unread(config, settings, first)
        return ModelFacts(
            family=family.model_type,
            fingerprint="",
            moe_layers=tuple(layer.index for layer in layers),
            experts=first.count if first else 0,
            active=_active(first, settings, config.path) if first else 0,
            renormalise=first.renormalise if first else False,
            # `parameters()` yields a tied tensor once.
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            expert_parameters=sum(tensor[0].numel() for tensor in first.expert_tensors().values()) if first else 0,
            expert_neurons=int(getattr(settings, first.family.width_field)) if first else 0,
            neuron_parameters=_neuron_parameters(first, settings) if first else 0,
            width_linked=first is not None and width_obstacle(model) is not None,
            shared_neurons=_shared_neurons(first),
            router_parameters_per_expert=first.router_parameters if first else 0,
            correction_parameters=first.correction_parameters if first else 0,
            dtype=dtype_of(config, settings),
            notes=(
                *_notes(model, layers),
                *((f"config.json says more than the family reads: {', '.join(unread)}",) if unread else ()),
                *((f"unpacked from {packed.name} while it loads",) if packed else ()),
            ),
            dense=_dense_facts(model, settings),
            linears=tuple(
                LinearFacts(name, module.out_features, module.in_features, module.bias is not None)
                for name, module in find_linears(model).items()
            ),
            routing=first.rule if first else None,
            unrepairable=first.unrepairable if first else None,
        )


def _unread(config: ModelConfig, settings: PretrainedConfig, first: MoELayer | None) -> list[str]:
    """Return the settings of config.json that nothing reads. Raises a `UserError` if routing isn't what one says."""
    raw = raw_config(config, settings)
    unread = unread_settings(raw, settings)
    rule = None if first is None else first.rule
    if rule is not None:
        said = {"scoring_func": rule.scores.split("_")[0], "norm_topk_prob": rule.renormalise}
        for key, value in (said | {"routed_scaling_factor": rule.scale}).items():
            if key in unread and raw[key] is not None and raw[key] != value:
                raise UserError(
                    f"model {config.path}: config.json has {key}: {raw[key]!r}, which a {settings.model_type} doesn't "
                    f"read, and it computes {value!r}; use the model type that the weights were trained as"
                )
    return unread


def _active(layer: MoELayer, settings: PretrainedConfig, path: str) -> int:
    active = getattr(settings, layer.family.active_field)
    if active is None:
        raise UserError(f"model {path}: its config doesn't say {layer.family.active_field}; add it to config.json")
    if not 1 <= int(active) <= layer.count:
        problem = f"{layer.family.active_field} is {active}, but a layer has {layer.count} experts"
        raise UserError(f"model {path}: in its config {problem}; correct config.json")
    return int(active)


def _neuron_parameters(layer: MoELayer, settings: PretrainedConfig) -> int:
    # The bias of the output projection belongs to an expert as a whole.
    sizes = [tensor[0].numel() for name, tensor in layer.expert_tensors().items() if name != "down_proj_bias"]
    return sum(sizes) // int(getattr(settings, layer.family.width_field))


def _shared_neurons(layer: MoELayer | None) -> int:
    shared = None if layer is None else layer.shared_expert
    return 0 if shared is None else int(shared.get_submodule("down_proj").in_features)  # type: ignore[arg-type]


_SCORE_NOTES = {
    "sigmoid": "experts are scored by sigmoids and chosen with a correction bias",
    "softmax_of_chosen": "the top-k is taken of the logits, before the softmax",
    "sigmoid_of_chosen": "the top-k is taken of the logits plus a correction bias, and weighted by sigmoids",
    "sqrt_softplus_of_chosen": "experts are scored by roots of softplus; first layers may choose them by token ids",
    "sparse_mixer": "two experts are chosen one after the other, and each is weighted by itself",
}


def _notes(model: PreTrainedModel, layers: tuple[MoELayer, ...]) -> tuple[str, ...]:
    if not layers:
        return ("a dense model",)
    first, total = layers[0], len(decoder_of(model).layers)
    rule, notes = first.rule, []
    if not first.renormalise:
        notes.append("the family does not rescale the top-k routing weights to sum 1")
    if rule.scores in _SCORE_NOTES:
        notes.append(_SCORE_NOTES[rule.scores])
    if rule.groups.count > 1:
        notes.append(
            f"a token chooses from {rule.groups.chosen} of {rule.groups.count} groups of experts: "
            "every group keeps as many"
        )
    if len(layers) < total:
        notes.append(f"{total - len(layers)} of {total} layers are dense")
    if first.shared_expert is not None:
        notes.append("a shared expert beside the routed ones stays, and repairs fit its output projection")
    return tuple(notes)


def _dense_facts(model: PreTrainedModel, settings: PretrainedConfig) -> DenseFacts | None:
    layers = find_dense_layers(model)
    if not layers:
        return None
    first = layers[0]
    heads = int(settings.num_attention_heads)
    head_dim = int(getattr(settings, "head_dim", None) or first.hidden // heads)
    rope = getattr(settings, "rope_parameters", None)
    return DenseFacts(
        layers=len(layers),
        hidden=first.hidden,
        width=first.width,
        gated=first.gate is not None,
        bias=first.up.bias is not None,
        heads=heads,
        key_value_heads=int(getattr(settings, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * rope.get("partial_rotary_factor", 1.0)) if rope else 0,
    )
