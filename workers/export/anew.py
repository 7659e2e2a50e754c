"""Tensors of a source export that an edit changes: cast or packed anew.

The edited model's tensors come layer by layer, as for a stock checkpoint. Each is compared with what the source stores
for it. What is equal is copied from the source later; what differs is written to a scratch file, and copied from there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.base import Codec, PackedFormat, PackedMatrix, Plain
from moevolve.workers.checkpoints.formats.gguf import INSTEAD, GgufNames, GgufType
from moevolve.workers.checkpoints.headers import StoredTensor
from moevolve.workers.checkpoints.pruning import KeptTensor, is_mtp_stem
from moevolve.workers.checkpoints.shards import read_tensor
from moevolve.workers.checkpoints.state import SavedNames, experts_prefix, layers_prefix
from moevolve.workers.checkpoints.text_models import text_name
from moevolve.workers.contract.methods import Blueprint, Resident
from moevolve.workers.export.folder import VerificationError

_PLACE = re.compile(r"(?P<stem>(?:.+\.)?layers\.)(?P<place>\d+\..+)")


@dataclass
class Rewritten:
    """What was written anew.

    Attributes:
        packed, cast: Names of tensors that were packed in their format, and of those that were stored as they are in
            the tensor's dtype.
        retyped: Former type of GGUF tensors that were packed as another one, by name.
        difference: Largest difference between a tensor that was packed and the edited model's, relative to the latter,
            both as the root of the sum of squares.
    """

    packed: set[str] = field(default_factory=set)
    cast: set[str] = field(default_factory=set)
    retyped: dict[str, str] = field(default_factory=dict)
    difference: float = 0.0

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return the rows of the model card."""
        kinds = ", ".join(sorted(set(self.retyped.values())))
        away = f"; up to {self.difference:.1%} from the weights that were evaluated"
        why = f" from {kinds} to {INSTEAD}, because the gguf library can't pack {kinds}"
        rows = (
            ("requantised", self.packed, away),
            ("written as another type", set(self.retyped), why),
            ("new values", self.cast, ""),
        )
        return tuple((title, f"{patterns(names)}{more}") for title, names, more in rows if names)


def patterns(names: set[str]) -> str:
    """Count names that differ in numbers only: `24 of model.layers.*.mlp.experts.*.down_proj.weight`."""
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[re.sub(r"\.\d+(?=\.)", ".*", name)] += 1
    return ", ".join(f"{count} of {pattern}" for pattern, count in sorted(counts.items()))


def rewrite(
    resident: Resident, layers: Iterator[int], blueprint: Blueprint, rewriter: Rewriter
) -> tuple[list[KeptTensor], Rewritten]:
    """Write the tensors that an edit changes to a scratch file.

    Each of the decoder `layers` has the edit when it is yielded; the blueprint describes the stock checkpoint.

    Returns:
        The tensors of the export, with changed ones read from the scratch file, and a summary.

    Raises:
        UserError: Quantised tensors would have to be packed anew and may not, or can't; or a tensor of the experts
            isn't in the source under the name that `transformers` gives.
        VerificationError: Unpacked numbers have little to do with the edited model's.
    """
    names, prefix = SavedNames(blueprint.model), layers_prefix(blueprint.model)
    experts = experts_prefix(blueprint.model)
    by_index = {layer.index: layer for layer in resident.layers}
    for layer in (by_index[index] for index in layers if index in by_index):
        family = layer.family
        outputs = experts, f"{family.prefix}{layer.shared_name}.down_proj."
        changeable = *outputs, f"{family.prefix}{family.router}.", f"{family.prefix}{family.correction}"
        for name, tensor in blueprint.layer(layer.index):
            if name.startswith(changeable):
                for saved, values in names.saved(f"{prefix}{layer.index}.{name}", tensor).items():
                    if not rewriter.write(saved, values.detach().cpu()) and name.startswith(outputs):
                        raise UserError(
                            f"tensor {saved} isn't in the checkpoint's files under this name; export the individual "
                            "with --form stock"
                        )
        rewriter.finish_layer()
    found = rewriter.found
    if found.packed and not rewriter.requantise:
        raise UserError(
            f"the individual changes weights that the source has quantised, and {patterns(found.packed)} would have to "
            "be written anew; add --requantise, or export it with --form stock"
        )
    return [replace(each, anew=rewriter.anew.get(name)) for name, each in rewriter.kept.items()], found


class Rewriter:
    """Compares tensors with the source's, and appends what differs to a file.

    Args:
        kept: Tensors of the export.
        stream: Scratch file, opened for writing.
        requantise: Whether quantised tensors may be packed anew.
    """

    def __init__(self, kept: Sequence[KeptTensor], stream: IO[bytes], requantise: bool) -> None:
        self.kept = {each.name: each for each in kept}
        self.requantise = requantise
        self.anew: dict[str, StoredTensor] = {}
        self.found = Rewritten()
        self._stream = stream

    def write(self, name: str, values: Tensor) -> bool:
        """Write a tensor of the edited model, on the host, if it isn't what the source has under this unquantised name.

        Returns:
            False if the source doesn't have it at all.
        """
        raise NotImplementedError

    def finish_layer(self) -> None:
        """Write what was put off until all tensors of a layer are known."""

    def changed(
        self, name: str, codec: Codec, parts: Mapping[str, Tensor], values: Tensor, target: Codec | None = None
    ) -> dict[str, Tensor]:
        """Return the parts of a matrix with other values; empty if it has these already or they may not be packed.

        The codec and parts are the matrix's in the source; `target` packs instead of the codec if it is given.
        """
        before = codec.unpack(parts, values.dtype)
        if torch.equal(before, values):
            return {}
        if codec.plain:
            self.found.cast.add(name)
            return codec.pack(values, parts)
        self.found.packed.add(name)
        return self._packed(name, target or codec, parts, values) if self.requantise else {}

    def _packed(self, name: str, codec: Codec, parts: Mapping[str, Tensor], values: Tensor) -> dict[str, Tensor]:
        packed = codec.pack(values, parts)
        found, meant = codec.unpack(packed, torch.float32), values.float()
        difference = float((found - meant).norm() / meant.norm().clamp_min(torch.finfo(torch.float32).tiny))
        # Rounding to two bits changes normally distributed numbers by half; codes in a wrong order change all.
        if not difference < 0.9:
            raise VerificationError(f"tensor {name} can't be packed: unpacked again, it differs by {difference:.0%}")
        self.found.difference = max(self.found.difference, difference)
        return packed

    def append(self, name: str, data: Iterable[bytes], dtype: str) -> None:
        """Append the bytes of a tensor to the file."""
        start = self._stream.tell()
        self._stream.writelines(data)
        size = self._stream.tell() - start
        self.anew[name] = StoredTensor(name, Path(self._stream.name), dtype, self.kept[name].shape, start, size)


class PackedRewriter(Rewriter):
    """See `Rewriter`: the tensors of safetensors files; some have the format `packed`."""

    def __init__(
        self, kept: Sequence[KeptTensor], packed: PackedFormat | None, stream: IO[bytes], requantise: bool
    ) -> None:
        super().__init__(kept, stream, requantise)
        matrices = [] if packed is None else list(packed.matrices(self.kept.keys()))
        used = {part for matrix in matrices for part in matrix.parts.values()}
        plain = Plain()
        matrices += [PackedMatrix(name, {"": name}, plain) for name in self.kept if name not in used]
        # Multimodal checkpoints have the text model's layers under a longer name than its class, and others besides.
        matrices.sort(key=lambda matrix: text_name(matrix.name) is not None)
        self._matrices = {_place(matrix.name): matrix for matrix in matrices}
        self._matrices.pop(None, None)

    def write(self, name: str, values: Tensor) -> bool:
        matrix = self._matrices.get(_place(name))
        if matrix is None:
            return False
        parts = {last: _read_parts(self.kept[part]) for last, part in matrix.parts.items()}
        changed: dict[str, Tensor] = {}
        units = [slice(i, i + 1) for i in range(len(values))] if values.ndim == 3 else [...]
        for unit in units:
            before = {last: part[unit] for last, part in parts.items()}
            for last, part in self.changed(matrix.name, matrix.codec, before, values[unit]).items():
                if last not in changed:
                    changed[last] = parts[last].clone()
                changed[last][unit] = part
        for last, part in changed.items():
            if not torch.equal(_raw(part), _raw(parts[last])):
                stored = matrix.parts[last]
                self.append(stored, [_raw(part).numpy().tobytes()], self.kept[stored].source.dtype)
        return True


def _place(name: str) -> str | None:
    """Index of the layer and name within it, by which tensors are found; None outside layers and for those for MTP."""
    match = _PLACE.fullmatch(name)
    return None if match is None or is_mtp_stem(match["stem"]) else match["place"]


def _read_parts(kept: KeptTensor) -> Tensor:
    tensor = read_tensor(kept.source)
    if kept.table is not None:
        return torch.frombuffer(bytearray(b"".join(kept.chunks())), dtype=tensor.dtype).view(kept.shape)
    return tensor if kept.rows is None else tensor[list(kept.rows)]


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class GgufRewriter(Rewriter):
    """See `Rewriter`: the tensors of a GGUF file; each has one type for all experts.

    If the gguf library can't pack that, as with K-quants, the whole tensor is written as Q8_0 once one of its experts
    has to be packed; the tensors of a file may be of different types.
    """

    def __init__(self, kept: Sequence[KeptTensor], names: GgufNames, stream: IO[bytes], requantise: bool) -> None:
        super().__init__(kept, stream, requantise)
        self._names = names
        self._changed: dict[str, dict[int | None, tuple[GgufType, Tensor]]] = defaultdict(dict)

    def write(self, name: str, values: Tensor) -> bool:
        found = True
        for stored, expert, part in self._names.stored(name, values):
            kept = self.kept.get(stored)
            if kept is None:
                found = False
                continue
            codec, before = GgufType(kept.source.dtype), _read_bytes(kept, expert)
            target = codec if codec.packs else GgufType(INSTEAD)
            after = self.changed(stored, codec, {"": before}, part, target)
            if after:
                used = codec if after[""].shape == before.shape else target
                self._changed[stored][expert] = used, after[""]
        return found

    def finish_layer(self) -> None:
        # Experts that an edit leaves as they are keep their bytes where the type stays.
        for name, units in self._changed.items():
            kept = self.kept[name]
            own = kept.source.dtype
            target = next((codec for codec, _ in units.values() if codec.kind != own), GgufType(own))
            if target.kind != own:
                self.found.retyped[name] = own
            experts = [None] if None in units else range(kept.shape[0])
            data = (self._bytes(kept, expert, units.get(expert), target) for expert in experts)
            self.append(name, data, target.kind)
        self._changed.clear()

    @staticmethod
    def _bytes(kept: KeptTensor, expert: int | None, unit: tuple[GgufType, Tensor] | None, target: GgufType) -> bytes:
        codec, data = unit or (GgufType(kept.source.dtype), _read_bytes(kept, expert))
        if codec.kind != target.kind:
            data = target.pack(codec.unpack({"": data}, torch.float32), {})[""]
        return data.numpy().tobytes()


def _read_bytes(kept: KeptTensor, expert: int | None) -> Tensor:
    """Read a tensor's bytes, or those of a kept expert of a fused one, as uint8 [..., bytes of a row]."""
    shape = kept.shape
    if expert is None:
        chunks = kept.chunks()
    else:
        shape, chunks = shape[1:], kept.source.chunks((expert if kept.rows is None else kept.rows[expert],))
    data = np.frombuffer(bytearray(b"".join(chunks)), np.uint8)
    return torch.from_numpy(data).reshape(*shape[:-1], -1)
