"""What the native checkpoints of edited dense models share: their code, and where their layers' tensors are."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.workers.export.native import MODULE, import_native, native_names, render
from moevolve.workers.families.layers import DenseLayer
from moevolve.workers.model.resident import ResidentModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def native_dense_class(
    resident: ResidentModel, directory: Path, template: str, **settings: object
) -> type[PreTrainedModel]:
    """Write modelling code for a dense family and import its model class.

    Args:
        resident: a model of the family.
        directory: the checkpoint's folder.
        template: name of the code's template.
        settings: what the template needs to know besides the family.
    """
    model, family = resident.model, resident.dense_layers[0].family
    names = native_names(model.config, model)
    text = render(
        template,
        title=family.title,
        version=version("moevolve"),
        config_class=type(model.config).__name__,
        model_class=type(model).__name__,
        native_config=names[0],
        native_class=names[1],
        native_type=names[2],
        up=family.up,
        gate=repr(family.gate),
        down=family.down,
        activation=family.activation,
        inline=family.inline,
        **settings,
    )
    (directory / f"{MODULE}.py").write_text(text, encoding="utf-8")
    return import_native(directory)


def placed_layers(resident: ResidentModel) -> list[tuple[str, DenseLayer]]:
    """Every layer with the prefix of its tensors' names."""
    source = resident.model
    decoder = next(name for name, module in source.named_modules() if module is source.get_decoder())
    return [(f"{decoder}.layers.{layer.index}.", layer) for layer in resident.dense_layers]
