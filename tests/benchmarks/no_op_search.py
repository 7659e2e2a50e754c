"""A search whose evaluations cost nothing: EEP's on Mixtral-8x7B's shape (4 of 8 experts, 4 groups)."""

from __future__ import annotations

import numpy as np

from moevolve.evaluators.types import Example, Matching, PreparedSplit, SplitResult
from moevolve.search.config.run import RunConfig
from moevolve.search.genomes.registry import make_space
from moevolve.search.loop.setup import SearchSetup
from moevolve.search.strategies.schedule import make_schedule
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest

LAYERS = 32
FACTS = ModelFacts(
    family="mixtral",
    fingerprint="weights",
    moe_layers=tuple(range(LAYERS)),
    experts=8,
    active=2,
    renormalise=True,
    parameters=46_702_792_704,
    expert_parameters=176_160_768,
    router_parameters_per_expert=4096,
    dtype="bfloat16",
)
SPLIT = PreparedSplit("task", "search", "rank", "mean", Matching(), 1, " ", (Example("?", ("a",), ("a", "b")),))
OUTCOMES = np.ones(100, dtype=np.float32)


def set_up(individuals: int, window: int, threshold: float | None = None) -> SearchSetup:
    """A fifth of the individuals prune, the others merge; parents by threshold if one is given, else the best."""
    margins = {"crossover_margin": threshold, "mutation_margin": threshold}
    parents = {"rule": "top_k"} if threshold is None else {"rule": "threshold", **margins}
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "model": {"path": "nowhere"},
            "tasks": [{"name": "task"}],
            "genome": {"experts": 4},
            "phases": [
                {"kind": "prune", "evaluations": individuals // 5, "parents": parents},
                {"kind": "merge", "evaluations": individuals - individuals // 5, "parents": parents},
            ],
            "window": window,
        }
    )
    space = make_space(config.genome, FACTS)
    return SearchSetup(config, "bench-1", FACTS, space, make_schedule(config), {"search": (SPLIT,)})


def reply_to(request: EvaluationRequest) -> EvaluationReply:
    """An answer with a score that depends on the candidate."""
    score = (int(request.edit.phenotype_hash[:4], 16) if request.edit.phenotype_hash != "full" else 0) / 2**16
    results = {key: SplitResult(score, score - 1, OUTCOMES) for key in request.fingerprints}
    return EvaluationReply(request.ticket, results, None, 0.0, "bench")
