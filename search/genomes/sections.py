"""The `genome` section of a configuration, one class per kind.

`random_title` says what a kind's random individuals are, in a final table; `parts`, what a listing counts of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from moevolve.search.config.section import Section


class EepSection(Section):
    """The EEP genome: a router mapping and an expert merging matrix per group of layers.

    Attributes:
        experts: retained experts n' per MoE layer; as many in every routing group, in families that have such.
        active: experts per token k; None keeps the model's (but at most what a token can choose from).
        groups: layers share coefficients within a group: a number of equal contiguous groups, or `per_layer`.
        router_space: `probs` (the paper) or `logits`.
        dynamic_skipping: every candidate skips a token's second expert where its routing weight is below the layer's
            median ratio to the first's (NAEE, arXiv 2402.14800, Sec. 3.3), measured on the unedited model; needs k = 2.
        calibration_tokens: tokens of the search prompts that baselines and dynamic skipping are measured on.
        naee_tokens: of these, most that baseline `naee` compares subsets of experts on.
        naee_subsets: most subsets that `naee` tries in full; beyond, it drops experts one by one.
        align: `none` (the paper), or `hungarian`: merge experts whose hidden neurons have been matched with each other
            before.
    """

    random_title: ClassVar[str] = "random pruning"
    parts: ClassVar[str] = "experts"
    kind: Literal["eep"] = "eep"
    experts: int = Field(ge=1)
    active: int | None = Field(None, ge=1)
    groups: Annotated[int, Field(ge=1)] | Literal["per_layer"] = 4
    router_space: Literal["probs", "logits"] = "probs"
    dynamic_skipping: bool = False
    calibration_tokens: int = Field(8192, ge=1)
    naee_tokens: int = Field(1024, ge=1)
    naee_subsets: int = Field(5000, ge=0)
    align: Literal["none", "hungarian"] = "none"

    @model_validator(mode="after")
    def _active_within_experts(self) -> Self:
        if self.active is not None and self.active > self.experts:
            raise ValueError(f"active {self.active} is more than the {self.experts} retained experts")
        return self


class FactorLlmSection(Section):
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
            code), which measured better: a higher probability of the right answers in each of 18 comparisons on the
            dense demo model, a higher accuracy in 14, by 1.8 points on average.
        components: principal directions of a network's inputs in which its routers are searched.
        ridge: regularisation of the routers' closed-form start, as a share of the inputs' mean variance.
        calibration_tokens: tokens of the search prompts that the start is measured on.
    """

    random_title: ClassVar[str] = "random divisions and routers"
    parts: ClassVar[str] = "experts"
    kind: Literal["factorllm"]
    experts: int = Field(ge=2, le=256)
    active: int = Field(ge=1)
    routers: int = Field(1, ge=1, le=3)
    router_bias: bool = True
    partition: Literal["contiguous", "shuffled", "kmeans", "coactivation"] = "kmeans"
    output_scale: Literal["one", "n_over_k"] = "n_over_k"
    components: int = Field(8, ge=0)
    ridge: float = Field(1e-3, gt=0)
    calibration_tokens: int = Field(8192, ge=1)

    @model_validator(mode="after")
    def _active_within_experts(self) -> Self:
        if self.active > self.experts:
            raise ValueError(f"active {self.active} is more than the {self.experts} experts")
        return self


class ToMoeSection(Section):
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
            Balance is that of calibration tokens in the unedited model.
        calibration_tokens: tokens of the search prompts that saliencies and directions are measured on.
    """

    random_title: ClassVar[str] = "random masks and routers"
    parts: ClassVar[str] = "experts"
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


class NanoMoeSection(Section):
    """The NanoMoE genome: chosen linear layers as blockdiag(U) M blockdiag(V), M searched.

    Attributes:
        variant: form of the mixing matrix's blocks: `I` scalars, `II` diagonals, `III` diagonals plus rank one;
            `low_rank` is plain U V, a baseline with nothing to search.
        blocks: K blocks of inputs and of outputs; it divides both. `low_rank` has none.
        rank: r, columns of every block of U and rows of every block of V.
        layers: which linear layers: a shell pattern on names such as `layers.0.mlp.up_proj`.
        fit: rounds of least squares that fit U, V and M together to a layer's weight before the search, whose start
            that is then; 0 starts at plain low rank, where M's blocks are all the identity.
        refine: rounds of alternating least squares on U and V, given a candidate's M: they bring a layer back to its
            weight, whatever M is, and so undo much of what the search finds. On the dense demo model 60 evaluations
            gained 0.006 with one round and 0.037 with none, in exp(-KL).
    """

    random_title: ClassVar[str] = "random mixing"
    parts: ClassVar[str] = "blocks"
    kind: Literal["nanomoe"]
    variant: Literal["I", "II", "III", "low_rank"] = "I"
    blocks: int = Field(4, ge=1, le=1024)
    rank: int = Field(ge=1, le=65535)
    layers: str = "*.mlp.*"
    fit: int = Field(0, ge=0)
    refine: int = Field(0, ge=0)


def _eep_unless_said(value: Any) -> Any:
    return {"kind": "eep"} | value if isinstance(value, dict) else value


AnyGenomeSection = EepSection | FactorLlmSection | ToMoeSection | NanoMoeSection
SECTIONS: dict[str, type[AnyGenomeSection]] = {
    "eep": EepSection,
    "factorllm": FactorLlmSection,
    "tomoe": ToMoeSection,
    "nanomoe": NanoMoeSection,
}
GenomeSection = Annotated[AnyGenomeSection, Field(discriminator="kind"), BeforeValidator(_eep_unless_said)]


def parts_of(kinds: Iterable[str]) -> str:
    """What individuals of some kinds consist of, as a heading: "experts", "blocks", or "experts or blocks"."""
    return " or ".join(dict.fromkeys(section.parts for kind, section in SECTIONS.items() if kind in set(kinds)))
