"""The JSON files and tokenizer of an export: the source's, in its spelling, except for what the export changes.

Programs that read checkpoints (other versions of `transformers`, servers, converters) know the spelling of published
ones. The `transformers` installed here may spell them otherwise.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.files import gguf_file, read_json
from moevolve.workers.checkpoints.headers import INDEX_FILE
from moevolve.workers.checkpoints.loading import checkpoint_folder
from moevolve.workers.checkpoints.native import NATIVE_PREFIX
from moevolve.workers.checkpoints.text_models import text_fields
from moevolve.workers.contract.settings import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Other frameworks' copies of the source's weights would contradict the export.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
# Written anew, or about weights in another form.
_NOT_COPIED = ("README.md", "config.json", "hf_quant_config.json", INDEX_FILE)


def changed_fields(raw: Mapping[str, object], before: PretrainedConfig, after: PretrainedConfig) -> dict[str, object]:
    """Return the fields of a config that differ from another's, by their names in a config.json.

    Args:
        raw: Content of the config.json. A field that it has under no name gets all of its names.
        before: Config that was read from it.
        after: Changed config.
    """
    was = before.to_dict()
    changed: dict[str, object] = {}
    for name, value in after.to_dict().items():
        if not name.startswith("_") and was.get(name) != value:
            names = [name, *(alias for alias, of in _aliases(after).items() if of == name)]
            changed |= dict.fromkeys([each for each in names if each in raw] or names, value)
    return changed


def _aliases(config: PretrainedConfig) -> dict[str, str]:
    """Other names of a config's fields, and the names in the version of `transformers` installed here."""
    return {"torch_dtype": "dtype", **config.attribute_map}


def write_config(source: ModelConfig, config: PretrainedConfig, part: Path) -> None:
    """Write a config.json: the source's with the fields that differ, or if it has another class all fields."""
    file = checkpoint_folder(source) / "config.json"
    settings = text_fields(read_json(file), config) if file.is_file() else {}
    kind = type(config)
    if settings.get("model_type") == str(config.model_type).removeprefix(NATIVE_PREFIX):
        decoded, _ = kind.get_config_dict(str(file.parent))
        settings |= changed_fields(settings, kind.from_dict(text_fields(decoded, config)), config)
        settings["model_type"] = config.model_type
    else:
        # Versions of `transformers` read the same fields under different names, and rotary settings in two forms.
        settings = config.to_diff_dict()
        settings |= {alias: settings[name] for alias, name in _aliases(config).items() if name in settings}
        rope = settings.get("rope_parameters") or {}
        if "rope_theta" in rope:
            settings |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
            if rope.get("rope_type", "default") != "default":
                settings["rope_scaling"] = {name: value for name, value in rope.items() if name not in settings}
    settings.pop("quantization_config", None)  # weights are written unpacked
    if not hasattr(config, "auto_map"):  # which names code of the source that the search didn't run
        settings.pop("auto_map", None)
    write_json(part / "config.json", settings)


def write_json(file: Path, content: object) -> None:
    """Write a JSON file as published checkpoints have them."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def copy_files(source: Path, part: Path, *left_out: str) -> None:
    """Copy all files of a folder but weights and what is written anew: tokenizer, templates, licence, code.

    Nor are files copied whose names end with one of `left_out`.

    Raises:
        UserError: One is a link out of the folder.
    """
    for file in sorted(source.iterdir()):
        skipped = file.suffix in _WEIGHTS or file.name in _NOT_COPIED or file.name.startswith(".")
        if file.is_file() and not skipped and not file.name.endswith(left_out):
            _refuse_link(file, source)
            shutil.copyfile(file, part / file.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        for file in templates.rglob("*"):
            _refuse_link(file, source)
        shutil.copytree(templates, part / templates.name)


def _refuse_link(file: Path, source: Path) -> None:
    """Refuse a link out of a checkpoint's folder, by which an upload would publish a file of this machine.

    Links to files of the same name are let be, since people make folders of such links.
    """
    folder, target = source.resolve(), file.resolve()
    cached = target.parent in [parent / "blobs" for parent in folder.parents]  # as in the hub's cache
    if not (target.is_relative_to(folder) or cached or target.name == file.name):
        raise UserError(f"{file} is a link out of the model's folder; put the file itself there, or remove the link")


def copy_unpacked(source: ModelConfig, tokenizer: PreTrainedTokenizerBase, part: Path) -> None:
    """Copy files like `copy_files` for weights that are unpacked, and with no more code than the tokenizer needs.

    The tokenizer is written anew if `transformers` wouldn't find the same by the copied files. The folder `part` has
    its config.json.
    """
    folder, known = checkpoint_folder(source), type(tokenizer).__module__.startswith("transformers.")
    code = (".py",) if known else ()
    copy_files(folder, part, "quantize_config.json", "quant_config.json", *code)
    file = part / "tokenizer_config.json"
    copied = gguf_file(source) is None or file.is_file() or (part / "tokenizer.json").is_file()
    # `transformers` derives a tokenizer's class from the model type, too.
    if not copied or _model_type(folder) != _model_type(part):
        tokenizer.save_pretrained(part)
        settings = read_json(file)
        if known and (part / "tokenizer.json").is_file():
            # Other classes put steps of their own in place of those in tokenizer.json.
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(settings.get("extra_special_tokens"), list):
            settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
        write_json(file, settings)
    if known and file.is_file() and "auto_map" in (settings := read_json(file)):
        del settings["auto_map"]
        write_json(file, settings)


def _model_type(folder: Path) -> str | None:
    file = folder / "config.json"
    return read_json(file).get("model_type") if file.is_file() else None
