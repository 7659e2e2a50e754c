"""The loggers by the kind of their settings. To add one, write its file and its settings, and add a line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moevolve.search.running.loggers.base import LoggedSearch, Logger
from moevolve.search.running.loggers.mlflow import MlflowLogger
from moevolve.search.running.loggers.tensorboard import TensorBoardLogger
from moevolve.search.running.loggers.wandb import WandbLogger

LOGGERS: dict[str, Callable[[Any, LoggedSearch], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "mlflow": MlflowLogger,
    "wandb": WandbLogger,
}
