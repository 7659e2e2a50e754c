"""The checkpoint of a search. An imported search may have only a config; it then accepts any weights of its shapes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
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
    facts = describe_config(meta_model(model), model)
    return replace(facts, fingerprint=_unbound(facts))


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
    """Return the facts of the checkpoint `model`; UserError if it has no weights, or isn't the search's."""
    from moevolve.workers.checkpoints.loading import has_weights

    if not search.is_bound and not has_weights(model):
        raise UserError(
            f"search {search.name} was imported with the config in {model.path} alone, and this needs the weights; "
            "say where they are with --model PATH"
        )
    from moevolve.workers.model.describe import describe_model

    facts = describe_model(model)
    if search.is_bound:
        check_checkpoint(model.path, facts, search)
    elif _unbound(facts) != search.model_fingerprint:
        raise UserError(
            f"model {model.path}: its config isn't of the shapes that search {search.name} was imported for"
        )
    return facts


def check_checkpoint(path: str, facts: ModelFacts, search: SearchRecord) -> None:
    """Refuse a model that isn't the one that a search ran on."""
    if facts.fingerprint != search.model_fingerprint:
        raise UserError(
            f"model {path}: not the checkpoint that search {search.name} ran on: its weights, tokenizer or "
            "configuration files are others now; put them back, or launch another search"
        )


def _unbound(facts: ModelFacts) -> str:
    """Return a fingerprint that stands for all weights of these shapes."""
    content = asdict(replace(facts, fingerprint="", dtype="", notes=()))
    return UNBOUND + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
