"""The checkpoint of a search. An imported search may have only a config; it then accepts any weights of its shapes."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.store.records import UNBOUND, SearchRecord
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.model.describe import describe_config, describe_model, meta_model

if TYPE_CHECKING:
    from moevolve.workers.profiling.outline import ModelOutline

_describing = threading.Lock()
"""Transformers imports its parts on first use, which isn't safe in several threads of a server at once."""


def describe_any(model: ModelConfig) -> ModelFacts:
    """Facts of a checkpoint, or of a config.json without weights, whose fingerprint is `config:` and a hash of them.

    Raises:
        UserError: The config can't be read, or the family isn't supported.
    """
    if _has_weights(model):
        return describe_model(model)
    facts = describe_shapes(model)
    return replace(facts, fingerprint=_unbound(facts))


def describe_shapes(config: ModelConfig) -> ModelFacts:
    """Facts of a model from its config.json alone, with an empty fingerprint.

    Raises:
        UserError: The config can't be read, or the family isn't supported.
    """
    with _describing:
        return describe_config(meta_model(config), config)


def outline_local(config: ModelConfig) -> ModelOutline | None:
    """Outline a checkpoint in a local folder; None for a hub id, since this makes no request to the hub.

    Raises:
        UserError: There is no such folder, its config can't be read, or the family isn't supported.
    """
    from moevolve.workers.checkpoints.loading import local_directory
    from moevolve.workers.profiling.outline import outline_model

    with _describing:
        return None if local_directory(config) is None else outline_model(config)


def resolved_model_path(path: str) -> str:
    """The absolute path of a local folder; a hub id stays unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def facts_for(search: SearchRecord, model: ModelConfig) -> ModelFacts:
    """Facts of a search's checkpoint.

    Args:
        search: Record of the search.
        model: The checkpoint to use with it.

    Raises:
        UserError: There are no weights, or the checkpoint isn't the search's.
    """
    if not search.is_bound and not _has_weights(model):
        raise UserError(
            f"search {search.name} was imported with the config in {model.path} alone, and this needs the weights; "
            "say where they are with --model PATH"
        )
    facts = describe_model(model)
    if search.is_bound:
        check_checkpoint(model.path, facts, search)
    elif _unbound(facts) != search.model_fingerprint:
        raise UserError(
            f"model {model.path}: its config isn't of the shapes that search {search.name} was imported for"
        )
    return facts


def check_checkpoint(path: str, facts: ModelFacts, search: SearchRecord) -> None:
    """Check that a model is the one that a search ran on.

    Raises:
        UserError: Its fingerprint differs.
    """
    if facts.fingerprint != search.model_fingerprint:
        raise UserError(
            f"model {path}: not the checkpoint that search {search.name} ran on: its weights, tokenizer or "
            "configuration files are others now; put them back, or launch another search"
        )


def _unbound(facts: ModelFacts) -> str:
    """A fingerprint that stands for all weights of these shapes."""
    content = asdict(replace(facts, fingerprint="", dtype="", notes=()))
    return UNBOUND + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _has_weights(config: ModelConfig) -> bool:
    from moevolve.workers.checkpoints.loading import has_weights

    return has_weights(config)
