"""The `genome` section of a configuration, one class per kind."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from moevolve.search.config_base import Section


class EepSection(Section):
    """The EEP genome: a router mapping and an expert merging matrix per group of layers.

    Attributes:
        experts: retained experts n' per MoE layer.
        active: experts per token k; None keeps the model's (but at most n').
        groups: layers share coefficients within a group: a number of equal contiguous groups, or `per_layer`.
        router_space: `probs` (the paper) or `logits`.
    """

    kind: Literal["eep"] = "eep"
    experts: int = Field(ge=1)
    active: int | None = Field(None, ge=1)
    groups: Annotated[int, Field(ge=1)] | Literal["per_layer"] = 4
    router_space: Literal["probs", "logits"] = "probs"

    @model_validator(mode="after")
    def _active_within_experts(self) -> Self:
        if self.active is not None and self.active > self.experts:
            raise ValueError(f"active {self.active} is more than the {self.experts} retained experts")
        return self


GenomeSection = EepSection
