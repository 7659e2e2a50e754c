"""The contract of edits. An edit is the phenotype: what a genome expresses to, and all a worker knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


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
class LayeredEdit(Protocol):
    """An edit that can tell what it does layer by layer."""

    @property
    def layer_hashes(self) -> tuple[str, ...]:
        """Of every MoE layer, or dense network, in order of depth.

        Layers of equal position and hash compute the same on the same model, bit for bit. The position isn't part of
        the hash, so that groups of layers edited alike show.
        """
        ...


@dataclass(frozen=True, slots=True)
class IdentityEdit:
    """The unedited model."""

    @property
    def phenotype_hash(self) -> str:
        return "full"
