"""Settings of checkpoints that installed libraries read, beside those that our tables list.

    .venv/bin/python tests/labs/library_settings.py

prints of each library the settings that stop here whatever they say, and those that only other programs know. Of
GPTQModel, which needs a GPU to install, the keys are taken where it is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from importlib.util import find_spec

from moevolve.workers.checkpoints.formats.compressed import COMPRESSED_SETTINGS
from moevolve.workers.checkpoints.formats.fp4 import MXFP4_SETTINGS
from moevolve.workers.checkpoints.formats.fp8 import FP8_SETTINGS
from moevolve.workers.checkpoints.formats.gguf_metadata import TOKENIZER_SETTINGS
from moevolve.workers.checkpoints.formats.groupwise import AWQ_SETTINGS, GPTQ_SETTINGS
from moevolve.workers.checkpoints.settings import GENERATION_SETTINGS, Settings


def _arguments(name: str) -> set[str]:
    from transformers.utils import quantization_config

    kinds = getattr(quantization_config, name).__mro__
    found = {key for kind in kinds for key in inspect.signature(kind.__init__).parameters}
    return found - {"self", "args", "kwargs"}


def _compressed_tensors() -> set[str]:
    from compressed_tensors.quantization import QuantizationConfig

    return set(QuantizationConfig.model_fields) | _arguments("CompressedTensorsConfig")


def _generation() -> set[str]:
    from transformers import GenerationConfig

    return set(GenerationConfig().to_dict())


def _tokenizer() -> set[str]:
    from gguf.constants import Keys

    return {key.removeprefix("tokenizer.") for name, key in vars(Keys.Tokenizer).items() if name[0].isupper()}


def _gptqmodel() -> set[str]:
    from dataclasses import fields

    from gptqmodel.quantization.config import AWQConfig, GPTQConfig

    return {each.name for kind in (GPTQConfig, AWQConfig) for each in fields(kind) if not each.name.startswith("_")}


LIBRARIES: dict[str, tuple[str, Callable[[], Collection[str]], Settings]] = {
    "fp8": ("transformers", lambda: _arguments("FineGrainedFP8Config"), FP8_SETTINGS),
    "mxfp4": ("transformers", lambda: _arguments("Mxfp4Config"), MXFP4_SETTINGS),
    "gptq": ("transformers", lambda: _arguments("GPTQConfig"), GPTQ_SETTINGS),
    "awq": ("transformers", lambda: _arguments("AwqConfig"), AWQ_SETTINGS),
    "gptqmodel": ("gptqmodel", _gptqmodel, GPTQ_SETTINGS),
    "compressed-tensors": ("compressed_tensors", _compressed_tensors, COMPRESSED_SETTINGS),
    "generation_config.json": ("transformers", _generation, GENERATION_SETTINGS),
    "tokenizers in GGUF": ("gguf", _tokenizer, TOKENIZER_SETTINGS),
}
"""The library, what it reads, and our table, by format."""


def differences(name: str) -> tuple[list[str], list[str]] | None:
    """Return the settings that only the library reads, and that only our table lists; None if it isn't installed."""
    library, read, known = LIBRARIES[name]
    if find_spec(library) is None:
        return None
    theirs = set(read())
    return sorted(theirs - known.keys()), sorted(known.keys() - theirs)


if __name__ == "__main__":
    for each in LIBRARIES:
        found = differences(each)
        print(f"{each}: {'not installed' if found is None else f'stop {found[0]}, of other programs {found[1]}'}")
