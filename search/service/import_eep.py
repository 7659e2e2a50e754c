"""Coefficient files as stored individuals: one search of one individual per file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moevolve.evaluators.errors import UserError
from moevolve.search.config.files import changed_loading, load_run_config
from moevolve.search.config.models import find_model
from moevolve.search.config.run import LONGEST_NAME, StoredConfig
from moevolve.search.genomes.base import Offspring
from moevolve.search.genomes.eep.coefficients import group_layers, read_coefficients
from moevolve.search.genomes.eep.genome import EepGenome
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.eep.space import EepSpace
from moevolve.search.loop.driver import individual_record
from moevolve.search.running.set_up import pinned
from moevolve.search.service.launch import search_record
from moevolve.search.service.weights import facts_with_or_without, where_model
from moevolve.store.records import new_search_id
from moevolve.store.repository import Store
from moevolve.workers.config import EngineConfig, ModelConfig
from moevolve.workers.facts import ModelFacts
from moevolve.workers.methods.eep.edit import RouterSpace
from moevolve.workers.model.loading import load_config

_AUTHORS_TEMPLATES = {"mixtral": "mixtral"}
"""What the authors wrap prompts in, by model type; see `moevolve.workers.config.PACKAGED_TEMPLATES`."""


@dataclass(frozen=True, slots=True)
class Imported:
    """One stored coefficient file."""

    ref: str
    path: Path
    experts: int
    groups: int
    summary: str


@dataclass(frozen=True, slots=True)
class ReadFile:
    """One coefficient file as a search that is yet to be stored."""

    path: Path
    config: StoredConfig
    genome: EepGenome


def read_files(
    files: Sequence[Path],
    experts_of: str,
    active: int | None,
    router_space: RouterSpace,
    overrides: Sequence[str] = (),
) -> list[ReadFile]:
    """Read every file, before there need be a store: a bad one leaves it untouched.

    Args:
        files: coefficient files.
        experts_of: checkpoint (folder or hub id), folder of a config.json, name of a config that comes with moevolve,
            or run configuration that names the model.
        active: experts per token; None keeps the model's, at most n'.
        router_space: how the router mappings are meant; the authors' are of the probabilities.
        overrides: of settings of the model and the engine that the individuals are evaluated with, `KEY=VALUE`.

    Weights aren't needed; whatever needs them later says which they are (`weights`).

    Raises:
        UserError: a file can't be read or doesn't fit the model.
    """
    loading = changed_loading(*_model_of(experts_of), overrides)
    model, engine = pinned(loading.model), loading.engine
    facts = facts_with_or_without(model)
    return [_read(path, model, engine, facts, active, router_space) for path in files]


def store_files(store: Store, read: Sequence[ReadFile]) -> list[Imported]:
    """Store all that was read, or nothing.

    Raises:
        UserError: a search of that name exists.
    """
    taken = {summary.search.name for summary in store.searches()}
    for item in read:
        if item.config.name in taken:
            raise UserError(f"{item.path}: search {item.config.name} exists in the store already")
        taken.add(item.config.name)
    return [_store(store, item) for item in read]


def _model_of(experts_of: str) -> tuple[ModelConfig, EngineConfig]:
    if experts_of.endswith((".yaml", ".yml")):
        config = load_run_config(Path(experts_of))
        return config.model, config.engine
    # A device has room for the retained experts of a large model, hardly ever for its originals beside them.
    model = ModelConfig(path=where_model(find_model(experts_of, "--experts-of")), originals="host")
    return model, EngineConfig(chat_template=_AUTHORS_TEMPLATES.get(load_config(model).model_type, "auto"))


def _read(
    path: Path,
    model: ModelConfig,
    engine: EngineConfig,
    facts: ModelFacts,
    active: int | None,
    router_space: RouterSpace,
) -> ReadFile:
    mapping, merging = read_coefficients(path, len(facts.moe_layers), facts.experts)
    retained, groups = int(mapping.shape[1]), group_layers(mapping, merging)
    if active is not None and active > retained:
        raise UserError(f"--active {active} is more than the {retained} experts of {path}")
    section = EepSection(experts=retained, active=active, groups=groups, router_space=router_space)
    space = EepSpace.of(section, facts)
    firsts = [space.layer_groups.index(group) for group in range(space.groups)]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:LONGEST_NAME] or "import"
    config = StoredConfig(name=name, model=model, genome=section, engine=engine)
    return ReadFile(path, config, EepGenome(space, mapping[firsts], merging[firsts]))


def _store(store: Store, item: ReadFile) -> Imported:
    search_id, space = new_search_id(), item.genome.space
    description = space.describe(item.genome)
    store.create_search(search_record(item.config, search_id, space.facts.fingerprint), [])
    individual = individual_record(0, "import", Offspring(item.genome, "import-eep", ()), description, depth=0)
    store.record(search_id, individuals=[individual])
    store.set_status(search_id, "finished", f"imported from {item.path.name}")
    return Imported(f"{item.config.name}:0", item.path, space.retained, space.groups, description.summary)
