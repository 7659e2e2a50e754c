"""The settings of EEP searches, checked against a model's family."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import NO_SCORES, NO_SKIPPING
from moevolve.search.genomes.contract.base import MOST_PARTS, MOST_TOKENS, GenomeSection
from moevolve.workers.contract.edits import ALL_TOKENS
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.methods.eep.edit import RouterSpace, Until

# Number of tokens of the `calibration` rows: whole prompts up to that many, or all prompts.
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)] | Literal["all"]


# Largest expected loss by errors of scores in any layer, as a share of the kept experts' scores.
_LOSS = 0.002


def token_limit(tokens: TokenCount) -> int:
    """Return the limit on tokens that a setting stands for."""
    return ALL_TOKENS if tokens == "all" else tokens


class EepSection(GenomeSection):
    """The EEP genome: a router mapping and an expert merging matrix per group of layers.

    Attributes:
        experts: Number of kept experts n' per MoE layer; equally many per routing group if the family has these.
            None tries several, with `neuron_share`: from all n by halves down to the fewest that hold the share as
            wide as original experts. Numbers are left out that keep less than others since they don't divide the
            share evenly.
        neuron_share: Share of the model's expert neurons that all kept experts have together; None is n' / n, so that
            kept experts are as wide as original ones.
        active: Number of active experts k per token; None keeps the model's, or the most that a token can choose from.
        groups: Number of equal contiguous groups of layers that share coefficients, or `per_layer`.
        router_space: Space that the router mapping acts on: `probs` (the paper) or `logits`. None is the one in which a
            pruned model's router is a smaller one of its family, so that checkpoints are stock (`stock_space`).
        dynamic_skipping: Skip a token's second expert if the ratio of its routing weight to the
            first one's is below the layer's median (NAEE, arXiv 2402.14800, Sec. 3.3); needs k = 2.
        calibration_tokens: Number of calibration tokens on which experts are measured, and for every candidate these
            medians, or `all`.
        calibration_most: Scores that are sums over tokens, which need no more memory, are measured on twice as many
            tokens again and again until they are accurate (`moevolve.workers.methods.eep.accuracy`), or on so many.
        naee_tokens: Largest number of calibration tokens, evenly spaced, on which the baseline `naee` compares subsets.
            It keeps n^2 numbers per token and layer, up to 4 GiB of host memory.
    """

    random_title: ClassVar[str] = "random pruning"
    count_format: ClassVar[str] = "{experts} kept, {active} active"
    phase_kinds: ClassVar[tuple[str, ...]] = ("prune", "merge")
    kind: Literal["eep"] = "eep"
    experts: int | None = Field(None, ge=1, le=MOST_PARTS)
    neuron_share: float | None = Field(None, gt=0, le=1)
    active: int | None = Field(None, ge=1, le=MOST_PARTS)
    groups: Annotated[int, Field(ge=1, le=MOST_PARTS)] | Literal["per_layer"] = 4
    router_space: RouterSpace | None = None
    dynamic_skipping: bool = False
    calibration_tokens: TokenCount = 8192
    calibration_most: TokenCount = 131072
    naee_tokens: int = Field(1024, ge=1, le=MOST_TOKENS)

    @model_validator(mode="after")
    def _keeps_the_active_ones(self) -> Self:
        if self.experts is None and self.neuron_share is None:
            raise ValueError(
                "experts: give the number of experts to keep per layer, or neuron_share to try several numbers"
            )
        if self.active is not None and self.experts is not None and self.active > self.experts:
            raise ValueError(f"active {self.active} is more than the {self.experts} kept experts")
        return self

    def check_experts(self, family: str, experts: int) -> None:
        if not experts:
            raise UserError(f"genome.kind: {self.kind} needs MoE layers, and this model ({family}) is dense")
        if self.experts is not None and self.experts > experts:
            raise UserError(f"genome.experts: {self.experts} is more than the model's {experts} experts")

    def until(self, retained: int) -> Until | None:
        """Return when scores are accurate enough by which so many experts are kept; None for a fixed number of tokens.

        A calibration on a fixed number of tokens is the same for any number of kept experts.
        """
        most = token_limit(self.calibration_most)
        is_fixed = most <= token_limit(self.calibration_tokens)
        return None if is_fixed else Until(retained, _LOSS, most)

    def active_in(self, facts: ModelFacts, retained: int) -> int:
        """Return the number of active experts of a model with so many kept ones.

        Raises:
            UserError: The model's family doesn't support the settings; the message names the field.
        """
        groups = facts.rule.groups
        problem = groups.fault(retained)
        if problem is not None:
            raise UserError(f"genome.experts: {retained} experts of a {facts.family} model {problem}")
        active = self.active or min(facts.active, groups.reach(retained))
        problem = facts.rule.active_fault(retained, active)
        if problem is not None:
            raise UserError(f"genome.active: {active} active experts of a {facts.family} model {problem}")
        if not facts.rule.has_scores and self.router_space == "probs":
            raise UserError(f"genome.router_space ({facts.family} model): {NO_SCORES}")
        if not facts.rule.can_skip and self.dynamic_skipping:
            raise UserError(f"genome.dynamic_skipping ({facts.family} model): {NO_SKIPPING}")
        active = min(active, groups.reach(retained))
        if self.dynamic_skipping and active != 2:
            raise UserError(f"genome.dynamic_skipping requires 2 active experts per token, not {active}; leave it out")
        return active
