"""Programs that keep experiments: TensorBoard, MLflow, and Weights & Biases."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MLFLOW_TAG = "moevolve.search"
# Most characters of a parameter: stores of older servers take no more.
_LONGEST_PARAMETER = 500
# Most parameters that a request may have.
_MOST_PARAMETERS = 100
# Values have a step of their own: W&B drops those of its own steps that aren't in order.
_WANDB_STEP = "candidate"


@dataclass(frozen=True, slots=True)
class LoggedSearch:
    """The search that a logger is told of.

    Attributes:
        config: Its configuration as plain JSON data, without the store's password.
    """

    name: str
    id: str
    config: Mapping[str, object]

    def flat_config(self) -> dict[str, str]:
        """Return the configuration as texts by dotted path."""
        return dict(_flat("", self.config))


def _flat(path: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        items: list[tuple[object, object]] = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return [(path, str(value))]
    return [pair for key, item in items for pair in _flat(f"{path}.{key}" if path else str(key), item)]


class TensorBoardLogger:
    """Writes scalars, and the configuration as a text, into event files, for which it needs no TensorFlow.

    They lie in a folder of the search's name in TENSORBOARD_LOGGING_DIR, or in `runs`.
    """

    def __init__(self, search: LoggedSearch) -> None:
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(Path(os.environ.get("TENSORBOARD_LOGGING_DIR") or "runs") / search.name))
        lines = [f"    {path}: {text}" for path, text in search.flat_config().items()]  # Markdown's form of code
        text = TensorProto(dtype="DT_STRING", string_val=["\n".join(lines).encode()])
        metadata = SummaryMetadata(plugin_data={"plugin_name": "text"})
        self._write(0, tag="configuration", metadata=metadata, tensor=text)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._write(step, tag=name, simple_value=value)

    def close(self, values: Mapping[str, float] | None) -> None:
        self.log(values or {}, 0)
        self._writer.close()

    def _write(self, step: int, **value: object) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(**value)])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


class MlflowLogger:
    """Logs metrics, and the configuration as parameters, to a run of the experiment in MLFLOW_EXPERIMENT_NAME.

    A resumed search continues its run. MLFLOW_TRACKING_URI says where.
    """

    def __init__(self, search: LoggedSearch) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "moevolve"
        known = self._client.get_experiment_by_name(experiment)
        place = self._client.create_experiment(experiment) if known is None else known.experiment_id
        found = self._client.search_runs([place], f"tags.`{_MLFLOW_TAG}` = '{search.id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(place, run_name=search.name, tags={_MLFLOW_TAG: search.id}).info.run_id
        params = [Param(path, text[:_LONGEST_PARAMETER]) for path, text in search.flat_config().items()]
        for start in range(0, len(params), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=params[start : start + _MOST_PARAMETERS])

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


class WandbLogger:
    """Logs metrics, and the final values as the summary, to a run of the project in WANDB_PROJECT.

    A resumed search continues its run. WANDB_API_KEY and its like say where.
    """

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
        self._run.define_metric("*", step_metric=_WANDB_STEP)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({_WANDB_STEP: step, **values})

    def close(self, values: Mapping[str, float] | None) -> None:
        self._run.summary.update(dict(values or {}))
        self._run.finish(exit_code=int(values is None))


# Each sends numbers to one program. It is made and called in a thread of its own, where it may raise anything. After a
# resume it gets the whole history again, with the same steps. `log` takes values of one step: of a candidate by its
# index, or of the search by its number of candidates. `close` takes the final values, or None if the search was
# interrupted or has failed.
# What `loggers` of a run names.
LOGGERS: dict[str, type[TensorBoardLogger | MlflowLogger | WandbLogger]] = {
    "tensorboard": TensorBoardLogger,
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
}
