"""MLflow: a run of the experiment in MLFLOW_EXPERIMENT_NAME, or of `moevolve`; MLFLOW_TRACKING_URI says where."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from moevolve.search.running.loggers.base import LoggedSearch

_TAG = "moevolve.search"
_LONGEST = 500
"""Most characters of a parameter; stores of older servers take no more."""
_MOST = 100
"""Most parameters that a request may have."""


class MlflowLogger:
    """Logs metrics, and the configuration as parameters. A resumed search continues its run."""

    def __init__(self, search: LoggedSearch) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "moevolve"
        known = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if known is None else known.experiment_id
        found = self._client.search_runs([place], f"tags.`{_TAG}` = '{search.id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(place, run_name=search.name, tags={_TAG: search.id}).info.run_id
        params = [Param(path, text[:_LONGEST]) for path, text in search.flat_config().items()]
        for start in range(0, len(params), _MOST):
            self._client.log_batch(self._run, params=params[start : start + _MOST])

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        # MLflow allows fewer characters in names than tasks do.
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in values.items()}
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in named.items()])

    def close(self, values: Mapping[str, float] | None) -> None:
        if values is not None:
            self.log(values, 0)
        self._client.set_terminated(self._run, "KILLED" if values is None else "FINISHED")
