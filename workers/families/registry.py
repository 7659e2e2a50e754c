"""The model families there are. A new one is a file beside this one, and a line here.

A family whose routers choose or weigh as none before needs its rule in `moevolve.kernels` too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.workers.families.base import DenseFamily, ExpertFamily
from moevolve.workers.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE
from moevolve.workers.families.gpt_oss import GPT_OSS
from moevolve.workers.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from moevolve.workers.families.mixtral import MIXTRAL
from moevolve.workers.families.opt import OPT
from moevolve.workers.families.phi import PHI
from moevolve.workers.families.qwen_moe import OLMOE, QWEN2_MOE, QWEN3_MOE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES: dict[str, ExpertFamily | DenseFamily] = {
    family.model_type: family
    for family in (
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        GLM4_MOE,
        GPT_OSS,
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        OPT,
        PHI,
    )
}
"""Model type -> family, in the order in which users are told of them."""


def family_of(config: PretrainedConfig, name: str) -> ExpertFamily | DenseFamily:
    """The family of a model's config, of mixture-of-experts or of dense networks.

    Args:
        config: a `transformers` config.
        name: the model as the user named it, for the message.

    Raises:
        UserError: the model type is not supported.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(f"{f.model_type} ({f.title})" for f in FAMILIES.values())
        raise UserError(
            f"model {name}: model type {config.model_type!r} is not supported; use a checkpoint of one of: {known}"
        )
    return family


def expert_family(model_type: str) -> ExpertFamily | None:
    """The family of a model type; None where it is none of experts."""
    family = FAMILIES.get(model_type)
    return family if isinstance(family, ExpertFamily) else None


def dense_family(model_type: str) -> DenseFamily | None:
    """The family of a model type; None where it is none of dense networks."""
    family = FAMILIES.get(model_type)
    return family if isinstance(family, DenseFamily) else None


def maskable_types() -> tuple[str, ...]:
    """Model types whose heads can be masked; see `DenseFamily.masks_heads`."""
    return tuple(each.model_type for each in FAMILIES.values() if isinstance(each, DenseFamily) and each.masks_heads)
