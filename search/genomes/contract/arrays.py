"""Genomes that consist of declared arrays: their bytes, equality, and coordinates for black-box optimisers."""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from moevolve.search.genomes.contract.base import Genome, GenomeSpace
from moevolve.search.genomes.contract.phases import PhaseConfig
from moevolve.workers.contract.edits import Calibration
from moevolve.workers.contract.facts import ModelFacts

# Shape of an array; None stands for a size that the space doesn't know before it is calibrated.
Shape = tuple[int | None, ...]
# Bytes of `ArraySpace.tag`: among so few spaces, 64 bits of a hash don't collide.
_TAG = 8
FLOATS = {"dtype": np.dtype(np.float32)}
# Metadata by which a dataclass field of an `ArrayGenome` is declared as an array of this type.
BYTES = {"dtype": np.dtype(np.uint8)}


@dataclass(frozen=True, eq=False, repr=False)
class ArrayGenome(Genome):
    """Base of genomes that are read-only arrays: equal bytes mean equal genomes.

    Subclasses are made with `eq=False` as well, and declare arrays as fields with metadata.

    Raises:
        ValueError: An array hasn't the shape that the space gives it.
    """

    space: ArraySpace[Any]

    def __post_init__(self) -> None:
        for name, dtype in self.dtypes().items():
            # Adding zero turns -0.0 into 0.0, so that equal arrays have equal bytes.
            values = np.asarray(getattr(self, name)).astype(dtype) + dtype.type(0)
            shape = self.space.shapes[name]
            known = tuple(size if each is None else each for each, size in zip(shape, values.shape, strict=False))
            if len(shape) != values.ndim or known != values.shape:
                raise ValueError(f"{name} has shape {values.shape}, the space has {shape}")
            values.flags.writeable = False
            object.__setattr__(self, name, values)

    @classmethod
    def dtypes(cls) -> dict[str, np.dtype[Any]]:
        """Types of the declared arrays by name, in order."""
        return {each.name: each.metadata["dtype"] for each in fields(cls) if "dtype" in each.metadata}

    @property
    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return the declared arrays by name, in order."""
        return {name: getattr(self, name) for name in self.dtypes()}

    def to_bytes(self) -> bytes:
        """Return the space's tag, the arrays' sizes as uint32, and their entries, all little-endian."""
        arrays = self.arrays.values()
        sizes = np.array([size for each in arrays for size in each.shape], dtype="<u4")
        entries = (each.astype(each.dtype.newbyteorder("<")).tobytes() for each in arrays)
        return self.space.tag + sizes.tobytes() + b"".join(entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrayGenome) and type(other) is type(self) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())


A = TypeVar("A", bound=ArrayGenome)


@dataclass(frozen=True, kw_only=True)
class ArraySpace(GenomeSpace[A]):
    """Base of spaces of `ArrayGenome`s.

    Attributes:
        genome_type: Class of the genomes.
        facts: Sizes and family of the model.
        calibration: Results of the space's measurement; None before calibration.
    """

    genome_type: ClassVar[type[Any]]
    facts: ModelFacts = field(repr=False)
    calibration: Calibration | None = field(default=None, repr=False, compare=False)

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of the genomes' arrays by name, in order."""

    @property
    def identity(self) -> tuple[object, ...]:
        """Plain values besides kind and shapes that spaces have in common if they can read each other's genomes."""
        return ()

    @cached_property
    def tag(self) -> bytes:
        """First bytes of the genomes: a hash of kind, declared arrays and identity."""
        declared = [(name, dtype.name) for name, dtype in self.genome_type.dtypes().items()]
        return hashlib.sha256(repr((self.kind, declared, self.identity)).encode()).digest()[:_TAG]

    def calibrated(self, calibration: Calibration) -> Self:
        return replace(self, calibration=calibration)

    @property
    def statistics(self) -> dict[str, NDArray[Any]]:
        """Arrays of the calibration."""
        assert self.calibration is not None, "the space isn't calibrated"
        return dict(self.calibration.arrays)

    def genome(self, **arrays: NDArray[np.generic]) -> A:
        """Return a genome of `arrays`, cast to their types; missing ones are zeros."""
        zeros = {name: np.zeros([size or 0 for size in shape]) for name, shape in self.shapes.items()}
        return self.genome_type(self, **(zeros | arrays))

    def from_bytes(self, data: bytes) -> A:
        dtypes = self.genome_type.dtypes()
        dimensions = [len(self.shapes[name]) for name in dtypes]
        start = _TAG + 4 * sum(dimensions)
        if data[:_TAG] != self.tag or len(data) < start:
            raise ValueError(f"these bytes are no {self.kind} genome of this space")
        sizes = np.frombuffer(data[_TAG:start], dtype="<u4").tolist()
        shapes = [sizes[first:last] for first, last in pairwise(accumulate(dimensions, initial=0))]
        # The sizes are checked as Python integers, which don't overflow, before any array is made.
        lengths = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes.values(), strict=True)]
        if len(data) != start + sum(lengths):
            raise ValueError(f"these bytes are a {self.kind} genome of the wrong length")
        ends = pairwise(accumulate(lengths, initial=start))
        return self.genome(
            **{
                name: np.frombuffer(data[first:last], dtype=dtype.newbyteorder("<")).reshape(shape)
                for (name, dtype), shape, (first, last) in zip(dtypes.items(), shapes, ends, strict=True)
            }
        )

    def flatten(self, genome: A, phase: PhaseConfig) -> NDArray[np.float64]:
        """Return the entries of all arrays in order, or no coordinates if an array has whole numbers."""
        if any(dtype.kind != "f" for dtype in self.genome_type.dtypes().values()):
            return np.zeros(0)
        return np.concatenate([each.ravel() for each in genome.arrays.values()]).astype(np.float64)

    def unflatten(self, vector: NDArray[np.float64], phase: PhaseConfig) -> A:
        shapes = {name: tuple(size or 0 for size in shape) for name, shape in self.shapes.items()}
        parts = np.split(vector, list(accumulate(map(math.prod, shapes.values())))[:-1])
        named = zip(shapes.items(), parts, strict=True)
        return self.genome(**{name: part.reshape(shape) for (name, shape), part in named})


def inherited(rng: np.random.Generator, parents: Sequence[ArrayGenome], layers: int) -> dict[str, NDArray[Any]]:
    """Copy the first parent's arrays, and of two parents each layer from either with probability one half.

    The first dimension of every array is `layers`, or 0.
    """
    child = {name: each.copy() for name, each in parents[0].arrays.items()}
    if len(parents) == 2:
        other = rng.random(layers) < 0.5
        for name, values in child.items():
            if len(values):
                values[other] = parents[1].arrays[name][other]
    return child
