"""The contract of methods without torch: edits (the phenotype, all a worker knows of a genome) and calibrations."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

Tokens = tuple[int, ...]
"""Token ids of one sequence."""

ROW_TOKENS = 1024
"""Tokens of the sequences that share a row. With fewer, layers whose experts are kept on the host copy them for a few
tokens each time, and a CPU fills most of its tiles up with zeros; with more, attention takes memory by their square."""

ALL_TOKENS = sys.maxsize
"""A limit on tokens that all rows stay below."""


@runtime_checkable
class Edit(Protocol):
    """A change to the resident model, made in place and reverted exactly.

    Edits are frozen dataclasses of numpy arrays and plain values. Equal `phenotype_hash` means the same function of the
    same model, so an evaluation is never repeated for it.
    """

    @property
    def phenotype_hash(self) -> str:
        """SHA-256 (hex) of the canonical content."""
        ...


@runtime_checkable
class LayeredEdit(Edit, Protocol):
    """An edit that can tell what it does layer by layer."""

    @property
    def layer_hashes(self) -> tuple[str, ...]:
        """Of every MoE layer, or dense network, in order of depth.

        Layers of equal position and hash compute the same on the same model, bit for bit. The position isn't part of
        the hash, so that groups of layers edited alike show.
        """
        ...


def prefix_hashes(head: bytes, hashes: Sequence[str]) -> tuple[str, ...]:
    """Of every layer with all layers before it, for edits whose layers depend on these."""
    digest, found = hashlib.sha256(head), []
    for each in hashes:
        digest.update(each.encode())
        found.append(digest.hexdigest())
    return tuple(found)


@runtime_checkable
class FollowUpEdit(Edit, Protocol):
    """An edit that makes another one and goes on from there, without a change of form."""

    @property
    def base(self) -> Edit:
        """The one that it makes first."""
        ...


def underlying(edit: Edit) -> Edit:
    """What gives an edited model its form: the edit itself, or what it follows up."""
    return underlying(edit.base) if isinstance(edit, FollowUpEdit) else edit


@dataclass(frozen=True, slots=True)
class IdentityEdit:
    """The unedited model."""

    @property
    def phenotype_hash(self) -> str:
        return "full"


class CalibrationRecipe(Protocol):
    """How a calibration is made: a frozen dataclass of plain values, one class per kind.

    Attributes:
        tokens: whole prompts of the `calibration` rows with their answers are run until there are this many tokens.
    """

    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class CombinedRecipe:
    """Several calibrations in one, each measured by itself on its own number of tokens.

    Attributes:
        parts: whose arrays have different names.
    """

    parts: tuple[CalibrationRecipe, ...]

    @property
    def tokens(self) -> int:
        return max(part.tokens for part in self.parts)


def combined(*parts: CalibrationRecipe | None) -> CalibrationRecipe | None:
    """One recipe for all parts that there are; None if there are none."""
    present = tuple(part for part in parts if part is not None)
    return CombinedRecipe(present) if len(present) > 1 else next(iter(present), None)


def recipe_parts(recipe: CalibrationRecipe | None) -> tuple[CalibrationRecipe, ...]:
    """The single calibrations of a recipe."""
    if isinstance(recipe, CombinedRecipe):
        return recipe.parts
    return () if recipe is None else (recipe,)


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        arrays: by name, read-only; float32 or integers. A worker adds `tokens_run` and `seconds` (float64), see
            `with_cost`.
    """

    arrays: Mapping[str, NDArray[Any]] = field(repr=False)

    def with_cost(self, tokens: int, seconds: float) -> Calibration:
        """The same calibration with what it cost."""
        cost = {"tokens_run": np.array([tokens], dtype=np.int64), "seconds": np.array([seconds], dtype=np.float64)}
        return Calibration({**self.arrays, **cost})

    @property
    def tokens_run(self) -> int:
        """Tokens that were run for it, per pass."""
        return int(self.arrays["tokens_run"][0])

    @property
    def seconds(self) -> float:
        """Seconds it took on its worker, loading the model left out."""
        return float(self.arrays["seconds"][0])

    def to_bytes(self) -> bytes:
        """As a safetensors file."""
        return save({name: np.ascontiguousarray(array) for name, array in self.arrays.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Calibration:
        """Inverse of `to_bytes`."""
        arrays = load(data)
        for array in arrays.values():
            array.flags.writeable = False
        return cls(arrays)


def calibration_fingerprint(
    recipe: CalibrationRecipe, model_fingerprint: str, engine_fingerprint: str, task_fingerprints: tuple[str, ...]
) -> str:
    """SHA-256 (hex) of all that a calibration depends on."""
    content = [*_settings(recipe), model_fingerprint, engine_fingerprint, task_fingerprints]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _settings(recipe: CalibrationRecipe) -> list[Any]:
    plain: Any = recipe
    if isinstance(recipe, CombinedRecipe):
        return [type(recipe).__name__, [_settings(part) for part in recipe.parts]]
    return [type(recipe).__name__, asdict(plain)]
