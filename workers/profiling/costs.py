"""What a loaded model costs by its structure: parameters, those that a token uses, and operations per token.

The rule for operations, a multiply and an add counting two:

- every matrix that a token is multiplied with counts twice its entries: linear layers, routers, the chosen experts, the
  output layer; looked-up embeddings, norms, biases, activations and rotary embedding count nothing;
- attention counts 4 x attended positions x heads x head dimension per layer (queries with keys, weights with values).

It is the work that the model's code does. A mask that is applied to a finished product saves nothing: the product
counts whole, in operations and in parameters used. Modules of the code that native checkpoints bring are counted by the
methods that they are of (`moevolve.workers.contract.methods.Method.module_uses`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from moevolve.evaluators.errors import UserError
from moevolve.workers.contract.methods import ModuleUse
from moevolve.workers.methods.registry import module_use

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a model costs.

    Attributes:
        parameters: all of them, a shared tensor once.
        active_parameters: of these, all but those that a token passes by: experts not chosen and other experts'
            neurons. Upper bounds where several routers must agree.
        weight_bytes: bytes of parameters and buffers as loaded, a shared tensor once.
        linear_flops: operations per token in matrix products with weights.
        attention_flops: operations per token in attention, for the last token of a context.
    """

    parameters: int
    active_parameters: int
    weight_bytes: int
    linear_flops: int
    attention_flops: int


def model_costs(model: PreTrainedModel, context: int) -> ModelCosts:
    """Count a causal language model of a supported family, or one that an export brought its own code for.

    Args:
        model: loaded by plain transformers; unedited by this process.
        context: how many positions the token attends to, itself included.

    Raises:
        UserError: a module holds matrices that no rule covers.
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


def matrix_flops(module: nn.Module, config: PretrainedConfig) -> int:
    """Operations per token in a part of a model, attention between positions left out.

    Args:
        module: any part of a model as `model_costs` takes it.
        config: the model's.

    Raises:
        UserError: it holds matrices that no rule covers.
    """
    return 2 * sum(use.products for use in _uses(module, config, type(module).__name__))


def _uses(module: nn.Module, config: PretrainedConfig, name: str) -> list[ModuleUse]:
    use = _use_of(module, config, name)
    inner = [pair for pair in module.named_children() if pair[1] in use.inner]
    return [use, *(each for child, part in inner for each in _uses(part, config, f"{name}.{child}".lstrip(".")))]


def _use_of(module: nn.Module, config: PretrainedConfig, name: str) -> ModuleUse:
    kind, children = type(module).__name__, tuple(module.children())
    own: dict[str, Any] = dict(module.named_parameters(recurse=False))
    native = module_use(kind)
    if native is not None:
        return native(module, config)
    if isinstance(module, nn.Linear) or kind.lower().endswith("topkrouter"):
        return ModuleUse(0, own["weight"].numel())
    if isinstance(module, nn.Embedding):
        return ModuleUse(0, 0)
    if {"gate_up_proj", "down_proj"} <= set(own):
        return _experts(own, int(config.num_experts_per_tok))
    if any(each.dim() > 1 for each in own.values()):
        raise UserError(
            f"{name}: no rule says what a token does with the matrices of a {kind}; profile a model of another family"
        )
    return ModuleUse(0, 0, children)


def _experts(own: dict[str, Any], active: int) -> ModuleUse:
    """Fused experts: every tensor [n, ...], of which a token uses k."""
    count = len(own["gate_up_proj"])
    matrices = sum(each.numel() for each in own.values() if each.dim() == 3)
    return ModuleUse(sum(each.numel() for each in own.values()) * (count - active) // count, matrices * active // count)


def _attention_flops(model: PreTrainedModel, context: int) -> int:
    config: Any = model.config
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    total = 0
    for index in range(len(model.get_decoder().layers)):
        slides = kinds is None or kinds[index] == "sliding_attention"
        attended = context if window is None or not slides else min(context, window)
        total += 4 * attended * heads * head_dim
    return total
