"""The `genome` section of ToMoE searches."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from moevolve.search.genomes.contract.base import GenomeSection


class ToMoeSection(GenomeSection):
    """The ToMoE genome: overlapping expert masks on dense feed-forward networks, and masks on attention heads.

    Attributes:
        experts: experts N per layer; one is active per token.
        budget: active parameters p of the masked parts, as a share of the original ones, as the paper counts them:
            without routers, and without the values that a token's mask drops, though they are computed first. Every
            candidate has at most that many, and fewer by less than one neuron's.
        attention: mask the heads' dimensions too (Llama, Mistral, Qwen2), instead of the feed-forward networks alone.
        embedding: size of an expert's embedding.
        latent: searched coordinates per expert, which the embedding is a fixed projection of.
        components: principal directions of a layer's inputs in which the router is searched.
        start: the first individual's experts: for the two ends of every principal direction, or all with the mask of
            the most salient neurons.
        coverage, balance: weights of the paper's union-coverage and load-balance terms as penalties on the fitness.
            Balance is that of calibration tokens in the unedited model. The paper has 2 and 1, beside a loss without
            bound; a fitness of at most 1 is outweighed by these (`configs/runs/tomoe-table.yaml`).
        calibration_tokens: tokens of the `calibration` rows that saliencies and directions are measured on.
    """

    random_title: ClassVar[str] = "random masks and routers"
    kind: Literal["tomoe"]
    experts: int = Field(8, ge=1)
    budget: float = Field(0.5, gt=0, le=1)
    attention: bool = True
    embedding: int = Field(128, ge=1)
    latent: int = Field(8, ge=1)
    components: int = Field(8, ge=0)
    start: Literal["directions", "saliency"] = "directions"
    coverage: float = Field(0.0, ge=0)
    balance: float = Field(0.0, ge=0)
    calibration_tokens: int = Field(8192, ge=1)
