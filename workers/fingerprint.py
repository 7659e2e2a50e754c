"""The identity of a checkpoint: equal fingerprints mean that stored evaluations are about the same weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.workers.config import ModelConfig

WHOLE_HASH_LIMIT = 1 << 30
"""Checkpoints smaller than this many bytes are hashed whole; of larger ones the header and both ends of every file."""

_EDGE = 1 << 20
_VOLATILE = ("transformers_version", "_name_or_path")


def model_fingerprint(config: ModelConfig) -> str:
    """SHA-256 (hex) identifying a checkpoint's weights and architecture.

    A local directory is identified by its `config.json` (less what changes from save to save) and, per safetensors
    file, name, size and content (see `WHOLE_HASH_LIMIT`). A hub id is identified by the resolved commit and its config.

    Raises:
        UserError: the checkpoint can't be found, or has no safetensors.
    """
    from moevolve.workers.loading import local_directory

    directory = local_directory(config)
    if directory is None:
        return _hub_fingerprint(config)
    digest = hashlib.sha256(_canonical_config(directory / "config.json"))
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"model {config.path}: no *.safetensors file; convert the checkpoint first")
    whole = sum(file.stat().st_size for file in files) < WHOLE_HASH_LIMIT
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        digest.update(_whole(file) if whole else _edges(file))
    return digest.hexdigest()


def _canonical_config(file: Path) -> bytes:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error}); mend or fetch the checkpoint's config again") from error
    for key in _VOLATILE:
        settings.pop(key, None)
    return json.dumps(settings, sort_keys=True).encode()


def _whole(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _edges(file: Path) -> bytes:
    """Hash of the safetensors header, and of the first and last MiB of the file."""
    with file.open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
        digest = hashlib.sha256(stream.read(min(header, 64 * _EDGE)))
        stream.seek(0)
        digest.update(stream.read(_EDGE))
        stream.seek(max(0, file.stat().st_size - _EDGE))
        digest.update(stream.read(_EDGE))
    return digest.digest()


def _hub_fingerprint(config: ModelConfig) -> str:
    from transformers.utils.hub import cached_file, extract_commit_hash

    try:
        file = cached_file(config.path, "config.json", revision=config.revision or "main")
    except OSError as error:
        raise UserError(
            f"model {config.path}: not found on the hub or in its cache: {str(error).splitlines()[0]}"
        ) from error
    commit = extract_commit_hash(file, None)
    if file is None or commit is None:
        raise UserError(
            f"model {config.path}: its hub revision can't be resolved; give model.revision or a local folder"
        )
    return hashlib.sha256(_canonical_config(Path(file)) + commit.encode()).hexdigest()
