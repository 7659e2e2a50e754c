"""The native checkpoint form: modelling code of its own beside the weights, for edits the family can't express."""

from __future__ import annotations

import copy
import importlib.util
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moevolve.kernels.routing import POSITIVE_EPS, SUM_EPS
from moevolve.workers.families.base import CORRECTION_BIAS
from moevolve.workers.families.layers import MoELayer
from moevolve.workers.families.registry import family_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def render(template: str, **values: Any) -> str:
    """Render one of the workers' `*.jinja` files; a missing value is an error.

    Args:
        template: path below `workers/`.
        values: what the template refers to.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["cell"] = _cell
    return environment.get_template(template).render(**values)


def _cell(text: str) -> str:
    """Text for one cell of a Markdown table."""
    return " ".join(str(text).replace("|", "\\|").split()) or "-"


MODULE = "modeling_moevolve"
"""Name of the modelling code's file in an exported directory, without `.py`."""


NATIVE_PREFIX = "moevolve_"
"""What a native model type begins with, before the family's."""


def native_names(config: PretrainedConfig, model: PreTrainedModel) -> tuple[str, str, str]:
    """Names of the native config class, model class and model type of a family's model.

    The type differs from the family's on purpose: loading without `trust_remote_code` must fail rather than silently
    drop the router mapping.
    """
    return (
        f"Moevolve{type(config).__name__}",
        f"Moevolve{type(model).__name__}",
        f"{NATIVE_PREFIX}{config.model_type}",
    )


def native_config(source: PreTrainedModel, model_class: type[PreTrainedModel]) -> PretrainedConfig:
    """The family's settings as a native config, to which the kind of edit adds its own.

    Args:
        source: a model of the family.
        model_class: its native class, see `import_native`.
    """
    assert model_class.config_class is not None
    settings = {k: v for k, v in source.config.to_dict().items() if k not in ("model_type", "architectures")}
    config = model_class.config_class(**copy.deepcopy(settings))
    config_name, class_name, _ = native_names(source.config, source)
    config.auto_map = {"AutoConfig": f"{MODULE}.{config_name}", "AutoModelForCausalLM": f"{MODULE}.{class_name}"}
    return config


def write_native_code(directory: Path, model: PreTrainedModel, layer: MoELayer, retained: int, version: str) -> Path:
    """Write the modelling code of a native checkpoint.

    Args:
        directory: the checkpoint's folder.
        model: a model of the family.
        layer: any of its MoE layers.
        retained: experts n' per MoE layer.
        version: version of this software, for the file's head.

    Returns:
        The file written.
    """
    names = native_names(model.config, model)
    text = render(
        "methods/eep/native.py.jinja",
        title=family_of(model.config, "to export").title,
        version=version,
        experts=retained,
        router_experts=layer.count,
        config_class=type(model.config).__name__,
        model_class=type(model).__name__,
        native_config=names[0],
        native_class=names[1],
        native_type=names[2],
        sum_eps=SUM_EPS,
        rule=layer.rule,
        family=layer.family,
        corrects=layer.correction_bias is not None,
        correction=CORRECTION_BIAS,
        positive_eps=POSITIVE_EPS,
    )
    file = directory / f"{MODULE}.py"
    file.write_text(text, encoding="utf-8")
    return file


def import_native(directory: Path) -> type[PreTrainedModel]:
    """Import the model class of a native checkpoint that this process wrote, past the user's module cache."""
    name = f"moevolve_export_{uuid.uuid4().hex}"
    spec = importlib.util.spec_from_file_location(name, directory / f"{MODULE}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # transformers looks a class's module up by name while building it.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    (native_class,) = (
        value
        for key, value in vars(module).items()
        if key.startswith("Moevolve") and hasattr(value, "from_pretrained") and hasattr(value, "forward")
    )
    return native_class
