"""Recipes: what an individual does to a model, in one file that needs no store, and the requests about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from moevolve.search.requests.parameters import (
    ExportForm,
    IndividualRef,
    ModelPath,
    Mtp,
    PadExperts,
    Requantise,
)
from moevolve.search.requests.record import Flag, Request, about, record
from moevolve.workers.contract.card import ExportReport, ExportScore
from moevolve.workers.contract.settings import Device, Dtype, ExpertsImplementation
from moevolve.workers.methods.eep.edit import RouterSpace
from moevolve.workers.methods.repair.edit import RepairRecipe


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
        attn_implementation, experts_implementation: Backends of `transformers` then.
        tensors: Hashes by name; see `moevolve.workers.checkpoints.fingerprint`.
    """

    path: str
    fingerprint: str
    family: str
    experts: int
    active: int
    dtype: Dtype
    attn_implementation: str
    experts_implementation: ExpertsImplementation
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
        retained_experts: Experts that are kept, by decoder layer, in the order that they get. Of a merged individual
            those with the largest coefficients.
        active: Active experts per token.
        router_space: See `EepEdit`.
        matrices: Both matrices; None if it only leaves experts out.
        widths: Neurons of an expert by MoE layer; None for the model's own.
        rows: What the repair is fitted on.
        skipping: What thresholds of dynamic skipping are measured on.
        parameters: Number of parameters of the new checkpoint; None if it isn't stored.
        tasks: Hashes of the tasks' splits that it was evaluated on, by `TASK/SPLIT`.
        phenotype: Hash of the edit, which applying it must give again.
    """

    recipe: int
    moevolve: str
    individual: str
    summary: str
    model: RecipeModel
    retained_experts: Mapping[int, tuple[int, ...]]
    active: int | tuple[int, ...]
    router_space: RouterSpace
    matrices: RecipeMatrices | None
    widths: tuple[int, ...] | None
    repair: RepairRecipe | None
    rows: RecipeRows | None
    skipping: RecipeRows | None
    parameters: int | None
    tasks: Mapping[str, str]
    scores: tuple[ExportScore, ...]
    phenotype: str


@record
class RecipeRequest(Request["Recipe"]):
    """Write an individual as a recipe: one JSON file with which `apply` makes its checkpoint without the store.

    The token sequences that a repair was fitted on, which are prompts of yours, are part of it unless they get a file
    of their own. Every tensor of the model is read once, to be hashed.

    Raises:
        UserError: the individual is of another kind than EEP, the model can't be had, or a file exists.
        StoreError: there is no such store or individual.
    """

    individual: IndividualRef
    _: KW_ONLY
    output: Annotated[
        str | Path | None, about("New file; nothing is written if left out."), Flag("--output -o", "FILE", Path)
    ] = None
    data: Annotated[
        str | Path | None,
        about("New file for the token sequences of the repair, which the recipe then names by their hash."),
        Flag(metavar="FILE", kind=Path),
    ] = None
    model: ModelPath = None


@record
class ApplyRequest(Request["ExportReport"]):
    """Make the checkpoint of a recipe from a copy of its model, and verify its files. No store is needed.

    A list of retained experts, as REAP and llm-compressor write it, is a recipe as well: a JSON object of a list of
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
    form: ExportForm = None
    mtp: Mtp = None
    requantise: Requantise = False
    pad_experts: PadExperts = None
    device: Annotated[Device | None, about("Where a repair is fitted: a GPU if there is one.")] = None
    dtype: Annotated[Dtype | None, about("Dtype of the parameters; the recipe's if left out.")] = None
