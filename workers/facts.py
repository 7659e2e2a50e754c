"""What a search needs to know of a model, from its config alone: nothing here loads weights.

torch and transformers are imported where they are needed, so that listings on the command line don't pay for them.
"""

from __future__ import annotations

from moevolve.workers.config import ModelConfig
from moevolve.workers.fingerprint import model_fingerprint
from moevolve.workers.messages import ModelFacts

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def describe_model(config: ModelConfig) -> ModelFacts:
    """Facts of a mixture-of-experts checkpoint; the model is built on the meta device.

    Args:
        config: the checkpoint and how a worker would hold it.

    Raises:
        UserError: the checkpoint can't be read, its family isn't supported, or it has no experts.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from moevolve.workers.layout import EXPERT_TENSORS, family_of, find_moe_layers
    from moevolve.workers.loading import load_config

    settings = load_config(config)
    family = family_of(settings, config.path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    model.tie_weights()
    layers = find_moe_layers(model, config.path)
    first = layers[0]
    notes = []
    if not first.renormalise:
        notes.append("the family does not rescale the top-k routing weights to sum 1")
    if len(layers) < len(model.model.layers):
        notes.append(f"{len(model.model.layers) - len(layers)} of {len(model.model.layers)} layers are dense")
    if hasattr(first.block, "shared_expert"):
        notes.append("a shared expert beside the routed ones stays as it is")
    return ModelFacts(
        family=family.model_type,
        fingerprint=model_fingerprint(config),
        moe_layers=tuple(layer.index for layer in layers),
        experts=first.count,
        active=int(settings.num_experts_per_tok),
        renormalise=first.renormalise,
        # `parameters()` yields a tied tensor once.
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        expert_parameters=sum(getattr(first.experts, name)[0].numel() for name in EXPERT_TENSORS),
        router_parameters_per_expert=int(first.router_weight.shape[1]),
        dtype_bytes=DTYPE_BYTES[config.dtype],
        notes=tuple(notes),
    )


def parameters_after(facts: ModelFacts, retained: int, native: bool = False) -> int:
    """Parameters of the model with n' experts per MoE layer.

    Args:
        facts: the unedited model.
        retained: experts n' per MoE layer.
        native: count the form that keeps the whole router and an [n', n] mapping beside it (continuous mappings of the
            softmax), rather than a router of n' rows.
    """
    dropped = facts.experts - retained
    per_layer = -dropped * facts.expert_parameters
    per_layer += retained * facts.experts if native else -dropped * facts.router_parameters_per_expert
    return facts.parameters + len(facts.moe_layers) * per_layer


def active_parameters(facts: ModelFacts, retained: int, active: int, native: bool = False) -> int:
    """Parameters a token passes through with n' experts retained and k active: all but the experts not chosen."""
    idle = (retained - active) * facts.expert_parameters
    return parameters_after(facts, retained, native) - len(facts.moe_layers) * idle
