"""The fingerprint of a checkpoint, by which evaluations are shared, and the hashes of its tensors for recipes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.files import config_file, gguf_file, gguf_parts, local_directory, read_json
from moevolve.workers.checkpoints.headers import StoredTensor, stored_tensors, weight_files
from moevolve.workers.contract.settings import ModelConfig

logger = logging.getLogger(__name__)

# Files of at least so many bytes are hashed once: hashing a gigabyte takes about a second, and a launch would wait.
_CACHED_SIZE = 1 << 30
# Files that `transformers` reads from a checkpoint's folder, without weights and code. No others are hashed.
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
    "processor_config.json",
    "additional_chat_templates/*.jinja",
)

# Fields that record how a file was saved. They don't influence scores, so they aren't hashed.
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


def model_fingerprint(config: ModelConfig) -> str:
    """SHA-256 (hex) of everything in a checkpoint that can change a score.

    For a local directory it covers the files that `transformers` reads (`_READ`; JSON by its content, not its
    formatting), Python files if a config's `auto_map` names code, and the name and every byte of the weight files (see
    `weight_files`), or of the GGUF file. Hashes of large files are kept in the user's cache, and made anew if a file's
    size, time of change or inode differs. For a hub id it is the hash of the commit.

    Raises:
        UserError: The checkpoint can't be found, has no safetensors, or contains invalid JSON.
    """
    directory = local_directory(config)
    if directory is None:
        return hashlib.sha256(_commit(config).encode()).hexdigest()
    file = gguf_file(config)
    weights = weight_files(directory) if file is None else gguf_parts(file)
    configs = (directory / name for name in ("config.json", "tokenizer_config.json"))
    names_code = any(file.is_file() and "auto_map" in read_json(file) for file in configs)
    patterns = [*_READ, "*.py"] if names_code else _READ
    digest = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in directory.glob(pattern) if file.is_file()}):
        digest.update(f"{file.relative_to(directory).as_posix()} ".encode())
        digest.update(hashlib.sha256(_content(file)).digest())
    # Hashing releases the interpreter's lock, so that files are hashed at once.
    with ThreadPoolExecutor() as threads:
        for file, content in zip(weights, threads.map(_weights_digest, weights), strict=True):
            digest.update(f"{file.name} {content} ".encode())
    return digest.hexdigest()


def pinned_revision(config: ModelConfig) -> str | None:
    """Return the commit that a hub id's revision currently names; for a local directory the revision unchanged."""
    # A branch may move during a search; loading the commit loads what the fingerprint was computed from.
    return config.revision if local_directory(config) is not None else _commit(config)


def tensor_digests(model: ModelConfig) -> dict[str, str]:
    """Hash every tensor of a checkpoint with its dtype and shape, by which a copy in other files is recognised.

    Returns:
        The first 32 hex digits of SHA-256 by name, in the order of the files.
    """
    return {name: _digest(tensor) for name, tensor in _stored(model).items()}


def check_digests(model: ModelConfig, wanted: Mapping[str, str]) -> None:
    """Raise a `UserError` that names the first tensor in which a checkpoint differs from the hashes `wanted`."""
    stored = _stored(model)
    for name in wanted:
        if name not in stored:
            raise UserError(f"{model.path}: not the recipe's model: it has no tensor {name}")
    for name, tensor in stored.items():
        if name not in wanted:
            raise UserError(f"{model.path}: not the recipe's model, which has no tensor {name}")
        if _digest(tensor) != wanted[name]:
            raise UserError(
                f"{model.path}: not the recipe's model: the first tensor that differs is {name}, here {tensor.dtype} "
                f"{list(tensor.shape)}, in {tensor.file.name}"
            )


def _stored(model: ModelConfig) -> dict[str, StoredTensor]:
    from moevolve.workers.checkpoints.formats.gguf import stored_gguf  # these need torch
    from moevolve.workers.checkpoints.formats.gguf_metadata import open_parts
    from moevolve.workers.checkpoints.loading import checkpoint_folder

    file = gguf_file(model)
    return stored_tensors(checkpoint_folder(model)) if file is None else stored_gguf(open_parts(file))


def _digest(tensor: StoredTensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
    for chunk in tensor.chunks():
        digest.update(chunk)
    return digest.hexdigest()[:32]  # 128 bits tell tensors apart, and a recipe names tens of thousands


def _content(file: Path) -> bytes:
    if file.suffix != ".json":
        return file.read_bytes()
    content = read_json(file)
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _VOLATILE.get(file.name, ())}
    return json.dumps(content, sort_keys=True).encode()


def _weights_digest(file: Path) -> str:
    """SHA-256 (hex) of a file's content."""
    state = file.stat()
    if state.st_size < _CACHED_SIZE:
        return _sha256(file)
    # The time of change can't be set by hand, so that a file that was tampered with is read again.
    path = str(file.resolve())
    key = [path, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moevolve"
    kept = folder / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.json"
    if kept.is_file():
        try:
            found, digest = json.loads(kept.read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if found == key:
            return str(digest)
    digest = _sha256(file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Renamed when it is complete: other processes may read or write the same entry.
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps([key, digest]), encoding="utf-8")
        part.replace(kept)
    except OSError:
        logger.warning("the hash of %s can't be kept in %s, and is computed anew each time", file, folder)
    return digest


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _commit(config: ModelConfig) -> str:
    from transformers.utils.hub import extract_commit_hash

    commit = extract_commit_hash(str(config_file(config)), None)
    if commit is None:
        raise UserError(
            f"model {config.path}: its hub revision can't be resolved; give model.revision or a local folder"
        )
    return commit
