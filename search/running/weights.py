"""The checkpoint of a search: its facts, as stored and as they are. An imported search may have no weights."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from moevolve.evaluators.errors import UserError
from moevolve.store.errors import parsing
from moevolve.store.reader import StoreReader
from moevolve.store.records import UNBOUND, SearchRecord
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import ModelConfig

_FACTS = TypeAdapter(ModelFacts)


def describe_any(model: ModelConfig) -> ModelFacts:
    """Facts of a checkpoint, or of a config.json without weights, whose fingerprint is `config:` and a hash of them."""
    from moevolve.workers.checkpoints.loading import has_weights
    from moevolve.workers.model.describe import describe_config, describe_model, meta_model

    if has_weights(model):
        return describe_model(model)
    facts = replace(describe_config(meta_model(model), model), fingerprint="")
    return replace(facts, fingerprint=UNBOUND + hashlib.sha256(facts_text(facts).encode()).hexdigest())


def facts_text(facts: ModelFacts) -> str:
    """Return the facts of a model as the JSON that is stored with a search."""
    return _FACTS.dump_json(facts).decode()


def stored_facts(store: StoreReader, search: SearchRecord) -> ModelFacts:
    """Return the facts of a search's model as they were when it was stored. The model needn't be there any more."""
    text = store.model_facts(search.id)
    if text is None:
        raise UserError(f"search {search.name} was stored without the facts of its model, so its genomes can't be read")
    with parsing(f"the facts of the model of search {search.name}"):
        return replace(parse_facts(text), fingerprint=search.model_fingerprint)


def parse_facts(text: str) -> ModelFacts:
    """Return the facts in the JSON of a store, which have no fingerprint."""
    return _FACTS.validate_json(text)


def resolved_model_path(path: str) -> str:
    """Return the absolute path of a local folder; a hub id stays unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def facts_for(search: SearchRecord, model: ModelConfig) -> ModelFacts:
    """Return the facts of the checkpoint `model`; UserError if it isn't the search's, or the search has no weights."""
    if search.model_fingerprint.startswith(UNBOUND):
        name = search.name
        raise UserError(
            f"search {name} was imported with the config in {search.model_path} alone, and this needs the weights: "
            f"delete it (moevolve db prune {name}), and import it again with --experts-of naming their checkpoint"
        )
    from moevolve.workers.model.describe import describe_model

    facts = describe_model(model)
    check_checkpoint(model.path, facts, search)
    return facts


def check_checkpoint(path: str, facts: ModelFacts, search: SearchRecord) -> None:
    """Refuse a model that isn't the one that a search ran on."""
    if facts.fingerprint != search.model_fingerprint:
        raise UserError(
            f"model {path}: not the checkpoint that search {search.name} ran on: its weights, tokenizer or "
            "configuration files are others now; put them back, or launch another search"
        )
