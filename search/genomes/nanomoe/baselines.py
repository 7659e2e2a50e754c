"""Plain low rank as a NanoMoE genome."""

from __future__ import annotations

from dataclasses import dataclass

from moevolve.search.genomes.contract.base import Baseline, Offspring
from moevolve.search.genomes.nanomoe.genome import NanoMoeGenome
from moevolve.search.genomes.nanomoe.space import NanoMoeSpace


def low_rank(space: NanoMoeSpace) -> Offspring[NanoMoeGenome]:
    """All blocks of M the identity: a weight's best approximation U V of rank r, by its outputs on calibration rows.

    Source: SVD-LLM (arXiv 2403.07378), Sec. 3.2, truncation-aware data whitening. What it has beside that, updates of
    the factors to what the layers before lost (Sec. 3.3), is missing: all layers are fitted to the unedited model's
    inputs. Mixing costs K^2 parameters a layer more (variant I), and changes nothing.
    """
    return Offspring(space.unmixed(), "low_rank", ())


@dataclass(frozen=True, slots=True)
class _LowRank(Baseline):
    def fault(self, space: NanoMoeSpace) -> str | None:
        if space.tokens is not None and not space.fit:
            return None
        return "is fitted to outputs, without mixing, which needs genome.fit_to: outputs and genome.fit: 0"


BASELINES = {"low_rank": _LowRank(low_rank, ("tune",))}
