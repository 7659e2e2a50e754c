"""The fingerprint of a checkpoint: evaluations are shared between checkpoints with equal fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moevolve.evaluators.errors import UserError, first_line
from moevolve.workers.checkpoints.files import gguf_file, gguf_parts, local_directory, read_json
from moevolve.workers.contract.settings import ModelConfig

WHOLE_HASH_LIMIT = 1 << 30
"""Checkpoints with fewer bytes are hashed whole; of larger ones the header, the beginning and the end of every file."""

_EDGE = 1 << 20

_READ = (
    # The model's architecture, its end tokens, and the file of each tensor.
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    # The tokenizer and additions to its vocabulary; `tokenizer.*.json` are named by `fast_tokenizer_files`.
    "tokenizer.json",
    "tokenizer.*.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    # Vocabularies and merges of tokenizers without tokenizer.json, and further files that a few of those read.
    "*vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "*.model",
    "tokenizer.model.*",
    "*.spm",
    "*.tiktoken",
    "*tekken*.json",
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "normalizer.json",
    "prophetnet.tokenizer",
    "word_pronunciation.json",
    "word_shape.json",
    # Chat templates; the older form is a field of tokenizer_config.json.
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Files that `transformers` reads from a checkpoint's folder, without weights and code. No others are hashed."""

_VOLATILE: Mapping[str, tuple[str, ...]] = {
    "config.json": ("transformers_version", "_name_or_path"),
    "generation_config.json": ("transformers_version", "_from_model_config"),
    "model.safetensors.index.json": ("metadata",),
    "tokenizer_config.json": (
        "transformers_version",
        "name_or_path",
        "special_tokens_map_file",
        "is_local",
        "local_files_only",
    ),
}
"""Fields that record how a file was saved. They don't influence scores, so they aren't hashed."""


def model_fingerprint(config: ModelConfig) -> str:
    """SHA-256 (hex) of everything in a checkpoint that can change a score.

    For a local directory it covers the files that `transformers` reads (`_READ`; JSON by its content, not its
    formatting), Python files if a config's `auto_map` names code, and the name, size and content of every safetensors
    file, or of the GGUF file (see `WHOLE_HASH_LIMIT`). For a hub id it is the hash of the commit.

    Raises:
        UserError: The checkpoint can't be found, has no safetensors, or contains invalid JSON.
    """
    directory = local_directory(config)
    if directory is None:
        return hashlib.sha256(_commit(config).encode()).hexdigest()
    file = gguf_file(config)
    weights = sorted(directory.glob("*.safetensors")) if file is None else gguf_parts(file)
    if not weights:
        raise UserError(f"model {config.path}: no *.safetensors file; convert the checkpoint first")
    digest = hashlib.sha256()
    for file in _read_files(directory):
        digest.update(f"{file.relative_to(directory).as_posix()} ".encode())
        digest.update(hashlib.sha256(_content(file)).digest())
    whole = sum(file.stat().st_size for file in weights) < WHOLE_HASH_LIMIT
    for file in weights:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        digest.update(_whole(file) if whole else _edges(file))
    return digest.hexdigest()


def pinned_revision(config: ModelConfig) -> str | None:
    """Return the commit that a hub id's revision currently names; for a local directory the revision unchanged."""
    # A branch may move during a search; loading the commit loads what the fingerprint was computed from.
    return config.revision if local_directory(config) is not None else _commit(config)


def _read_files(directory: Path) -> list[Path]:
    configs = (directory / name for name in ("config.json", "tokenizer_config.json"))
    names_code = any(file.is_file() and "auto_map" in read_json(file) for file in configs)
    patterns = [*_READ, "*.py"] if names_code else _READ
    return sorted({file for pattern in patterns for file in directory.glob(pattern) if file.is_file()})


def _content(file: Path) -> bytes:
    if file.suffix != ".json":
        return file.read_bytes()
    content = read_json(file)
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _VOLATILE.get(file.name, ())}
    return json.dumps(content, sort_keys=True).encode()


def _whole(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _edges(file: Path) -> bytes:
    """Hash the header of a safetensors file, or what can be that of a GGUF file, and the first and last MiB."""
    with file.open("rb") as stream:
        # A GGUF file's metadata have the vocabulary, and don't say how long they are.
        header = 16 * _EDGE if file.suffix == ".gguf" else int.from_bytes(stream.read(8), "little")
        digest = hashlib.sha256(stream.read(min(header, 64 * _EDGE)))
        stream.seek(0)
        digest.update(stream.read(_EDGE))
        stream.seek(max(0, file.stat().st_size - _EDGE))
        digest.update(stream.read(_EDGE))
    return digest.digest()


def _commit(config: ModelConfig) -> str:
    from transformers.utils.hub import cached_file, extract_commit_hash

    try:
        file = cached_file(config.path, "config.json", revision=config.revision or "main")
    except OSError as error:
        raise UserError(f"model {config.path}: not found on the hub or in its cache: {first_line(error)}") from error
    commit = extract_commit_hash(file, None)
    if commit is None:
        raise UserError(
            f"model {config.path}: its hub revision can't be resolved; give model.revision or a local folder"
        )
    return commit
