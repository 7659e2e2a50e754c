"""The settings and the space that kinds share whose candidates keep some of a model's experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from moevolve.evaluators.errors import UserError
from moevolve.kernels.routing_rule import NO_SCORES, NO_SKIPPING
from moevolve.search.genomes.contract.arrays import A, ArraySpace
from moevolve.search.genomes.contract.base import MOST_PARTS, MOST_TOKENS, GenomeSection
from moevolve.search.genomes.experts.subsets import Subsets
from moevolve.workers.contract.edits import ALL_TOKENS, Measurement
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.fitting import FitRows, RowsMeasurement
from moevolve.workers.methods.eep.edit import RouterSpace, Until, stock_space

TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)] | Literal["all"]
"""Number of tokens of the `calibration` rows: whole prompts up to that many, or all prompts."""


def token_limit(tokens: TokenCount) -> int:
    """Return the limit on tokens that a setting stands for."""
    return ALL_TOKENS if tokens == "all" else tokens


class ExpertsSection(GenomeSection):
    """Settings of which experts are kept, and of their measurement.

    Attributes:
        experts: Number of kept experts n' per MoE layer; equally many per routing group if the family has these.
            None if it is searched, which not every kind can.
        active: Number of active experts k per token; None keeps the model's, or the most that a token can choose from.
        router_space: Space that the router mapping acts on: `probs` (the paper) or `logits`. None is the one in which a
            pruned model's router is a smaller one of its family, so that checkpoints are stock (`stock_space`).
        dynamic_skipping: Skip a token's second expert if the ratio of its routing weight to the
            first one's is below the layer's median (NAEE, arXiv 2402.14800, Sec. 3.3); needs k = 2.
        skipping_tokens: Number of calibration tokens for these medians, which are measured for every candidate, or
            `all`.
        calibration_tokens: Number of calibration tokens on which experts are measured, or `all`.
        calibration_loss: Scores that are sums over tokens, which need no more memory, are measured on twice as many
            tokens again and again until the expected loss by their errors is at most this in every layer, as a share
            of the kept experts' scores (`moevolve.workers.methods.eep.accuracy`).
        calibration_most: Largest number of tokens that they are measured on, if there are so many `calibration` rows.
    """

    count_format: ClassVar[str] = "{experts} kept, {active} active"
    experts: int | None = Field(None, ge=1, le=MOST_PARTS)
    active: int | None = Field(None, ge=1, le=MOST_PARTS)
    router_space: RouterSpace | None = None
    dynamic_skipping: bool = False
    skipping_tokens: TokenCount = 2048
    calibration_tokens: TokenCount = 8192
    calibration_loss: float = Field(0.002, ge=0, le=1)
    calibration_most: TokenCount = 131072

    @property
    def most_active(self) -> tuple[str, int | None]:
        """The setting of the number of active experts, and the largest number of a layer; None for the model's."""
        return "active", self.active

    def until(self, retained: int) -> Until | None:
        """Return when scores are accurate enough by which so many experts are kept; None for a fixed number of tokens.

        A calibration on a fixed number of tokens is the same for any number of kept experts.
        """
        most = token_limit(self.calibration_most)
        is_fixed = most <= token_limit(self.calibration_tokens)
        return None if is_fixed else Until(retained, self.calibration_loss, most)

    @model_validator(mode="after")
    def _keeps_the_active_ones(self) -> Self:
        name, active = self.most_active
        if active is not None and self.experts is not None and active > self.experts:
            raise ValueError(f"{name} {getattr(self, name)} is more than the {self.experts} kept experts")
        return self


@dataclass(frozen=True, kw_only=True)
class ExpertsSpace(ArraySpace[A]):
    """What spaces have in common whose genomes keep some of a model's experts.

    Attributes:
        experts: Number of original experts n per MoE layer.
        retained: Number of retained experts n' per MoE layer; the largest one if it is searched.
        active: Number of active experts k per token after the edit; the largest one if n' is searched, and the mean
            rounded up if layers may differ.
        router_space: See `ExpertsSection`; never None.
        dynamic_skipping: See `ExpertsSection`.
        measurement: Measurements for dynamic skipping, importance and baselines; None if there are none.
    """

    experts: int
    retained: int
    active: int
    router_space: RouterSpace
    dynamic_skipping: bool = False
    measurement: Measurement | None = None

    @classmethod
    def checked(cls, section: ExpertsSection, facts: ModelFacts, **own: Any) -> Self:
        """Make the space of a model from settings that all kinds have, and the kind's `own` attributes.

        Raises:
            UserError: The model doesn't support the settings; the message names the field.
        """
        if not facts.moe_layers:
            raise UserError(f"genome.kind: {section.kind} needs MoE layers, and this model ({facts.family}) is dense")
        retained = facts.experts if section.experts is None else section.experts
        if retained > facts.experts:
            raise UserError(f"genome.experts: {retained} is more than the model's {facts.experts} experts")
        active, skips = _check_family(section, retained, facts), section.dynamic_skipping
        if skips and active != 2:
            raise UserError(f"genome.dynamic_skipping: it is defined for 2 active experts per token, not {active}")
        return cls(
            experts=facts.experts,
            retained=retained,
            active=active,
            router_space=section.router_space or stock_space(facts.rule),
            facts=facts,
            dynamic_skipping=skips,
            measurement=RowsMeasurement(token_limit(section.skipping_tokens), "skipping") if skips else None,
            **own,
        )

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.facts.moe_layers)

    @property
    def subsets(self) -> Subsets:
        """The subsets of experts that candidates can retain."""
        return Subsets(self.experts, self.retained, self.facts.rule.groups.count)

    @property
    def unchanged(self) -> bool:
        """Whether candidates keep all experts, and as many active ones as the model."""
        whole = self.retained == self.experts and self.active == self.facts.active
        return whole and not self.dynamic_skipping

    def native(self, one_hot: bool) -> bool:
        """Say whether router mappings are kept beside the whole router, since they can't be folded into a smaller one.

        `one_hot` says whether every row of the mapping is.
        """
        return self.router_space != "logits" and not (self.facts.rule.one_hot_folds and one_hot)

    @cached_property
    def skip_rows(self) -> FitRows | None:
        """Calibration rows for the thresholds of dynamic skipping; None without dynamic skipping."""
        return FitRows.of(self.statistics, "skipping") if self.dynamic_skipping else None


def _check_family(section: ExpertsSection, retained: int, facts: ModelFacts) -> int:
    """Check the settings against the model's family, and return the number of active experts.

    Raises:
        UserError: The model's family doesn't support the settings.
    """
    groups = facts.rule.groups
    problem = groups.fault(retained)
    if problem is not None:
        raise UserError(f"genome.experts: {retained} experts of a {facts.family} model {problem}")
    name, setting = section.most_active
    active = setting or min(facts.active, groups.reach(retained))
    problem = facts.rule.active_fault(retained, active)
    if problem is not None:
        raise UserError(f"genome.{name}: {active} active experts of a {facts.family} model {problem}")
    if not facts.rule.has_scores and section.router_space == "probs":
        raise UserError(f"genome.router_space ({facts.family} model): {NO_SCORES}")
    if not facts.rule.can_skip and section.dynamic_skipping:
        raise UserError(f"genome.dynamic_skipping ({facts.family} model): {NO_SKIPPING}")
    return min(active, groups.reach(retained))
