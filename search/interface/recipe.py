"""An individual as one file, a recipe, and the checkpoint of a recipe; the latter needs no store."""

from __future__ import annotations

from dataclasses import KW_ONLY, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from pydantic import ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.text_files import writing_into
from moevolve.search.interface.export import CheckpointRequest, scores_of
from moevolve.search.interface.parameters import (
    IndividualRef,
    ModelPath,
)
from moevolve.search.interface.recipe_file import (
    RECIPE,
    RECIPES,
    ROWS,
    Recipe,
    RecipeModel,
    packed_matrices,
    packed_rows,
    read_recipe,
    recipe_edit,
    selection_edit,
    unpacked_rows,
)
from moevolve.search.interface.request import Flag, Request, about, record
from moevolve.search.loop.scores import FULL
from moevolve.search.running.candidates import Candidate, find_candidate
from moevolve.search.running.set_up import pinned
from moevolve.store.reader import StoreReader
from moevolve.workers.contract.card import ExportCard, ExportReport
from moevolve.workers.contract.edits import underlying
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.settings import Device, Dtype, ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.repair.edit import RepairedEdit


@record
class RecipeRequest(Request):
    """Write an individual as a recipe: one JSON file from which `apply` rebuilds the checkpoint without the store.

    The token sequences that a repair was fitted on, which are prompts of yours, are part of it unless they get a file
    of their own. Every tensor of the model is read once, to be hashed.

    Raises:
        UserError: the individual is of another kind than EEP, the model can't be had, or a file exists.
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef
    _: KW_ONLY
    output: Annotated[
        str | Path | None, about("New file; default: none is written."), Flag("--output -o", "FILE", Path)
    ] = None
    data: Annotated[
        str | Path | None,
        about("New file for the token sequences of the repair, which the recipe then names by their hash."),
        Flag(metavar="FILE", kind=Path),
    ] = None
    model: ModelPath = None

    def answer(self, store: StoreReader) -> Recipe:
        if self.individual == FULL:
            raise UserError(f"{FULL}: the full model needs no recipe; name an individual as SEARCH:INDEX")
        files = [Path(path) for path in (self.output, self.data) if path is not None]
        taken = next((file for file in files if file.exists()), None)
        if taken is not None:
            raise UserError(f"{taken} exists already; choose another name")
        candidate = find_candidate(store, self.individual, model=self.model)
        found = _recipe(store, candidate)
        if self.data is not None:
            if found.rows is None:
                raise UserError(f"--data: {self.individual} isn't repaired, so its recipe has no token sequences")
            _write(Path(self.data), ROWS.dump_json(found.rows, indent=1).decode())
            found = replace(found, rows=replace(found.rows, content=None))
        if self.output is not None:
            _write(Path(self.output), RECIPES.dump_json(found, indent=1).decode())
        return found


@record
class ApplyRequest(CheckpointRequest):
    """Make the checkpoint of a recipe from a copy of its model, and verify its files. No store is needed.

    A list of kept experts, as REAP and llm-compressor write it, is a recipe as well: a JSON object of a list of
    experts for every MoE layer, by the layer's number or module. It isn't bound to a model.

    Raises:
        UserError: the recipe can't be read, is for another model (the first tensor that differs is named), or needs a
            file of token sequences; or see `ExportRequest`.
        ExportError: the checkpoint failed its verification.
    """

    recipe: Annotated[str | Path, about("File of the recipe."), Flag(metavar="RECIPE", kind=Path)]
    model: Annotated[str, about("The model: a folder, a GGUF file or a hub id."), Flag(metavar="MODEL")]
    directory: Annotated[str | Path, about("New folder of the checkpoint."), Flag(metavar="DIR", kind=Path)]
    _: KW_ONLY
    data: Annotated[
        str | Path | None,
        about("The file of token sequences, if the recipe doesn't have them."),
        Flag(metavar="FILE", kind=Path),
    ] = None
    device: Annotated[Device | None, about("Where a repair is fitted: a GPU if there is one.")] = None
    dtype: Annotated[Dtype | None, about("Dtype of the parameters; default: the recipe's.")] = None

    def answer(self) -> ExportReport:
        from moevolve.workers.checkpoints.fingerprint import check_digests
        from moevolve.workers.model.describe import describe_config, meta_model

        path = Path(self.recipe)
        found = read_recipe(path)
        model = pinned(ModelConfig(self.model, dtype=self.dtype or "auto"))
        facts = describe_config(meta_model(model), model)
        if not isinstance(found, Recipe):
            selection = selection_edit(found, facts, str(path))
            note = f"Its experts were chosen by the list of kept experts in {path.name}."
            card = ExportCard(path.stem, self.model, "not hashed", notes=(note,))
            return self.write(model, selection, card, Path(self.directory))
        if facts.family != found.model.family:
            raise UserError(f"{self.model}: not the recipe's model, which is of family {found.model.family}")
        rows = self._rows(found)
        check_digests(model, found.model.tensors)
        edit = recipe_edit(found, facts, rows, str(path))
        model = replace(model, dtype=self.dtype or found.model.dtype)
        note = f"It was made from the recipe of {found.individual}, by moevolve {found.moevolve}."
        card = ExportCard(
            found.individual, self.model, found.model.fingerprint, individual=found.individual, scores=found.scores
        )
        return self.write(model, edit, replace(card, notes=(note,)), Path(self.directory))

    def _rows(self, found: Recipe) -> FitRows | None:
        """The token sequences of a recipe, or those of the file of `data`."""
        rows, where = found.rows, str(self.recipe)
        if rows is None or rows.content is not None:
            if self.data is not None:
                raise UserError(f"--data: {where} needs no file of token sequences; leave it out")
            return None if rows is None else unpacked_rows(rows, where)
        if self.data is None:
            raise UserError(
                f"{where} is of a repaired individual and names its token sequences by their hash, "
                f"{rows.sha256[:12]}...; give their file with --data"
            )
        path = Path(self.data)
        try:
            there = ROWS.validate_json(path.read_bytes())
        except OSError as error:
            raise UserError(f"--data {path}: can't be read: {error.strerror}") from None
        except ValidationError:
            raise UserError(f"--data {path}: not a file that `moevolve recipe --data` wrote") from None
        if there.sha256 != rows.sha256 or there.content is None:
            raise UserError(
                f"--data {path}: not the token sequences of {where}; give the file that was written with it"
            )
        return unpacked_rows(there, str(path))


def _recipe(store: StoreReader, candidate: Candidate) -> Recipe:
    from moevolve.workers.checkpoints.fingerprint import tensor_digests
    from moevolve.workers.checkpoints.loading import dtype_of, load_config

    detail, edit, model = candidate.detail, candidate.edit, candidate.config.model
    assert detail is not None
    base = underlying(edit)
    if not isinstance(base, EepEdit):
        raise UserError(f"{detail.ref}: only individuals of kind eep that change the model have recipes")
    repaired = edit if isinstance(edit, RepairedEdit) else None
    retained = abs(base.expert_merging).argmax(axis=2).tolist()
    prunes = bool(base.one_hot_mapping.all()) and bool((base.router_mapping == base.expert_merging).all())
    facts = candidate.facts
    return Recipe(
        recipe=RECIPE,
        moevolve=version("moevolve"),
        individual=detail.ref,
        summary=detail.individual.summary,
        model=RecipeModel(
            path=model.path,
            fingerprint=facts.fingerprint,
            family=facts.family,
            experts=facts.experts,
            active=facts.active,
            dtype=dtype_of(model, load_config(model)),
            tensors=tensor_digests(model),
        ),
        kept_experts={layer: tuple(kept) for layer, kept in zip(facts.moe_layers, retained, strict=True)},
        active=base.active,
        router_space=base.router_space,
        matrices=None if prunes else packed_matrices(base),
        width=base.width,
        repair=None if repaired is None else repaired.settings,
        rows=None if repaired is None else packed_rows(repaired.rows),
        skipping=None if base.skip_rows is None else packed_rows(base.skip_rows),
        parameters=detail.individual.parameters,
        tasks={f"{one.task}/{one.split}": one.task_fingerprint for one in detail.evaluations},
        scores=scores_of(store, detail.evaluations),
        phenotype=edit.phenotype_hash,
    )


def _write(path: Path, text: str) -> None:
    with writing_into(path.parent):
        path.write_text(f"{text}\n", encoding="utf-8")
