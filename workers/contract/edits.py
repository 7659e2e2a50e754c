"""Edits, which are all that a worker knows of a genome, and calibrations. Needs no torch."""

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

# Token ids of one sequence.
Tokens = tuple[int, ...]

# Tokens per row when several sequences are packed into one. Fewer tokens waste transfers of experts that are kept on
# the host, and padding of matrix tiles on a CPU; more tokens take attention memory that grows with their square.
ROW_TOKENS = 1024

# Token limit that stands for no limit.
ALL_TOKENS = sys.maxsize


@runtime_checkable
class Edit(Protocol):
    """A change to the resident model, made in place and reverted exactly.

    Edits are frozen dataclasses of numpy arrays and plain values. Edits with equal `phenotype_hash` turn the same model
    into the same function, so their evaluations are shared.
    """

    @property
    def phenotype_hash(self) -> str:
        """SHA-256 (hex) of the canonical content."""


@runtime_checkable
class LayeredEdit(Edit, Protocol):
    """An edit whose changes to the model can be compared layer by layer."""

    @property
    def layer_hashes(self) -> tuple[str, ...]:
        """One hash per MoE layer, or dense feed-forward network, in order of depth.

        Layers with equal position and hash compute the same function of the same model, bit for bit. The position isn't
        part of the hash, so layers that are edited alike have equal hashes.
        """


def prefix_hashes(head: bytes, hashes: Sequence[str]) -> tuple[str, ...]:
    """Hash every layer together with all layers before it, for edits whose layers depend on the earlier ones."""
    digest, prefixes = hashlib.sha256(head), []
    for each in hashes:
        digest.update(each.encode())
        prefixes.append(digest.hexdigest())
    return tuple(prefixes)


@runtime_checkable
class FollowUpEdit(Edit, Protocol):
    """An edit that applies another edit and then changes weights further, keeping the model's structure."""

    @property
    def base(self) -> Edit:
        """The edit that is applied first."""


def underlying(edit: Edit) -> Edit:
    """Return the edit that determines the structure of the edited model: `edit`, or the base of a follow-up edit."""
    return underlying(edit.base) if isinstance(edit, FollowUpEdit) else edit


@dataclass(frozen=True, slots=True)
class IdentityEdit:
    """The unedited model."""

    @property
    def phenotype_hash(self) -> str:
        return "full"


class Measurement(Protocol):
    """What to measure for a calibration: a frozen dataclass of plain values, one class per kind."""

    @property
    def tokens(self) -> int:
        """Number of tokens until which whole prompts of the `calibration` split, with their answers, are run."""


@runtime_checkable
class GrowingMeasurement(Measurement, Protocol):
    """What is measured on more and more tokens: on `tokens`, and on twice as many as long as that isn't enough.

    All its arrays are sums over tokens.
    """

    @property
    def most(self) -> int:
        """Largest number of tokens."""

    def is_met(self, arrays: Mapping[str, NDArray[np.number]]) -> bool:
        """Return whether what was measured so far is enough."""

    def note(self, arrays: Mapping[str, NDArray[np.number]]) -> str:
        """Return a line for users that says what was measured, and why no more."""


@dataclass(frozen=True, slots=True)
class CombinedMeasurement:
    """Several calibrations in one, each measured separately on its own number of tokens.

    Their arrays have distinct names.
    """

    parts: tuple[Measurement, ...]

    @property
    def tokens(self) -> int:
        return max(part.tokens for part in self.parts)


def combined(*parts: Measurement | None) -> Measurement | None:
    """Combine measurements, ignoring None, into one; None if none is left."""
    present = tuple(part for part in parts if part is not None)
    return CombinedMeasurement(present) if len(present) > 1 else next(iter(present), None)


def measurement_parts(measurement: Measurement | None) -> tuple[Measurement, ...]:
    """Return the measurements that a measurement combines; none for None."""
    if isinstance(measurement, CombinedMeasurement):
        return measurement.parts
    return () if measurement is None else (measurement,)


@dataclass(frozen=True)
class Calibration:
    """Arrays measured on the unedited model.

    Attributes:
        arrays: Read-only arrays by name. `with_cost` adds `tokens_run` (int64) and `seconds`
            (float64).
        tokens_run: Number of tokens in one pass of the measurement.
        seconds: Time that the measurement took, without loading the model.
    """

    arrays: Mapping[str, NDArray[Any]] = field(repr=False)

    def with_cost(self, tokens: int, seconds: float) -> Calibration:
        """Return the same calibration with its cost recorded."""
        cost = {"tokens_run": np.array([tokens], dtype=np.int64), "seconds": np.array([seconds], dtype=np.float64)}
        return Calibration({**self.arrays, **cost})

    @property
    def tokens_run(self) -> int:
        return int(self.arrays["tokens_run"][0])

    @property
    def seconds(self) -> float:
        return float(self.arrays["seconds"][0])

    def to_bytes(self) -> bytes:
        """Serialise to the bytes of a safetensors file."""
        return save({name: np.ascontiguousarray(array) for name, array in self.arrays.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Calibration:
        arrays = load(data)
        for array in arrays.values():
            array.flags.writeable = False
        return cls(arrays)


def calibration_fingerprint(
    measurement: Measurement, model_fingerprint: str, engine_fingerprint: str, task_fingerprints: tuple[str, ...]
) -> str:
    """SHA-256 (hex) of everything that determines a calibration."""
    content = [*_settings(measurement), model_fingerprint, engine_fingerprint, task_fingerprints]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _settings(measurement: Any) -> list[object]:
    combines = isinstance(measurement, CombinedMeasurement)
    return [
        type(measurement).__name__,
        [_settings(part) for part in measurement.parts] if combines else asdict(measurement),
    ]
