"""Counts a model's parameters, active parameters and FLOPs per token from its modules.

FLOPs are counted with a multiply and an add as two:

- every matrix that a token is multiplied with counts twice its entries: linear layers, routers, the chosen experts and
  the output head; embeddings, norms, biases, activations and rotary embedding count nothing;
- convolutions of recurrent mixers count twice their entries, their states nothing;
- attention counts 4 x attended positions x heads x head dimension per layer (queries with keys, weights with values).

This is the work of the model's code. A mask that is applied to a finished product saves neither FLOPs nor active
parameters. Modules of native checkpoints are counted by their methods
(`moevolve.workers.contract.methods.Method.module_uses`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.methods import ModuleUse
from moevolve.workers.families.decoder import decoder_of, softmax_attention
from moevolve.workers.families.registry import active_experts
from moevolve.workers.methods.registry import METHODS
from moevolve.workers.profiling.report import ModelCosts

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def model_costs(model: PreTrainedModel, context: int) -> ModelCosts:
    """Count the costs of an unedited model of a supported family, or of a native checkpoint, loaded by `transformers`.

    The token attends to `context` positions, itself included. Raises a `UserError` if a module has matrices that can't
    be counted.
    """
    uses = _uses(model, model.config, "")
    parameters = list(model.parameters())
    total = sum(each.numel() for each in parameters)
    return ModelCosts(
        parameters=total,
        active_parameters=total - sum(use.idle for use in uses),
        weight_bytes=sum(each.nbytes for each in (*parameters, *model.buffers())),
        linear_flops=2 * sum(use.products for use in uses),
        attention_flops=_attention_flops(model, context),
    )


def _uses(module: nn.Module, config: PretrainedConfig, name: str) -> list[ModuleUse]:
    use = _use_of(module, config, name)
    inner = [pair for pair in module.named_children() if pair[1] in use.inner]
    return [use, *(each for child, part in inner for each in _uses(part, config, f"{name}.{child}".lstrip(".")))]


def _use_of(module: nn.Module, config: PretrainedConfig, name: str) -> ModuleUse:
    kind, children = type(module).__name__, tuple(module.children())
    own: dict[str, nn.Parameter] = dict(module.named_parameters(recurse=False))
    for method in METHODS.values():
        if kind in method.module_uses:  # a module of a native checkpoint
            return method.module_uses[kind](module, config)
    if isinstance(module, nn.Linear | nn.Conv1d) or kind.lower().endswith(("topkrouter", "hashrouter")):
        return ModuleUse(0, own["weight"].numel())
    if isinstance(module, nn.Embedding):
        return ModuleUse(0, 0)
    if "down_proj" in own:
        used = _experts(own, active_experts(config))
        if kind == "Llama4TextExperts":  # every token runs all of them
            return replace(used, products=_experts(own, len(own["down_proj"])).products)
        return used
    if kind.endswith(("HyperConnection", "HyperHead")):  # a matrix for the streams of a token, side by side
        return ModuleUse(0, sum(each.numel() for each in own.values() if each.dim() == 2), children)
    if "index_kpool_compress_gate" in own:  # of GLM-5-Next's indexer
        return ModuleUse(0, own["index_kpool_compress_gate"].numel(), children)
    # The decay of Mamba's states, [channels, states], multiplies them number by number, and biases are added.
    if any(each.dim() > 1 for name, each in own.items() if name not in ("A_log", "position_bias")):
        raise UserError(
            f"{name}: no rule says what a token does with the matrices of a {kind}; profile a model of another family"
        )
    return ModuleUse(0, 0, children)


def _experts(own: dict[str, nn.Parameter], active: int) -> ModuleUse:
    """Count fused experts with tensors [n, ...]; a token uses k of them."""
    count, total = len(own["down_proj"]), sum(each.numel() for each in own.values())
    matrices = sum(each.numel() for each in own.values() if each.dim() == 3)
    return ModuleUse(total * (count - active) // count, matrices * active // count)


def _attention_flops(model: PreTrainedModel, context: int) -> int:
    config = model.config
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    rates: dict[str, int] = getattr(config, "compress_rates", None) or {}
    total = 0
    for index, layer in enumerate(decoder_of(model).layers):
        if softmax_attention(layer) is None:
            continue
        slides = kinds is None or kinds[index] == "sliding_attention"
        attended = context if window is None or not slides else min(context, window)
        if window is not None and kinds is not None and kinds[index] in rates:
            # DeepSeek-V4's blocks of earlier tokens, all of them: an indexer may leave some out.
            attended = min(context, window) + context // rates[kinds[index]]
        total += 4 * attended * heads * head_dim
    return total
