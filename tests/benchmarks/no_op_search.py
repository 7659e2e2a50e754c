"""A search whose evaluations cost nothing: EEP's on Mixtral-8x7B's shape (4 of 8 experts, 4 groups)."""

from __future__ import annotations

from replies import answer
from search_lab import make_lab_setup, run_config

from moevolve.search.loop.setup import SearchSetup
from moevolve.workers.contract.messages import EvaluationReply, EvaluationRequest


def set_up(individuals: int, window: int, threshold: bool = False) -> SearchSetup:
    """A fifth of the individuals prune, the others merge; parents within a threshold, or the best."""
    parents: object = "threshold" if threshold else 10
    phases = [
        {"kind": "prune", "evaluations": individuals // 5, "parents": parents},
        {"kind": "merge", "evaluations": individuals - individuals // 5, "parents": parents},
    ]
    return make_lab_setup(run_config(genome={"experts": 4}, phases=phases, window=window), layers=32)


def reply_to(request: EvaluationRequest) -> EvaluationReply:
    """An answer with a score that depends on the candidate, and outcomes of a hundred prompts."""
    score = (int(request.edit.phenotype_hash[:4], 16) if request.edit.phenotype_hash != "full" else 0) / 2**16
    return answer(request, score, score - 1, [1] * 100)
