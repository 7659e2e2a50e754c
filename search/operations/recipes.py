"""Recipes: writing an individual as one, and making a checkpoint from one without a store.

A recipe is our own JSON, or a list of retained experts that another tool has written.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import StrictInt, TypeAdapter, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.text_files import writing_into
from moevolve.evaluators.yaml_files import explain_validation
from moevolve.search.loop.scores import FULL
from moevolve.search.operations.export import scores_of, written
from moevolve.search.operations.subject import Subject, find_subject
from moevolve.search.requests.recipes import (
    ApplyRequest,
    Recipe,
    RecipeMatrices,
    RecipeModel,
    RecipeRequest,
    RecipeRows,
)
from moevolve.search.running.set_up import pinned
from moevolve.store.reader import StoreReader
from moevolve.workers.checkpoints.fingerprint import check_digests, tensor_digests
from moevolve.workers.checkpoints.loading import dtype_of, load_config
from moevolve.workers.contract.card import ExportCard, ExportReport
from moevolve.workers.contract.edits import Edit, underlying
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.methods.eep.edit import EepEdit, stock_space
from moevolve.workers.methods.repair.edit import RepairedEdit
from moevolve.workers.model.describe import describe_config, meta_model

RECIPE = 1
"""Number of the form of our recipes."""
_LAYER = re.compile(r"(?:.*\blayers\.)?(\d+)(?:\..+)?")
"""Key of a list of retained experts: the number of a decoder layer, or the name of a module in it."""
_RECIPES, _ROWS, _LISTS = TypeAdapter(Recipe), TypeAdapter(RecipeRows), TypeAdapter(dict[str, tuple[StrictInt, ...]])

RetainedExperts = Mapping[int, tuple[int, ...]]
"""Experts to keep by decoder layer, in their new order."""


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
        _write(Path(request.data), _ROWS.dump_json(found.rows, indent=1).decode())
        found = replace(found, rows=replace(found.rows, content=None))
    if request.output is not None:
        _write(Path(request.output), _RECIPES.dump_json(found, indent=1).decode())
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
        raise UserError(f"{detail.ref}: only individuals of kinds eep and capacity that change the model have recipes")
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
    """The token sequences of a recipe, or those of the file that the request names."""
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
        there = _ROWS.validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"--data {path}: can't be read: {error.strerror}") from None
    except ValidationError:
        raise UserError(f"--data {path}: not a file that `moevolve recipe --data` wrote") from None
    if there.sha256 != rows.sha256 or there.content is None:
        raise UserError(f"--data {path}: not the token sequences of {where}; give the file that was written with it")
    return unpacked_rows(there, str(path))


def _write(path: Path, text: str) -> None:
    with writing_into(path.parent):
        path.write_text(f"{text}\n", encoding="utf-8")


def read_recipe(path: Path) -> Recipe | RetainedExperts:
    """Read a recipe, or a list of retained experts.

    Raises:
        UserError: The file can't be read, or is neither.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: a recipe is a JSON object, this is a {type(found).__name__}")
    if "recipe" not in found:
        return _retained(path, found.get("retained_experts", found))
    if found["recipe"] != RECIPE:
        raise UserError(f"{path}: a recipe of form {found['recipe']}, and this version reads form {RECIPE}")
    try:
        return _RECIPES.validate_python(found)
    except ValidationError as error:
        raise UserError(f"{path}: {explain_validation(error, found)}; write the recipe anew") from None


def _retained(path: Path, found: Any) -> RetainedExperts:
    try:
        lists = _LISTS.validate_python(found)
    except ValidationError as error:
        raise UserError(
            f"{path}: not a list of experts for every MoE layer: {explain_validation(error, found)}"
        ) from None
    kept: dict[int, tuple[int, ...]] = {}
    for key, experts in lists.items():
        match = _LAYER.fullmatch(key)
        if match is None:
            raise UserError(f"{path}: {key!r} is no decoder layer; keys are numbers, or modules such as layers.3.mlp")
        kept[int(match[1])] = experts
    return kept


def selection_edit(kept: RetainedExperts, facts: ModelFacts, where: str) -> EepEdit:
    """The edit of a list of retained experts in a file `where`.

    Layers behind the last MoE layer, which are for multi-token prediction, are passed over.

    Raises:
        UserError: A layer is missing or has no experts, an expert doesn't exist or is named twice, or layers keep
            different numbers.
    """
    if not facts.experts:
        raise UserError(f"{where}: the model is dense, it has no experts to retain")
    counts = {layer: len(kept.get(layer, ())) for layer in facts.moe_layers}
    odd = next((layer for layer in kept if layer not in counts and layer < max(counts)), None)
    if odd is not None:
        raise UserError(f"{where}: layer {odd} of the model has no experts")
    first = counts[facts.moe_layers[0]]
    other = next((layer for layer, count in counts.items() if count != first or not count), None)
    if other is not None:
        raise UserError(
            f"{where}: layer {other} retains {counts[other]} experts, and layer {facts.moe_layers[0]} {first}; every "
            "MoE layer has to retain equally many"
        )
    one_hot = np.zeros((len(counts), first, facts.experts), np.float32)
    for place, layer in enumerate(facts.moe_layers):
        experts = kept[layer]
        wrong = next((each for each in experts if not 0 <= each < facts.experts or experts.count(each) > 1), None)
        if wrong is not None:
            what = "twice" if 0 <= wrong < facts.experts else f"of {facts.experts}, which are numbered from 0"
            raise UserError(f"{where}: layer {layer} retains expert {wrong} {what}")
        one_hot[place, range(first), experts] = 1
    return EepEdit(one_hot, one_hot, min(facts.active, first), stock_space(facts.rule))


def recipe_edit(recipe: Recipe, facts: ModelFacts, rows: FitRows | None, where: str) -> Edit:
    """The edit of the recipe in a file `where`; its repair is fitted on `rows`.

    Raises:
        UserError: The recipe doesn't fit the model, or it isn't as it was written.
    """
    if recipe.matrices is None:
        base = selection_edit(recipe.retained_experts, facts, where)
    else:
        given = recipe.matrices
        mapping, merging = (_array(text, given.shape, where) for text in (given.router_mapping, given.expert_merging))
        base = EepEdit(mapping, merging, recipe.active)
    skipping = None if recipe.skipping is None else unpacked_rows(recipe.skipping, where)
    edit: Edit = replace(
        base, active=recipe.active, router_space=recipe.router_space, widths=recipe.widths, skip_rows=skipping
    )
    if recipe.repair is not None:
        assert rows is not None and isinstance(edit, EepEdit)
        edit = RepairedEdit(edit, recipe.repair, rows)
    if edit.phenotype_hash != recipe.phenotype:
        raise UserError(f"{where}: it was changed after it was written; write the recipe anew")
    return edit


def packed_rows(rows: FitRows) -> RecipeRows:
    """Token sequences as a part of a recipe."""
    parts = (rows.lengths, rows.prompts, rows.tokens)
    data = zlib.compress(b"".join(each.astype("<i4").tobytes() for each in parts), 9)
    content = base64.b64encode(data).decode()
    return RecipeRows(rows.fingerprint, len(rows.tokens), len(rows.lengths), content)


def unpacked_rows(rows: RecipeRows, where: str) -> FitRows:
    """The token sequences of a part of a recipe that has its content.

    Raises:
        UserError: The content isn't what its hash says.
    """
    try:
        data = zlib.decompress(base64.b64decode(rows.content or "", validate=True))
        numbers = np.frombuffer(data, "<i4").astype(np.int32)
        lengths, prompts, tokens = np.split(numbers, [rows.sequences, 2 * rows.sequences])
        found = FitRows(tokens, lengths, prompts)
    except (zlib.error, ValueError):
        found = None
    # The hash covers the concatenated numbers, so it doesn't tell where the sequences begin.
    whole = found is not None and int(found.lengths.sum()) == len(found.tokens) == rows.tokens
    if found is None or not whole or found.fingerprint != rows.sha256:
        raise UserError(f"{where}: its token sequences aren't those that their hash says; write the recipe anew")
    return found


def packed_matrices(edit: EepEdit) -> RecipeMatrices:
    """Both matrices of an edit as a part of a recipe."""
    texts = (
        base64.b64encode(each.astype("<f4").tobytes()).decode() for each in (edit.router_mapping, edit.expert_merging)
    )
    layers, retained, experts = edit.router_mapping.shape
    return RecipeMatrices((layers, retained, experts), *texts)


def _array(text: str, shape: tuple[int, int, int], where: str) -> NDArray[np.float32]:
    try:
        return np.frombuffer(base64.b64decode(text, validate=True), "<f4").astype(np.float32).reshape(shape)
    except ValueError:
        raise UserError(f"{where}: matrices: not of shape {list(shape)}; write the recipe anew") from None
