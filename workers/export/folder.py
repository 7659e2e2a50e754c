"""The folder of an export, which appears complete or not at all."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from moevolve.evaluators.errors import UserError, path_fault
from moevolve.workers.checkpoints.files import read_json
from moevolve.workers.checkpoints.headers import stored_tensors
from moevolve.workers.checkpoints.native import render
from moevolve.workers.contract.card import CardFacts, ExportCard, ExportError, ExportReport
from moevolve.workers.export.metadata import metadata_of
from moevolve.workers.export.servers import loads_in
from moevolve.workers.families.registry import UNLISTED

_UNVERIFIED = ".unverified"
_SPLIT_EXPERTS = {"gate_proj", "up_proj", "down_proj"}


class VerificationError(RuntimeError):
    """The files of a checkpoint differ from what was to be written, or compute something else."""


@contextmanager
def new_checkpoint(directory: Path, title: str) -> Iterator[Path]:
    """Context manager that yields a new folder and renames it to `directory` at the end, so that it appears complete.

    `directory` must be empty or not exist. After an error the folder is removed; after a `VerificationError` it is kept
    as `DIRECTORY.unverified`.

    Raises:
        UserError: The directory is taken or can't be written.
        ExportError: The block raised a `VerificationError`; its message names the checkpoint by `title`.
    """
    target = directory.expanduser().absolute()
    check_target(target)
    # Long names would get too long with the rest.
    prefix = f".{target.name[:32]}.part-{socket.gethostname()}-"
    # Exports to the same place that were killed on this host have left their folders, which nobody locks any more.
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):
        if (abandoned := _locked(left)) is not None:
            shutil.rmtree(left, ignore_errors=True)
            os.close(abandoned)
    # Beside the target, so that renaming it is atomic.
    part = target.with_name(f"{prefix}{uuid.uuid4().hex[:8]}")
    lock: int | None = None
    try:
        part.mkdir(parents=True)
        lock = _locked(part)
        yield part
        if target.exists():
            target.rmdir()
        part.rename(target)
    except VerificationError as error:
        reason = f"the checkpoint of {title} failed its verification: {error}"
        raise ExportError(reason, _keep_unverified(part, target)) from error
    except OSError as error:
        fault = path_fault(error, target) or f"{error}; choose another place"
        raise UserError(f"export directory {target} can't be written: {fault}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Lock a folder until this process ends or closes the descriptor; None if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, or the file system has no locks
        os.close(descriptor)
        return None
    return descriptor


def finished(report: ExportReport, directory: Path) -> ExportReport:
    """Add the final folder and its size to a report."""
    target = directory.expanduser().absolute()
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return replace(report, directory=target, size_bytes=size)


def loader_of(directory: Path) -> str:
    """Return the class of `transformers` that loads an export: its own if the one for causal language models can't."""
    file = directory / "config.json"
    names = read_json(file).get("architectures") if file.is_file() else None
    name: str = names[0] if names else ""
    own = name.endswith("ForConditionalGeneration") or name in UNLISTED.values()
    return name if own else "AutoModelForCausalLM"


def how_to_load(directory: Path, form: str) -> str:
    """Return the lines that say how an export is loaded, and which programs do."""
    programs = f"loads in: {', '.join(loads_in(directory, form))}"
    files = sorted(file.name for file in directory.glob("*.gguf"))
    if files:
        return f"load {directory / files[0]} with llama.cpp, or as model.path\n{programs}"
    remote = ", trust_remote_code=True" if form == "native" else ""
    return f'load it with: {loader_of(directory)}.from_pretrained("{directory}"{remote})\n{programs}'


def how_to_quantise(directory: Path, form: str) -> list[str]:
    """Commands that make a plain stock checkpoint's weights 8 or 4 bits wide, a line each; none for another one."""
    if form != "stock" or "quantization_config" in read_json(directory / "config.json"):
        return []
    lines = []
    # Version 0.14 writes experts one by one with these names, also where servers look for others or for fused ones.
    if {name.split(".")[-2] for name in stored_tensors(directory) if ".experts." in name} <= _SPLIT_EXPERTS:
        recipe = "QuantizationModifier(targets='Linear', scheme='FP8_DYNAMIC', ignore=['lm_head', 're:.*gate$'])"
        code = (
            "from llmcompressor import oneshot; from llmcompressor.modifiers.quantization import QuantizationModifier; "
            f"oneshot(model='{directory}', recipe={recipe}, output_dir='{directory}-fp8')"
        )
        lines.append(f'in 8 bits, for vLLM and SGLang, after pip install llmcompressor: python -c "{code}"')
    if any("llama.cpp" in program for program in loads_in(directory, form)):
        lines.append(
            f"in 4 bits, in llama.cpp's folder: python convert_hf_to_gguf.py {directory} --outfile {directory}.gguf && "
            f"llama-quantize {directory}.gguf {directory}-Q4_K_M.gguf Q4_K_M"
        )
    return lines


def write_card(part: Path, card: ExportCard, facts: CardFacts, source: Path) -> None:
    """Write the model card, `README.md`; `source` is the folder of the unedited checkpoint."""
    created = datetime.now(UTC).strftime("%Y-%m-%d")
    known = {"card": card, "facts": facts, "version": version("moevolve"), "created": created}
    known |= {"metadata": metadata_of(card, facts, source), "loader": loader_of(part)}
    known["programs"] = loads_in(part, facts.form)
    content = render("export/model_card.md.jinja", **known)
    (part / "README.md").write_text(content, encoding="utf-8")


def check_room(target: Path, needed: int) -> None:
    """Raise a `UserError` unless a folder's disk has room for `needed` bytes and some more; it needn't exist yet."""
    place = next(each for each in target.absolute().parents if each.exists())
    # Headers, tokenizer and configs come on top, and what the file system needs for itself.
    free, needed = shutil.disk_usage(place).free, int(needed * 1.02) + (1 << 20)
    if free < needed:
        raise UserError(
            f"no room for the export: {needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free at {place}; "
            "free some, or choose another place"
        )


def _keep_unverified(part: Path, target: Path) -> Path:
    """Rename the folder to an unused name that marks it as unverified."""
    kept, count = target.with_name(target.name + _UNVERIFIED), 1
    while kept.exists():
        count += 1
        kept = target.with_name(f"{target.name}{_UNVERIFIED}-{count}")
    part.rename(kept)
    return kept


def check_target(target: Path) -> None:
    """Raise a `UserError` if a folder is taken: it isn't empty, or is a file or a link to nothing."""
    if target.is_dir():
        if any(target.iterdir()):
            raise UserError(f"export directory {target} is not empty; give a new one, or remove it first")
    elif target.exists() or target.is_symlink():
        kind = "file" if target.exists() else "link to nothing"
        raise UserError(f"export directory {target} is a {kind}; give a folder's name")
