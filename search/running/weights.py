"""Which weights a search is about: of one imported with a model's config alone, the first ones that it is used with."""

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
"""Transformers' parts are imported when they are first used, which several threads of a server must not do at once."""


def facts_with_or_without(model: ModelConfig) -> ModelFacts:
    """Facts of a checkpoint; or of a config.json alone, whose fingerprint then is `config:` and a hash of them.

    Raises:
        UserError: the config can't be read, or the family isn't supported.
    """
    if _has_weights(model):
        return describe_model(model)
    facts = shapes(model)
    return replace(facts, fingerprint=_unbound(facts))


def shapes(config: ModelConfig) -> ModelFacts:
    """What a model's config.json says of it, weights or no weights; the fingerprint is empty.

    Raises:
        UserError: the config can't be read, or the family isn't supported.
    """
    with _describing:
        return describe_config(meta_model(config), config)


def outline_here(config: ModelConfig) -> ModelOutline | None:
    """Outline a checkpoint that is in a folder of this machine; None for a hub id, which nobody is asked about.

    Raises:
        UserError: there is no such folder, its config can't be read, or the family isn't supported.
    """
    from moevolve.workers.checkpoints.loading import local_directory
    from moevolve.workers.profiling.outline import outline_model

    with _describing:
        return None if local_directory(config) is None else outline_model(config)


def where_model(path: str) -> str:
    """A folder's whole path, so that it is found from anywhere; a hub id as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def facts_for(search: SearchRecord, model: ModelConfig) -> ModelFacts:
    """Facts of the weights that a search is about; of any that it could be about, if that is open.

    Args:
        search: the search.
        model: where its weights are.

    Raises:
        UserError: there are no weights, or they are others than the search's.
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
    """Refuse a model that isn't the one that a search ran on.

    Raises:
        UserError: its fingerprint is another.
    """
    if facts.fingerprint != search.model_fingerprint:
        raise UserError(
            f"model {path}: not the checkpoint that search {search.name} ran on: its weights, tokenizer or "
            "configuration files are others now; put them back, or launch another search"
        )


def _unbound(facts: ModelFacts) -> str:
    """Stands for whatever weights are of these shapes."""
    content = asdict(replace(facts, fingerprint="", dtype="", notes=()))
    return UNBOUND + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _has_weights(config: ModelConfig) -> bool:
    from moevolve.workers.checkpoints.loading import has_weights

    return has_weights(config)
