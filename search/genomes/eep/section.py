"""The `genome` section of EEP searches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moevolve.search.genomes.contract.base import GenomeSection
from moevolve.workers.contract.edits import ALL_TOKENS

Tokens = Annotated[int, Field(ge=1)] | Literal["all"]
"""How many tokens of the `calibration` rows are run: whole prompts up to so many, or every prompt."""


def limit_of(tokens: Tokens) -> int:
    """The limit on tokens that a setting means."""
    return ALL_TOKENS if tokens == "all" else tokens


class EepSection(GenomeSection):
    """The EEP genome: a router mapping and an expert merging matrix per group of layers.

    Attributes:
        experts: retained experts n' per MoE layer; as many in every routing group, in families that have such.
        active: experts per token k; None keeps the model's (but at most what a token can choose from).
        groups: layers share coefficients within a group: a number of equal contiguous groups, or `per_layer`.
        router_space: `probs` (the paper) or `logits`.
        dynamic_skipping: every candidate skips a token's second expert where its routing weight is below the layer's
            median ratio to the first's (NAEE, arXiv 2402.14800, Sec. 3.3); needs k = 2.
        skipping_tokens: tokens of the `calibration` rows that these medians are measured on, for every candidate anew;
            a number or `all`.
        calibration_tokens: tokens of the `calibration` rows that baselines are measured on, a number or `all`. What is
            summed over tokens takes no more memory for more of them.
        naee_tokens: of these, most that baseline `naee` compares subsets of experts on, evenly spaced; n^2 numbers are
            kept for each in every layer, which may take 4 GiB of the host's memory.
        naee_subsets: most subsets that `naee` tries in full; beyond, it drops experts one by one.
        fitted_tokens, fitted_subsets: the same for baseline `fitted`, where a subset takes a factorisation.
    """

    random_title: ClassVar[str] = "random pruning"
    counted: ClassVar[str] = "{experts} retained, {active} active"
    kind: Literal["eep"] = "eep"
    experts: int = Field(ge=1)
    active: int | None = Field(None, ge=1)
    groups: Annotated[int, Field(ge=1)] | Literal["per_layer"] = 4
    router_space: Literal["probs", "logits"] = "probs"
    dynamic_skipping: bool = False
    skipping_tokens: Tokens = 2048
    calibration_tokens: Tokens = 8192
    naee_tokens: int = Field(1024, ge=1)
    naee_subsets: int = Field(5000, ge=0)
    fitted_tokens: int = Field(512, ge=2)
    fitted_subsets: int = Field(500, ge=0)

    @model_validator(mode="after")
    def _active_within_experts(self) -> Self:
        if self.active is not None and self.active > self.experts:
            raise ValueError(f"active {self.active} is more than the {self.experts} retained experts")
        return self
