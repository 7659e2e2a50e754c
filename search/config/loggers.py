"""Settings of the programs that a search's numbers are sent to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moevolve.search.genomes.contract.phases import Section


class TensorBoardSection(Section):
    """TensorBoard: event files in a folder of the search's name.

    Attributes:
        folder: Folder of all searches, as for `tensorboard --logdir`.
    """

    kind: Literal["tensorboard"]
    folder: str = "runs"


class MlflowSection(Section):
    """MLflow: a run of the search's name. `MLFLOW_TRACKING_URI` and its like say where.

    Attributes:
        experiment: Name of the experiment, made if need be.
    """

    kind: Literal["mlflow"]
    experiment: str = "moevolve"


class WandbSection(Section):
    """Weights & Biases: a run of the search's name and id. `WANDB_API_KEY`, `WANDB_MODE` and their like say where.

    Attributes:
        project: Name of the project, made if need be.
    """

    kind: Literal["wandb"]
    project: str = "moevolve"


AnyLoggerSection = Annotated[TensorBoardSection | MlflowSection | WandbSection, Field(discriminator="kind")]
