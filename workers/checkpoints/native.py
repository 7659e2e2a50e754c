"""The native checkpoint form, which contains modelling code for edits that no class of `transformers` can express."""

from __future__ import annotations

import copy
import importlib.util
import sys
import uuid
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def render(template: str, **values: object) -> str:
    """Render a `*.jinja` template, given by its path below `workers/`. A missing value is an error."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    """Return the environment of all templates, which keeps what it has compiled."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    # For one cell of a Markdown table.
    environment.filters["cell"] = lambda text: " ".join(str(text).replace("|", "\\|").split()) or "-"
    return environment


# Name of the file with the modelling code in an exported directory, without `.py`.
MODULE = "modeling_moevolve"

# Prefix of native model types, followed by the family's model type.
NATIVE_PREFIX = "moevolve_"


def native_names(model: PreTrainedModel) -> tuple[str, str, str]:
    """Return the names of the native config class, model class and model type for a family's model."""
    # The model type differs from the family's, so that loading without `trust_remote_code` fails instead of silently
    # dropping the router mapping.
    return (
        f"Moevolve{type(model.config).__name__}",
        f"Moevolve{type(model).__name__}",
        f"{NATIVE_PREFIX}{model.config.model_type}",
    )


def native_config(source: PreTrainedModel, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    """Convert a model's config into that of a native class from `write_native`, without the fields of an edit."""
    assert model_class.config_class is not None
    own = ("model_type", "architectures", "auto_map", "quantization_config")
    settings = {name: value for name, value in source.config.to_dict().items() if name not in own}
    config = model_class.config_class(**copy.deepcopy(settings))
    config_name, class_name, _ = native_names(source)
    config.auto_map = {"AutoConfig": f"{MODULE}.{config_name}", "AutoModelForCausalLM": f"{MODULE}.{class_name}"}
    return config


def write_native(
    model: PreTrainedModel, directory: Path, template: str, title: str, **settings: object
) -> type[PreTrainedModel]:
    """Write the modelling code of a native checkpoint, and import its model class.

    The code is made of a template (see `render`) from names, versions, the family's `title` and further `settings`.
    """
    config_name, class_name, type_name = native_names(model)
    text = render(
        template,
        title=title,
        version=version("moevolve"),
        config_class=type(model.config).__name__,
        model_class=type(model).__name__,
        native_config=config_name,
        native_class=class_name,
        native_type=type_name,
        **settings,
    )
    (directory / f"{MODULE}.py").write_text(text, encoding="utf-8")
    return import_native(directory)


def import_native(directory: Path) -> type[PreTrainedModel]:
    """Import the model class of a native checkpoint that this process wrote."""
    # Importing by path leaves nothing in the user's cache of remote code.
    name = f"moevolve_export_{uuid.uuid4().hex}"
    spec = importlib.util.spec_from_file_location(name, directory / f"{MODULE}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # `transformers` looks up a class's module by name.
    sys.modules[name] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # which would become a part of the checkpoint
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    (native_class,) = (
        value
        for key, value in vars(module).items()
        if key.startswith("Moevolve") and hasattr(value, "from_pretrained") and hasattr(value, "forward")
    )
    return native_class
