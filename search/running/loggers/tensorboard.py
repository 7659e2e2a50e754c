"""TensorBoard: event files in a folder of the search's name, which need neither torch nor TensorFlow to be written."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from moevolve.search.running.loggers.base import LoggedSearch


class TensorBoardLogger:
    """Writes scalars, and the configuration as a text; TENSORBOARD_LOGGING_DIR says where, by default into `runs`."""

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
