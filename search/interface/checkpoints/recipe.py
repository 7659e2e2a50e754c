"""An individual as one file, a recipe, and the checkpoint of a recipe; the latter needs no store."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load, save

from moevolve.evaluators.errors import UserError, refused_paths
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.text_files import writing_into
from moevolve.search.interface.checkpoints.export import CheckpointRequest, scores_of
from moevolve.search.interface.parameters import IndividualRef, ModelPath
from moevolve.search.interface.request import Flag, Request, about, one_line_errors, record
from moevolve.search.running.candidates import Candidate, find_individual
from moevolve.search.running.set_up import pinned
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.card import ExportCard, ExportReport, ExportScore
from moevolve.workers.contract.edits import Edit, underlying
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.settings import Device, Dtype, ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit, RouterSpace
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings


@dataclass(frozen=True)
class RecipeModel:
    """The model that a recipe is for.

    Attributes:
        path: Folder, GGUF file or hub id where it was.
        family: Model type of `transformers`.
        dtype: Dtype of the parameters when the individual was evaluated.
        tensors: Hashes by name; see `moevolve.workers.checkpoints.digests`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    path: str
    fingerprint: str
    family: str
    dtype: Dtype
    tensors: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class Recipe:
    """An individual as one JSON file, with which another copy of its model becomes the same checkpoint.

    Attributes:
        moevolve: Version that wrote it.
        individual: `SEARCH:INDEX`.
        kept_experts: Experts that are kept, by decoder layer, in the order that they get, for people to read. Of a
            merged individual those with the largest coefficients.
        active: Active experts per token.
        router_space: See `EepEdit`.
        width: Neurons of an expert; None for the model's own.
        arrays: Both matrices, and the token sequences that the repair (`fit_*`) and thresholds of dynamic skipping
            (`skip_*`) are fitted on: a compressed safetensors file, in base64.
        tasks: Hashes of the tasks' splits that it was evaluated on, by `TASK/SPLIT`.
        phenotype: Hash of the edit, which applying it must give again.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    __repr__ = short_repr

    moevolve: str
    individual: str
    summary: str
    model: RecipeModel
    kept_experts: Mapping[int, tuple[int, ...]]
    active: int
    router_space: RouterSpace
    width: int | None
    repair: RepairSettings | None
    arrays: str = field(repr=False)
    tasks: Mapping[str, str]
    scores: tuple[ExportScore, ...]
    phenotype: str

    def edit(self) -> Edit:
        """Return the edit, as it was evaluated.

        Raises:
            ValueError: It isn't as it was written.
        """
        try:
            arrays = load(zlib.decompress(base64.b64decode(self.arrays, validate=True)))
            skipping = _rows(arrays, "skip")
            matrices = arrays["router_mapping"], arrays["expert_merging"]
            edit: Edit = EepEdit(*matrices, self.active, self.router_space, skipping, self.width)
            if self.repair is not None:
                fitted = _rows(arrays, "fit")
                assert fitted is not None and isinstance(edit, EepEdit)
                edit = RepairedEdit(edit, self.repair, fitted)
        except (zlib.error, SafetensorError, KeyError, AssertionError) as error:
            raise ValueError(f"arrays: {error}") from None
        if edit.phenotype_hash != self.phenotype:
            raise ValueError("phenotype: the hash of the edit is another one")
        return edit


_RECIPES = TypeAdapter(Recipe)


@record
class RecipeRequest(Request):
    """Write an individual as a recipe: one JSON file from which `apply` rebuilds the checkpoint without the store.

    The token sequences that a repair was fitted on, which are prompts of yours, are part of it. Every tensor of the
    model is read once, to be hashed.

    Raises:
        UserError: the individual has another kind than EEP, the model can't be had, or the file exists.
        StoreError: the store or individual doesn't exist.
    """

    individual: IndividualRef
    _: KW_ONLY
    output: Annotated[
        str | Path | None, about("New file; default: none is written."), Flag("--output -o", "FILE", Path)
    ] = None
    model: ModelPath = None

    def answer(self, store: StoreReader) -> Recipe:
        file = None if self.output is None else Path(self.output)
        if file is not None and file.exists():
            raise UserError(f"{file} exists already; choose another name")
        found = _recipe(store, find_individual(store, self.individual, self.model))
        if file is not None:
            with writing_into(file.parent):
                file.write_bytes(_RECIPES.dump_json(found, indent=1) + b"\n")
        return found


@record
class ApplyRequest(CheckpointRequest):
    """Make the checkpoint of a recipe from a copy of its model, and verify its files. No store is needed.

    Raises:
        UserError: the recipe can't be read, or is for another model (the first tensor that differs is named); or see
            `ExportRequest`.
        ExportError: the checkpoint failed its verification.
    """

    recipe: Annotated[str | Path, about("File of the recipe."), Flag(metavar="RECIPE", kind=Path)]
    model: Annotated[str, about("The model: a folder, a GGUF file or a hub id."), Flag(metavar="MODEL")]
    directory: Annotated[str | Path, about("New folder of the checkpoint."), Flag(metavar="DIR", kind=Path)]
    _: KW_ONLY
    device: Annotated[Device | None, about("Where a repair is fitted: a GPU if there is one.")] = None
    dtype: Annotated[Dtype | None, about("Dtype of the parameters; default: the recipe's.")] = None

    def answer(self) -> ExportReport:
        from moevolve.workers.checkpoints.fingerprint import check_digests
        from moevolve.workers.model.describe import describe_config, meta_model

        found, edit = read_recipe(Path(self.recipe))
        model = pinned(ModelConfig(self.model, dtype=self.dtype or "auto"))
        family = describe_config(meta_model(model), model).family
        if family != found.model.family:
            raise UserError(f"{self.model}: not the recipe's model, whose family is {found.model.family}")
        check_digests(model, found.model.tensors)
        model = replace(model, dtype=self.dtype or found.model.dtype)
        note = f"It was made from the recipe of {found.individual}, by moevolve {found.moevolve}."
        card = ExportCard(
            found.individual, self.model, found.model.fingerprint, individual=found.individual, scores=found.scores
        )
        return self.write(model, edit, replace(card, notes=(note,)), Path(self.directory))


def read_recipe(path: Path) -> tuple[Recipe, Edit]:
    """Read a recipe, and its edit.

    Raises:
        UserError: The file can't be read, isn't a recipe, or isn't as it was written.
    """
    with refused_paths():
        content = path.read_bytes()
    try:
        with one_line_errors():
            found = _RECIPES.validate_json(content)
        return found, found.edit()
    except UserError as error:
        raise UserError(f"{path}: not a recipe: {error}") from None
    except ValueError as error:
        raise UserError(f"{path}: changed after it was written, so write it again: {error}") from None


def _recipe(store: StoreReader, candidate: Candidate) -> Recipe:
    from moevolve.workers.checkpoints.fingerprint import tensor_digests
    from moevolve.workers.checkpoints.loading import dtype_of, load_config

    detail, edit, model, facts = candidate.individual, candidate.edit, candidate.config.model, candidate.facts
    base, repaired = underlying(edit), edit if isinstance(edit, RepairedEdit) else None
    if not isinstance(base, EepEdit):
        raise UserError(f"{detail.ref}: only individuals of kind eep that change the model have recipes")
    arrays = {"router_mapping": base.router_mapping, "expert_merging": base.expert_merging}
    for use, rows in (("skip", base.skip_rows), ("fit", None if repaired is None else repaired.rows)):
        if rows is not None:
            arrays |= {f"{use}_{name}": getattr(rows, name) for name in ("tokens", "lengths", "prompts")}
    packed = save({name: np.ascontiguousarray(each) for name, each in arrays.items()})
    retained = abs(base.expert_merging).argmax(axis=2).tolist()
    return Recipe(
        moevolve=version("moevolve"),
        individual=detail.ref,
        summary=detail.individual.summary,
        model=RecipeModel(
            path=model.path,
            fingerprint=facts.fingerprint,
            family=facts.family,
            dtype=dtype_of(model, load_config(model)),
            tensors=tensor_digests(model),
        ),
        kept_experts={layer: tuple(kept) for layer, kept in zip(facts.moe_layers, retained, strict=True)},
        active=base.active,
        router_space=base.router_space,
        width=base.width,
        repair=None if repaired is None else repaired.settings,
        arrays=base64.b64encode(zlib.compress(packed, 9)).decode(),
        tasks={f"{one.task}/{one.split}": one.task_fingerprint for one in detail.evaluations},
        scores=scores_of(store, detail.evaluations),
        phenotype=edit.phenotype_hash,
    )


def _rows(arrays: Mapping[str, NDArray[Any]], use: str) -> FitRows | None:
    """Return the token sequences for one use; None if there are none."""
    if f"{use}_tokens" not in arrays:
        return None
    return FitRows(*(arrays[f"{use}_{name}"] for name in ("tokens", "lengths", "prompts")))
