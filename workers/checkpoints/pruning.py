"""Which tensors of a checkpoint a pruned model keeps, by their names and shapes, whatever format their values are in.

Formats differ in the tensors that an expert has (`weight`, `weight_scale_inv`, `weight_packed`, `qweight` ...), but all
store experts in one of two layouts: per expert, as `...experts.E.<rest>`, or fused, as `...experts.<rest>` with the
expert as first dimension. In both a pruned model's tensors are bytes of the original.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
from pydantic import JsonValue

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.headers import EXPERT, StoredTensor
from moevolve.workers.checkpoints.text_models import text_name
from moevolve.workers.contract.card import MtpLayers
from moevolve.workers.contract.methods import ExpertSelection
from moevolve.workers.families.base import CORRECTION_BIAS, ExpertFamily

# Of lists of layers within layers the innermost counts, since `.+` is greedy.
_LAYER = re.compile(r"(?P<stem>(?:.+\.)?layers\.)(?P<layer>\d+)\.(?P<rest>.+)")
_FUSED = re.compile(r".+\.experts\.[^.]*[^.\d].*")
# Ends of names of correction biases, which checkpoints have in the router or beside it.
_CORRECTION_BIASES = (f".{CORRECTION_BIAS}", ".expert_bias", ".router_bias")
_MTP_STEM = re.compile(r"(^|\.)(mtp\w*|nextn)(\.|$)")
# Regular expressions that name experts by numbers.
_NUMBERED = re.compile(r"(?=.*[\\*\[(|^$?+:]).*experts\\?\.[\[(?:]*\d")
_TABLE_DTYPES = {"I64": "<i8", "I32": "<i4"}


@dataclass(frozen=True, slots=True)
class TableChange:
    """How a table of the experts of every token id changes.

    Attributes:
        kept: Original expert that each kept one is routed like, [n'].
    """

    kept: tuple[int, ...]
    experts: int
    active: int

    def changed(self, source: StoredTensor, data: bytes) -> bytes:
        """Compute the bytes of the changed table from those of the `source`; see `choose_kept`."""
        kind = _TABLE_DTYPES.get(source.dtype)
        if kind is None or len(source.shape) != 2:
            raise UserError(
                f"{source.file}: table {source.name} is {source.dtype} {list(source.shape)}, and only matrices of "
                f"{', '.join(_TABLE_DTYPES)} are understood; export the individual with --form stock"
            )
        import torch

        from moevolve.kernels.routing import choose_kept, kept_places

        places = kept_places(self.kept, self.experts)
        table = torch.from_numpy(np.frombuffer(data, kind).reshape(source.shape).astype(np.int64))
        return choose_kept(table, places, len(self.kept), self.active).numpy().astype(kind).tobytes()


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor of a pruned checkpoint.

    Attributes:
        rows: Indices along the source's first dimension, in order; None for the whole tensor.
        lead: Dimensions of size 1 that precede those of the source.
        anew: Tensor of the same shape to copy instead, if an edit changes its values.
        table: Of a router's table [vocabulary, k] of the experts of every token id, how it changes.
    """

    name: str
    source: StoredTensor
    rows: tuple[int, ...] | None = None
    lead: tuple[int, ...] = ()
    anew: StoredTensor | None = None
    table: TableChange | None = None

    def chunks(self) -> Iterator[bytes]:
        """Read the bytes to write, at most 16 MiB at a time."""
        chunks = self.source.chunks(self.rows) if self.anew is None else self.anew.chunks()
        if self.table is not None and self.anew is None:
            yield self.table.changed(self.source, b"".join(chunks))
        else:
            yield from chunks

    def copy(self, stream: IO[bytes]) -> int:
        """Write the bytes to a file; returns their CRC-32."""
        checksum = 0
        for chunk in self.chunks():
            checksum = zlib.crc32(chunk, checksum)
            stream.write(chunk)
        return checksum

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.source.shape[:1] if self.rows is None else (len(self.rows),)
        rest = self.source.shape[1:] if self.table is None else (self.table.active,)
        return (*self.lead, *rows, *rest)

    @property
    def dtype(self) -> str:
        """Dtype as the format spells it: the source's, unless a GGUF tensor changes its type."""
        return (self.anew or self.source).dtype

    @property
    def nbytes(self) -> int:
        if self.anew is not None:
            return self.anew.nbytes
        if self.table is not None:
            return self.source.nbytes // self.source.shape[1] * self.table.active
        return self.source.nbytes if self.rows is None else self.source.nbytes // self.source.shape[0] * len(self.rows)


class Pruning:
    """Chooses and names the tensors of a pruned checkpoint.

    Args:
        tensors: All tensors of the source checkpoint, which are those of its model (`check_weights`).
        family: Family of the model.
        moe_layers: Indices of the MoE layers, ascending.
        experts: Experts n per MoE layer of the source.
        decoder_layers: Number of decoder layers without those for MTP.
        selection: Experts to keep.

    Raises:
        UserError: A tensor of a MoE layer is unknown.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        family: ExpertFamily,
        moe_layers: Sequence[int],
        experts: int,
        decoder_layers: int,
        selection: ExpertSelection,
        mtp: MtpLayers = "drop",
    ) -> None:
        self._tensors = tensors
        self._family = family
        self._experts = experts
        self._selection = selection
        self._mtp = mtp
        self._decoder_layers = decoder_layers
        self._ordinals = {layer: ordinal for ordinal, layer in enumerate(moe_layers)}
        self._stem = self._find_stem()

    def kept(self) -> list[KeptTensor]:
        """Return the tensors of the pruned checkpoint in the order of their sources."""
        return [kept for tensor in self._tensors.values() for kept in self._kept(tensor)]

    @property
    def has_mtp(self) -> bool:
        """Whether the source has layers for MTP."""
        return any(self._is_mtp(name) for name in self._tensors)

    def renamed(self, value: JsonValue) -> JsonValue:
        """Rename experts in a JSON file's content, such as the modules that a quantisation config names.

        The result has no strings that name pruned experts or dropped layers. Raises a `UserError` for regular
        expressions that name some experts by their numbers.
        """
        if isinstance(value, list):
            return [each for item in value for each in (self._modules(item) if isinstance(item, str) else [item])]
        if isinstance(value, dict):
            return {name: self.renamed(content) for key, content in value.items() for name in self._modules(key)}
        return value

    def _modules(self, name: str) -> list[str]:
        if _NUMBERED.match(name.replace("[0-9]", "")):
            raise UserError(
                f"the quantisation config names experts by the pattern {name!r}, and kept experts get other numbers; "
                "export the individual with --form stock"
            )
        return self._names(name)

    def _names(self, name: str) -> list[str]:
        if self._is_mtp(name) and self._mtp == "drop":
            return []
        match, ordinal = EXPERT.fullmatch(name), self._ordinal(name)
        if match is None or ordinal is None:
            return [name]
        kept = self._selection.experts[ordinal]
        rest = match["rest"] or ""
        return [f"{match['block']}.{slot}{rest}" for slot, each in enumerate(kept) if each == int(match["expert"])]

    def _kept(self, tensor: StoredTensor) -> Iterator[KeptTensor]:
        name = tensor.name
        ordinal = self._ordinal(name)
        if (self._is_mtp(name) and self._mtp == "drop") or EXPERT.fullmatch(name) or ordinal is None:
            yield from (KeptTensor(each, tensor) for each in self._names(name))
            return
        family = self._family
        router = f".{family.stored_router or family.router}."
        weights = {"weight", family.weight, family.stored_weight or family.weight, family.factors or "weight"}
        others = tuple(router + each for each in family.other_tensors)
        if family.stores_experts(name) and (".experts." not in name or _FUSED.fullmatch(name) is not None):
            yield self._sliced(tensor, self._selection.experts[ordinal])
        elif name.endswith((*(router + each for each in weights), f"{router}bias", *_CORRECTION_BIASES)):
            yield self._sliced(tensor, self._selection.routers[ordinal])
        elif family.table is not None and name.endswith(router + family.table):
            change = TableChange(self._selection.routers[ordinal], self._experts, self._selection.active)
            whole = change.kept == tuple(range(self._experts)) and change.active == tensor.shape[-1]
            yield KeptTensor(name, tensor, table=None if whole else change)
        elif router in name and not name.endswith(others):
            raise UserError(
                f"{tensor.file}: tensor {name} belongs to a quantised router, whose rows can't be told apart; "
                "export the individual with --form stock"
            )
        else:
            yield KeptTensor(name, tensor)

    def _sliced(self, tensor: StoredTensor, rows: tuple[int, ...]) -> KeptTensor:
        lead: tuple[int, ...] = ()
        if tensor.shape == (1, self._experts):  # ERNIE's correction bias
            lead, tensor = (1,), replace(tensor, shape=tensor.shape[1:])
        if not tensor.shape or tensor.shape[0] != self._experts:
            raise UserError(
                f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, where {self._experts} experts "
                "should come first; fetch the file again"
            )
        return KeptTensor(tensor.name, tensor, None if rows == tuple(range(self._experts)) else rows, lead)

    def _find_stem(self) -> str:
        """Return the beginning of the decoder layers' names, up to the index."""
        found = (_LAYER.fullmatch(name) for name in self._tensors if self._family.stores_experts(name))
        counts = Counter(match["stem"] for match in found if match and not _MTP_STEM.search(match["stem"]))
        # A multimodal checkpoint can have experts outside the text model.
        stems = [stem for stem in counts if text_name(stem) is not None] if len(counts) > 1 else list(counts)
        if len(stems) == 1:
            return stems[0]
        what = f"under {' and '.join(sorted(counts))}" if counts else "nowhere"
        raise UserError(
            f"the checkpoint's tensors named experts are {what}, and one list of decoder layers is expected; "
            "export the individual with --form stock"
        )

    def _ordinal(self, name: str) -> int | None:
        """Return the number of the MoE layer whose experts a name's layer keeps; None outside MoE layers."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return None
        if self._is_mtp(name):
            return len(self._ordinals) - 1 if self._mtp == "prune" else None
        return self._ordinals.get(int(match["layer"])) if match["stem"] == self._stem else None

    def _is_mtp(self, name: str) -> bool:
        match = _LAYER.fullmatch(name)
        if match is not None and match["stem"] == self._stem:
            return int(match["layer"]) >= self._decoder_layers
        return is_mtp_stem(name)


def is_mtp_stem(name: str) -> bool:
    """Return whether a name is that of a layer for MTP beside the decoder's layers."""
    return _MTP_STEM.search(name) is not None
