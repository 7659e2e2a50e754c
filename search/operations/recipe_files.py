"""Recipes as edits, and their files: our own JSON, and lists of retained experts that other tools write."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.search.requests.recipes import Recipe, RecipeMatrices, RecipeRows
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.methods.eep.edit import EepEdit, stock_space
from moevolve.workers.methods.repair.edit import RepairedEdit

RECIPE = 1
"""Number of the form of our recipes."""
_LAYER = re.compile(r"(?:.*\blayers\.)?(\d+)(?:\..+)?")
"""Key of a list of retained experts: the number of a decoder layer, or the name of a module in it."""
_ADAPTER = TypeAdapter(Recipe)

RetainedExperts = Mapping[int, tuple[int, ...]]
"""Experts to keep by decoder layer, in their new order."""


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
        return _ADAPTER.validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; write the recipe anew") from None


def recipe_text(recipe: Recipe) -> str:
    """A recipe as JSON."""
    return _ADAPTER.dump_json(recipe, indent=1).decode() + "\n"


def _retained(path: Path, found: Any) -> RetainedExperts:
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path}: expected a list of retained experts for every MoE layer")
    kept: dict[int, tuple[int, ...]] = {}
    for key, experts in found.items():
        match = _LAYER.fullmatch(key)
        if match is None:
            raise UserError(f"{path}: {key!r} is no decoder layer; keys are numbers, or modules such as layers.3.mlp")
        if not isinstance(experts, list) or not experts or not all(type(each) is int for each in experts):
            raise UserError(f"{path}: {key}: expected a list of numbers of experts")
        kept[int(match[1])] = tuple(experts)
    return kept


def selection_edit(kept: RetainedExperts, facts: ModelFacts, where: str) -> EepEdit:
    """The edit of a list of retained experts.

    Args:
        kept: The list. Layers behind the last MoE layer, which are for multi-token prediction, are passed over.
        facts: Facts of the model.
        where: File of the list, for error messages.

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
    """The edit of a recipe.

    Args:
        recipe: The recipe.
        facts: Facts of the model.
        rows: What its repair is fitted on, or its skipping measured on; None if it needs nothing.
        where: File of the recipe, for error messages.

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
