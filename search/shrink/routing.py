"""How much of each domain's routing the kept experts have, before any candidate is scored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from moevolve.search.config.run import RunConfig
from moevolve.search.pools.ray_actor import FirstWorker
from moevolve.search.shrink.page import RetainedMass
from moevolve.workers.contract.edits import IdentityEdit
from moevolve.workers.contract.usage import UsageRequest

_TOKENS = 4096
"""Tokens of a domain that are routed: shares of an expert are then known within a percent or two."""
_ADAPTER = TypeAdapter(tuple[RetainedMass, ...])


def retained_mass(config: RunConfig, experts: int, first: FirstWorker, path: Path) -> tuple[RetainedMass, ...]:
    """Measure the full model's routing on the calibration rows of every task, once for a search: `path` keeps it."""
    if path.is_file():
        return _ADAPTER.validate_json(path.read_bytes())
    shares = first.call(routing_shares, config)
    names = [section.task().name for section in config.tasks]
    weights = np.array([section.weight for section in config.tasks])
    found = retained(names, shares, weights, experts)
    path.write_bytes(_ADAPTER.dump_json(found))
    return found


def routing_shares(config: RunConfig) -> NDArray[np.float64]:
    """Load the model and measure each expert's share of the routing weights.

    Returns:
        Shares, float64 [tasks, MoE layers, experts]; those of a layer sum to 1.
    """
    from moevolve.workers.checkpoints.loading import placed
    from moevolve.workers.worker import EvaluationWorker

    worker = EvaluationWorker(placed(config.model), config.engine)
    splits = [section.prepared("calibration", calibrating=True) for section in config.tasks]
    usages = [worker.analyse(UsageRequest(IdentityEdit(), _TOKENS), split) for split in splits]
    sums = np.array([[layer.weights for layer in usage.routed] for usage in usages])
    shares: NDArray[np.float64] = sums / np.maximum(sums.sum(axis=2, keepdims=True), np.finfo(float).tiny)
    return shares


def retained(
    names: list[str], shares: NDArray[np.float64], weights: NDArray[np.float64], experts: int
) -> tuple[RetainedMass, ...]:
    """The shares of routing weights that the most used experts have.

    Args:
        names: Names of the tasks.
        shares: See `routing_shares`.
        weights: Weights of the tasks, [tasks].
        experts: Experts per layer to keep.
    """
    together = np.average(shares, axis=0, weights=weights)
    kept = np.argsort(-together, axis=1, kind="stable")[:, :experts]
    best = -np.sort(-shares, axis=2)[:, :, :experts]
    return tuple(
        RetainedMass(
            name, float(np.take_along_axis(own, kept, axis=1).sum(axis=1).mean()), float(top.sum(axis=1).mean())
        )
        for name, own, top in zip(names, shares, best, strict=True)
    )
