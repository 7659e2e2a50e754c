"""Importing EEP coefficient files: each becomes a search of one individual."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.records import short_repr
from moevolve.search.config.files import changed_loading, find_model, load_run_config, override_lines
from moevolve.search.config.run import LONGEST_NAME, RunConfig
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.eep.coefficients import group_layers, read_coefficients
from moevolve.search.genomes.eep.space import EepGenome, EepSection, EepSpace
from moevolve.search.interface.opening import opened_store
from moevolve.search.interface.parameters import SETTINGS, Overrides
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.search_loop import individual_record
from moevolve.search.running.set_up import pinned
from moevolve.search.running.weights import describe_any, facts_text, resolved_model_path
from moevolve.store.records import new_search_id
from moevolve.store.repository import Store
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.settings import EngineConfig, ModelConfig
from moevolve.workers.methods.eep.edit import RouterSpace

_AUTHORS_TEMPLATES = {"mixtral": "mixtral"}
"""Prompt templates of the authors by model type; see `moevolve.workers.contract.settings.PACKAGED_TEMPLATES`."""


@dataclass(frozen=True, slots=True)
class _ReadFile:
    """A coefficient file, as a search to be stored."""

    path: Path
    config: RunConfig
    genome: EepGenome


@dataclass(frozen=True, slots=True)
class Imported:
    """One stored coefficient file; `ref` is its individual as `SEARCH:INDEX`."""

    __repr__ = short_repr

    ref: str
    path: Path
    experts: int
    groups: int
    summary: str


@record
class ImportEepRequest(Request):
    """Store the EEP authors' coefficient files as individuals, one search per file.

    They can be shown, evaluated and exported. No weights are needed before an individual is run; `model` names them
    then. Without a run configuration the original experts stay on the host, in the checkpoint's dtype, and prompts for
    a Mixtral are in the authors' template.

    Raises:
        UserError: a file can't be read or doesn't fit the model. The store is left alone then.
        StoreError: the store can't be opened.
    """

    opens = True
    files: Annotated[
        Sequence[str | Path],
        about("The EEP authors' coefficient files (.pth).", min_length=1),
        Flag(metavar="FILE...", kind=list[Path]),
    ]
    _: KW_ONLY
    experts_of: Annotated[
        str,
        about("The model: a checkpoint, a folder with its config.json, or a run configuration."),
        Flag(metavar="MODEL_OR_CONFIG"),
    ]
    active: Annotated[int | None, about("Experts per token; default: the model's number.", ge=1)] = None
    router_space: Annotated[
        RouterSpace, about("Whether the router mappings apply to the router's probabilities or logits.")
    ] = "probs"
    overrides: Annotated[
        Overrides,
        about("Change settings of `model.*` or `engine.*` that the individuals are evaluated with."),
        SETTINGS,
    ] = ()

    def answer(self, store: str | Store) -> list[Imported]:
        read = self._read()  # before the store is opened, so that a bad file leaves it untouched
        with opened_store(store, create=True) as opened:
            taken = {summary.search.name for summary in opened.searches()}
            for item in read:
                if item.config.name in taken:
                    raise UserError(f"{item.path}: search {item.config.name} exists in the store already")
                taken.add(item.config.name)
            return [_store(opened, item) for item in read]

    def _read(self) -> list[_ReadFile]:
        if self.experts_of.endswith((".yaml", ".yml")):
            config = load_run_config(Path(self.experts_of))
            model, engine = config.model, config.engine
        else:
            from moevolve.workers.checkpoints.loading import load_config

            # A device rarely holds a large model's original experts in addition to the retained ones.
            path = resolved_model_path(find_model(self.experts_of, "--experts-of"))
            model = ModelConfig(path=path, expert_offload="host")
            engine = EngineConfig(chat_template=_AUTHORS_TEMPLATES.get(load_config(model).model_type, "auto"))
        loading = changed_loading(model, engine, override_lines(self.overrides))
        model = pinned(loading.model)
        facts = describe_any(model)
        return [self._read_file(Path(file), model, loading.engine, facts) for file in self.files]

    def _read_file(self, path: Path, model: ModelConfig, engine: EngineConfig, facts: ModelFacts) -> _ReadFile:
        mapping, merging = read_coefficients(path, len(facts.moe_layers), facts.experts)
        retained, groups = int(mapping.shape[1]), group_layers(mapping, merging)
        if self.active is not None and self.active > retained:
            raise UserError(f"--active {self.active} is more than the {retained} experts of {path}")
        section = EepSection(experts=retained, active=self.active, groups=groups, router_space=self.router_space)
        space = EepSpace.of(section, facts)
        firsts = [space.layer_groups.index(group) for group in range(space.groups)]
        name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:LONGEST_NAME] or "import"
        config = RunConfig.imported(name, model, section, engine)
        return _ReadFile(path, config, EepGenome(space, mapping[firsts], merging[firsts]))


def _store(store: Store, item: _ReadFile) -> Imported:
    from moevolve.search.running.launch import search_record

    search_id, space = new_search_id(), item.genome.space
    description = space.describe(item.genome)
    record = search_record(item.config, search_id, space.facts.fingerprint)
    store.create_search(record, [], facts_text(space.facts))
    individual = individual_record(0, "import", Offspring(item.genome, "import-eep", ()), description, depth=0)
    store.record(search_id, individuals=[individual])
    store.set_status(search_id, "finished", f"imported from {item.path.name}")
    return Imported(f"{item.config.name}:0", item.path, space.retained, space.groups, description.summary)
