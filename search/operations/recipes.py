"""Recipes: writing an individual as one, and making a checkpoint from one without a store."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.text_files import writing_into
from moevolve.search.loop.scores import FULL
from moevolve.search.operations.export import scores_of, written
from moevolve.search.operations.recipe_files import (
    RECIPE,
    packed_matrices,
    packed_rows,
    read_recipe,
    recipe_edit,
    recipe_text,
    selection_edit,
    unpacked_rows,
)
from moevolve.search.operations.subject import Subject, find_subject
from moevolve.search.requests.recipes import ApplyRequest, Recipe, RecipeModel, RecipeRequest, RecipeRows
from moevolve.search.running.set_up import pinned
from moevolve.store.reader import StoreReader
from moevolve.workers.checkpoints.digests import check_digests, tensor_digests
from moevolve.workers.checkpoints.loading import dtype_of, load_config
from moevolve.workers.contract.card import ExportCard, ExportReport
from moevolve.workers.contract.edits import underlying
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit
from moevolve.workers.methods.repair.edit import RepairedEdit
from moevolve.workers.model.describe import describe_config, meta_model

_ROWS = TypeAdapter(RecipeRows)


def recipe(store: StoreReader, request: RecipeRequest) -> Recipe:
    """See `RecipeRequest`."""
    if request.individual == FULL:
        raise UserError(f"{FULL}: the full model needs no recipe; name an individual as SEARCH:INDEX")
    files = [Path(path) for path in (request.output, request.data) if path is not None]
    taken = next((file for file in files if file.exists()), None)
    if taken is not None:
        raise UserError(f"{taken} exists already; choose another name")
    subject = find_subject(store, request.individual, model=request.model)
    found = _recipe(store, subject)
    if request.data is not None:
        if found.rows is None:
            raise UserError(f"--data: {request.individual} isn't repaired, so its recipe has no token sequences")
        _write(Path(request.data), _ROWS.dump_json(found.rows, indent=1).decode() + "\n")
        found = replace(found, rows=replace(found.rows, content=None))
    if request.output is not None:
        _write(Path(request.output), recipe_text(found))
    return found


def apply(request: ApplyRequest) -> ExportReport:
    """See `ApplyRequest`."""
    path = Path(request.recipe)
    found = read_recipe(path)
    model = pinned(ModelConfig(request.model, dtype=request.dtype or "auto"))
    facts = describe_config(meta_model(model), model)
    if not isinstance(found, Recipe):
        selection = selection_edit(found, facts, str(path))
        note = f"Its experts were chosen by the list of retained experts in {path.name}."
        card = ExportCard(path.stem, request.model, "not hashed", notes=(note,))
        return written(model, selection, card, request)
    if facts.family != found.model.family:
        raise UserError(f"{request.model}: not the recipe's model, which is of family {found.model.family}")
    rows = _rows(found, request)
    check_digests(model, found.model.tensors)
    edit = recipe_edit(found, facts, rows, str(path))
    model = replace(
        model,
        dtype=request.dtype or found.model.dtype,
        attn_implementation=found.model.attn_implementation,
        experts_implementation=found.model.experts_implementation,
    )
    note = f"It was made from the recipe of {found.individual}, by moevolve {found.moevolve}."
    card = ExportCard(
        found.individual, request.model, found.model.fingerprint, individual=found.individual, scores=found.scores
    )
    return written(model, edit, replace(card, notes=(note,)), request)


def _recipe(store: StoreReader, subject: Subject) -> Recipe:
    detail, edit, model = subject.detail, subject.edit, subject.config.model
    assert detail is not None
    base = underlying(edit)
    if not isinstance(base, EepEdit):
        raise UserError(f"{detail.ref}: only individuals of kind eep that leave experts out or merge them have recipes")
    repaired = edit if isinstance(edit, RepairedEdit) else None
    retained = abs(base.expert_merging).argmax(axis=2).tolist()
    prunes = bool(base.one_hot_mapping.all()) and bool((base.router_mapping == base.expert_merging).all())
    facts = subject.facts
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
            attn_implementation=model.attn_implementation,
            experts_implementation=model.experts_implementation,
            tensors=tensor_digests(model),
        ),
        retained_experts={layer: tuple(kept) for layer, kept in zip(facts.moe_layers, retained, strict=True)},
        active=base.active,
        router_space=base.router_space,
        matrices=None if prunes else packed_matrices(base),
        widths=base.widths,
        repair=None if repaired is None else repaired.recipe,
        rows=None if repaired is None else packed_rows(repaired.rows),
        skipping=None if base.skip_rows is None else packed_rows(base.skip_rows),
        parameters=detail.individual.parameters,
        tasks={f"{one.task}/{one.split}": one.task_fingerprint for one in detail.evaluations},
        scores=scores_of(store, detail),
        phenotype=edit.phenotype_hash,
    )


def _rows(found: Recipe, request: ApplyRequest) -> FitRows | None:
    """The token sequences of a recipe, or of the file that it needs."""
    rows, where = found.rows, str(request.recipe)
    if rows is None or rows.content is not None:
        if request.data is not None:
            raise UserError(f"--data: {where} needs no file of token sequences; leave it out")
        return None if rows is None else unpacked_rows(rows, where)
    if request.data is None:
        raise UserError(
            f"{where} is of a repaired individual and names its token sequences by their hash, {rows.sha256[:12]}...; "
            "give their file with --data"
        )
    path = Path(request.data)
    try:
        there = _ROWS.validate_python(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"--data {path}: can't be read: {error.strerror}") from None
    except (ValueError, ValidationError):
        raise UserError(f"--data {path}: not a file that `moevolve recipe --data` wrote") from None
    if there.sha256 != rows.sha256 or there.content is None:
        raise UserError(f"--data {path}: not the token sequences of {where}; give the file that was written with it")
    return unpacked_rows(there, str(path))


def _write(path: Path, text: str) -> None:
    with writing_into(path.parent):
        path.write_text(text, encoding="utf-8")
