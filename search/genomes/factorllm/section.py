"""The `genome` section of FactorLLM searches."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from moevolve.search.genomes.contract.base import GenomeSection


class FactorLlmSection(GenomeSection):
    """The FactorLLM genome: every dense feed-forward network divided into equal experts, and linear routers.

    The paper names configurations by their numbers: 1R4E2K has one router, 4 experts and 2 of them active.

    Attributes:
        experts: experts N that a network's neurons are divided among, equally.
        active: experts K per token.
        routers: routers R per network: one that chooses its experts whole (what the paper recommends), or one for each
            of its linear layers (3 in gated networks, 2 in plain ones), each choosing K slices of its layer; a neuron
            then works where all routers chose its expert. Each starts at labels of its own: the K slices of its layer
            whose outputs are nearest the whole layer's.
        router_bias: whether routers have a bias (the paper's have). Without it, and with output_scale `one`, a top-1
            division of a Llama or Mistral is an ordinary Mixtral and can be exported as one.
        partition: how neurons are grouped at the start: in order, at random, by balanced k-means on their input
            weights, or by which fire together.
        output_scale: factor on the sum of the chosen experts' outputs: `one` (the paper) or `n_over_k` (the authors'
            code). On the dense demo model `one` is better for the start on both tasks with 1 of 4, 2 of 4 and 4 of 8
            experts, by 0.3 to 47 points of likeness of predictions; repaired, by 8 with 1 of 4, else by nothing
            (`configs/runs/factorllm-table.yaml`).
        random_division: whether random individuals divide neurons at random too. Without it they have the start's
            division and random routers, which is the paper's Fig. 4 without its router; with `swap_rate: 0` a search
            then looks for routers alone.
        components: principal directions of a network's inputs in which its routers are searched.
        ridge: regularisation of the routers' closed-form start, as a share of the inputs' mean variance.
        calibration_tokens: tokens of the `calibration` rows that the start is measured on.
    """

    random_title: ClassVar[str] = "random divisions and routers"
    kind: Literal["factorllm"]
    experts: int = Field(ge=2, le=256)
    active: int = Field(ge=1)
    routers: int = Field(1, ge=1, le=3)
    router_bias: bool = True
    partition: Literal["contiguous", "shuffled", "kmeans", "coactivation"] = "kmeans"
    output_scale: Literal["one", "n_over_k"] = "one"
    random_division: bool = True
    components: int = Field(8, ge=0)
    ridge: float = Field(1e-3, gt=0)
    calibration_tokens: int = Field(8192, ge=1)

    @model_validator(mode="after")
    def _active_within_experts(self) -> Self:
        if self.active > self.experts:
            raise ValueError(f"active {self.active} is more than the {self.experts} experts")
        return self
