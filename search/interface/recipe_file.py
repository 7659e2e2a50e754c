"""The file of a recipe: what an individual does to a model, without a store.

A recipe is our own JSON, or a list of kept experts that another tool has written.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import StrictInt, TypeAdapter, ValidationError

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.records import short_repr
from moevolve.evaluators.yaml_files import explain_validation
from moevolve.workers.contract.card import ExportScore
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.fitting import FitRows
from moevolve.workers.contract.settings import Dtype
from moevolve.workers.methods.eep.edit import EepEdit, RouterSpace, stock_space
from moevolve.workers.methods.repair.edit import RepairedEdit, RepairSettings

RECIPE = 1
"""Number of the form of our recipes."""
_LAYER = re.compile(r"(?:.*\blayers\.)?(\d+)(?:\..+)?")
"""Key of a list of kept experts: the number of a decoder layer, or the name of a module in it."""
KeptExperts = Mapping[int, tuple[int, ...]]
"""Experts to keep by decoder layer, in their new order."""


@dataclass(frozen=True)
class _Strict:
    """A record whose JSON may have no other fields."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class RecipeModel(_Strict):
    """The model that a recipe is for.

    Attributes:
        path: Folder, GGUF file or hub id where it was.
        family: Model type of `transformers`.
        experts, active: Experts per MoE layer, and of them per token.
        dtype: Dtype of the parameters when the individual was evaluated.
        tensors: Hashes by name; see `moevolve.workers.checkpoints.digests`.
    """

    path: str
    fingerprint: str
    family: str
    experts: int
    active: int
    dtype: Dtype
    tensors: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class RecipeMatrices(_Strict):
    """Matrices of an individual that doesn't only leave experts out.

    Attributes:
        shape: `[MoE layers, n', n]`.
        router_mapping, expert_merging: `W_RM` and `W_EM` as little-endian float32 in base64.
    """

    shape: tuple[int, int, int]
    router_mapping: str = field(repr=False)
    expert_merging: str = field(repr=False)


@dataclass(frozen=True)
class RecipeRows(_Strict):
    """Token sequences that a repair, or thresholds of dynamic skipping, are fitted on.

    Attributes:
        tokens, sequences: Numbers of them.
        content: The sequences, compressed, in base64; None if they are in a file beside the recipe.
    """

    sha256: str
    tokens: int
    sequences: int
    content: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Recipe(_Strict):
    """An individual as one JSON file, with which another copy of its model becomes the same checkpoint.

    Attributes:
        recipe: Number of this form.
        moevolve: Version that wrote it.
        individual: `SEARCH:INDEX`.
        kept_experts: Experts that are kept, by decoder layer, in the order that they get. Of a merged individual
            those with the largest coefficients.
        active: Active experts per token.
        router_space: See `EepEdit`.
        matrices: Both matrices; None if it only leaves experts out.
        width: Neurons of an expert; None for the model's own.
        rows: What the repair is fitted on.
        skipping: What thresholds of dynamic skipping are measured on.
        parameters: Number of parameters of the new checkpoint; None if it isn't stored.
        tasks: Hashes of the tasks' splits that it was evaluated on, by `TASK/SPLIT`.
        phenotype: Hash of the edit, which applying it must give again.
    """

    __repr__ = short_repr

    recipe: int
    moevolve: str
    individual: str
    summary: str
    model: RecipeModel
    kept_experts: Mapping[int, tuple[int, ...]]
    active: int
    router_space: RouterSpace
    matrices: RecipeMatrices | None
    width: int | None
    repair: RepairSettings | None
    rows: RecipeRows | None
    skipping: RecipeRows | None
    parameters: int | None
    tasks: Mapping[str, str]
    scores: tuple[ExportScore, ...]
    phenotype: str


RECIPES, ROWS = TypeAdapter(Recipe), TypeAdapter(RecipeRows)
_LISTS = TypeAdapter(dict[str, tuple[StrictInt, ...]])


def read_recipe(path: Path) -> Recipe | KeptExperts:
    """Read a recipe, or a list of kept experts.

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
        return _kept(path, found.get("retained_experts", found))
    if found["recipe"] != RECIPE:
        raise UserError(f"{path}: a recipe of form {found['recipe']}, and this version reads form {RECIPE}")
    try:
        return RECIPES.validate_python(found)
    except ValidationError as error:
        raise UserError(f"{path}: {explain_validation(error, found)}; write the recipe anew") from None


def _kept(path: Path, found: Any) -> KeptExperts:
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


def selection_edit(kept: KeptExperts, facts: ModelFacts, where: str) -> EepEdit:
    """The edit of a list of kept experts in a file `where`.

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
        base = selection_edit(recipe.kept_experts, facts, where)
    else:
        given = recipe.matrices
        mapping, merging = (_array(text, given.shape, where) for text in (given.router_mapping, given.expert_merging))
        base = EepEdit(mapping, merging, recipe.active)
    skipping = None if recipe.skipping is None else unpacked_rows(recipe.skipping, where)
    edit: Edit = replace(
        base, active=recipe.active, router_space=recipe.router_space, width=recipe.width, skip_rows=skipping
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
