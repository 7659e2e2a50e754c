"""Weights & Biases: a run of the project in WANDB_PROJECT, or of `moevolve`; WANDB_API_KEY and its like say where."""

from __future__ import annotations

import os
from collections.abc import Mapping

from moevolve.search.running.loggers.base import LoggedSearch

_STEP = "candidate"
"""Values have a step of their own: W&B drops those of its own steps that aren't in order."""


class WandbLogger:
    """Logs metrics, and the final values as the run's summary. A resumed search continues its run."""

    def __init__(self, search: LoggedSearch) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "moevolve",
            name=search.name,
            id=search.id,
            resume="allow",
            config=dict(search.config),
            settings=wandb.Settings(console="off", silent=True),  # the terminal is the search's
        )
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({_STEP: step, **values})

    def close(self, values: Mapping[str, float] | None) -> None:
        self._run.summary.update(dict(values or {}))
        self._run.finish(exit_code=int(values is None))
