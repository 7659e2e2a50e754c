"""Importing the EEP authors' coefficient files, and lists of kept experts: each becomes a search of one individual.

Format of the former (as released with arXiv 2407.00945): a dict of float32 tensors [n', n]. `layers.[a-b]` or
`layers.l` is `W_EM` of those layers, `transfer.[a-b]` or `transfer.l` their `W_RM`; `others` and `others_transfer`
apply to all other layers. For lists see `moevolve.workers.export.lists`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.records import short_repr
from moevolve.search.config.files import changed_loading, find_model, override_lines
from moevolve.search.config.run import LONGEST_NAME, RunConfig
from moevolve.search.genomes.contract.base import Offspring
from moevolve.search.genomes.eep.section import EepSection
from moevolve.search.genomes.eep.space import EepGenome, EepSpace
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

# Prompt templates of the authors by model type; see `moevolve.workers.contract.settings.PACKAGED_TEMPLATES`.
_AUTHORS_TEMPLATES = {"mixtral": "mixtral"}
# Suffixes of lists of kept experts.
_LISTS = (".json", ".jsonl")

_KEY = re.compile(r"(layers|transfer)\.(?:(\d+)|\[(\d+)-(\d+)\])")
_OTHERS = {"layers": "others", "transfer": "others_transfer"}

Matrices = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Imported:
    """One stored file; `ref` is its individual as `SEARCH:INDEX`."""

    __repr__ = short_repr

    ref: str
    path: Path
    experts: int
    groups: int
    summary: str


@record
class ImportEepRequest(Request):
    """Store the EEP authors' coefficient files, or lists of kept experts, as individuals, one search per file.

    They can be shown, evaluated and exported, or only shown if the model is a config.json without weights. The
    original experts stay on the host, in the checkpoint's dtype, and the authors' coefficients for a Mixtral get
    prompts in their template.

    Raises:
        UserError: a file can't be read or doesn't fit the model. The store is left alone then.
        StoreError: the store can't be opened.
    """

    opens = True
    files: Annotated[
        Sequence[str | Path],
        about(
            "The EEP authors' coefficient files (.pth), or lists of kept experts (.json, .jsonl) as `export --form` "
            "writes them.",
            min_length=1,
        ),
        Flag(metavar="FILE...", kind=list[Path]),
    ]
    _: KW_ONLY
    experts_of: Annotated[
        str,
        about("The model: a checkpoint, or a folder with its config.json."),
        Flag(metavar="MODEL"),
    ]
    active: Annotated[int | None, about("Experts per token; default: the model's number.", ge=1)] = None
    router_space: Annotated[
        RouterSpace | None,
        about(
            "Whether the router mappings apply to the router's probabilities or logits; default: probabilities, and "
            "for lists what a smaller router does."
        ),
    ] = None
    overrides: Annotated[
        Overrides,
        about("Change settings of `model.*` or `engine.*` that the individuals are evaluated with."),
        SETTINGS,
    ] = ()

    def answer(self, store: str | Store) -> list[Imported]:
        read = self._read()  # before the store is opened, so that a bad file leaves it untouched
        with opened_store(store, create=True) as opened:
            taken = {summary.search.name for summary in opened.searches()}
            for path, config, _ in read:
                if config.name in taken:
                    raise UserError(f"{path}: search {config.name} exists in the store already")
                taken.add(config.name)
            return [_store(opened, *file) for file in read]

    def _read(self) -> list[tuple[Path, RunConfig, EepGenome]]:
        """Read each file, as a search to be stored."""
        from moevolve.workers.checkpoints.loading import load_config

        # A device rarely holds a large model's original experts in addition to the retained ones.
        path = resolved_model_path(find_model(self.experts_of, "--experts-of"))
        model = ModelConfig(path=path, expert_offload="host")
        authors = EngineConfig(chat_template=_AUTHORS_TEMPLATES.get(load_config(model).model_type, "auto"))
        changes = override_lines(self.overrides)
        of_lists, of_authors = (changed_loading(model, each, changes) for each in (EngineConfig(), authors))
        model = pinned(of_lists.model)
        facts = describe_any(model)
        return [
            self._read_file(path, model, (of_lists if path.suffix in _LISTS else of_authors).engine, facts)
            for path in map(Path, self.files)
        ]

    def _read_file(
        self, path: Path, model: ModelConfig, engine: EngineConfig, facts: ModelFacts
    ) -> tuple[Path, RunConfig, EepGenome]:
        router_space = self.router_space
        if path.suffix in _LISTS:
            from moevolve.workers.export.lists import read_list

            mapping = merging = np.eye(facts.experts, dtype=np.float32)[read_list(path, facts)]
        else:
            router_space = router_space or "probs"
            mapping, merging = read_coefficients(path, len(facts.moe_layers), facts.experts)
        retained, groups = int(mapping.shape[1]), group_layers(mapping, merging)
        if self.active is not None and self.active > retained:
            raise UserError(f"--active {self.active} is more than the {retained} experts of {path}")
        section = EepSection(experts=retained, active=self.active, groups=groups, router_space=router_space)
        space = EepSpace.of(section, facts)
        firsts = [space.layer_groups.index(group) for group in range(space.groups)]
        name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-")[:LONGEST_NAME] or "import"
        config = RunConfig.imported(name, model, section, engine)
        return path, config, EepGenome(space, mapping[firsts], merging[firsts])


def _store(store: Store, path: Path, config: RunConfig, genome: EepGenome) -> Imported:
    from moevolve.search.running.launch import search_record

    search_id, space = new_search_id(), genome.space
    description = space.describe(genome)
    record = search_record(config, search_id, space.facts.fingerprint)
    store.create_search(record, [], facts_text(space.facts))
    individual = individual_record(0, "import", Offspring(genome, "import-eep", ()), description, depth=0)
    store.record(search_id, individuals=[individual])
    store.set_status(search_id, "finished", f"imported from {path.name}")
    return Imported(f"{config.name}:0", path, space.retained, space.groups, description.summary)


def read_coefficients(path: Path, layers: int, experts: int) -> tuple[Matrices, Matrices]:
    """Read one file for a model with so many MoE layers of n experts; nothing but tensors is unpickled.

    Returns:
        `W_RM` and `W_EM` of every layer, each float32 [layers, n', n].

    Raises:
        UserError: The file can't be read, or doesn't fit the model; the message names file and key.
    """
    tensors = _load(path)
    merging = _per_layer(path, tensors, "layers", layers)
    mapping = _per_layer(path, tensors, "transfer", layers)
    shapes = {matrix.shape for matrix in (*merging, *mapping)}
    if len(shapes) != 1:
        raise UserError(f"{path}: matrices of different shapes: {', '.join(map(str, sorted(shapes)))}")
    _, columns = next(iter(shapes))
    if columns != experts:
        raise UserError(f"{path}: matrices have {columns} columns, the model has {experts} experts")
    return np.stack(mapping), np.stack(merging)


def group_layers(mapping: Matrices, merging: Matrices) -> int:
    """Return the smallest number of equal contiguous groups whose layers share their matrices; `layers` if none do."""
    layers = mapping.shape[0]
    for groups in range(1, layers):
        owners = np.arange(layers) * groups // layers
        firsts = np.array([np.flatnonzero(owners == group)[0] for group in range(groups)])
        same = (mapping == mapping[firsts[owners]]).all() and (merging == merging[firsts[owners]]).all()
        if same:
            return groups
    return layers


def _load(path: Path) -> dict[str, NDArray[np.float32]]:
    import torch

    if not path.is_file():
        raise UserError(f"{path}: no such coefficient file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - bytes of other files can fail in any way Python can
        # torch's own message advises weights_only=False, which runs code in the file.
        raise UserError(f"{path}: not a file of tensors that torch.save wrote, or it holds more than tensors") from None
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UserError(f"{path}: expected a dict of tensors")
    for key, value in content.items():
        if value.ndim != 2 or not bool(torch.isfinite(value).all()):
            raise UserError(f"{path}: {key} is not a finite matrix")
    return {str(key): value.float().numpy() for key, value in content.items()}


def _per_layer(path: Path, tensors: dict[str, Matrices], kind: str, layers: int) -> list[Matrices]:
    found: dict[int, Matrices] = {}
    for key, matrix in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            if key not in _OTHERS.values():
                raise UserError(f"{path}: unknown key {key!r}; expected layers.*, transfer.*, others, others_transfer")
            continue
        if match[1] != kind:
            continue
        first, last = (int(match[2]),) * 2 if match[2] else (int(match[3]), int(match[4]))
        if last >= layers:
            raise UserError(f"{path}: {key} names layer {last}, the model has {layers} MoE layers")
        if first > last:
            raise UserError(f"{path}: {key} names no layer")
        for layer in range(first, last + 1):
            if layer in found:
                raise UserError(f"{path}: {key} names layer {layer} again")
            found[layer] = matrix
    others = tensors.get(_OTHERS[kind])
    missing = [layer for layer in range(layers) if layer not in found]
    if missing and others is None:
        raise UserError(f"{path}: no {kind} matrix for layer {missing[0]}, and no {_OTHERS[kind]!r}")
    return [found.get(layer, others) for layer in range(layers)]  # type: ignore[misc]
