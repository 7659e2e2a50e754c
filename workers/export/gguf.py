"""Write a pruned model in the GGUF format of its source, by copying the bytes of the kept tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.formats.gguf import stored_gguf
from moevolve.workers.checkpoints.formats.gguf_metadata import metadata, open_parts
from moevolve.workers.checkpoints.pruning import KeptTensor
from moevolve.workers.contract.card import MtpLayers
from moevolve.workers.contract.facts import ModelFacts
from moevolve.workers.contract.methods import ExpertSelection

if TYPE_CHECKING:
    from gguf import GGUFReader

# Names of tensors within a block: gguf-py/gguf/constants.py of llama.cpp.
_EXPERTS = re.compile(r"ffn_(gate|up|down|gate_up)_exps\.\w+")
_ROUTER = re.compile(r"ffn_gate_inp\.\w+|exp_probs_b(\.bias)?")
_BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<rest>.+)")


def kept_gguf(
    file: Path, facts: ModelFacts, selection: ExpertSelection, layers: int, mtp: MtpLayers
) -> tuple[list[KeptTensor], dict[str, int]]:
    """Choose the tensors of a pruned GGUF model, and the numbers to change in its metadata, by key.

    `layers` is the number of decoder layers without those for MTP.

    Raises:
        UserError: A tensor of experts has another number of experts, or layers for MTP should keep all of theirs.
    """
    readers = open_parts(file)
    stored, architecture = stored_gguf(readers), metadata(next(iter(readers.values())), "general.architecture")
    ordinals = {layer: ordinal for ordinal, layer in enumerate(facts.moe_layers)}
    kept, predicting = [], set()
    for name, tensor in stored.items():
        match = _BLOCK.fullmatch(name)
        layer, rest = (int(match["layer"]), match["rest"]) if match else (-1, "")
        if layer >= layers:
            predicting.add(layer)
            if mtp == "drop":
                continue
            if mtp == "keep":
                raise UserError(
                    "--mtp keep: a GGUF file has one number of experts for all layers; choose drop or prune"
                )
        ordinal = ordinals.get(layer, len(ordinals) - 1)
        rows = None
        if _EXPERTS.fullmatch(rest):
            rows = selection.experts[ordinal]
        elif _ROUTER.fullmatch(rest):
            rows = selection.routers[ordinal]
        if rows is not None and tensor.shape[0] != facts.experts:
            raise UserError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, where {facts.experts} experts should "
                "come first; fetch the file again"
            )
        kept.append(KeptTensor(name, tensor, None if rows == tuple(range(facts.experts)) else rows))
    changes = {"expert_count": selection.retained, "expert_used_count": selection.active}
    if facts.rule.groups.count == 1:
        # Groups that don't limit the choice need not divide the experts that are left. llama.cpp wants them to.
        changes |= {"expert_group_count": 1, "expert_group_used_count": 1} if selection.retained < facts.experts else {}
    if predicting and mtp == "drop":
        changes |= {"nextn_predict_layers": 0, "block_count": layers}
    return kept, {f"{architecture}.{key}": value for key, value in changes.items()}


def write_gguf(file: Path, part: Path, kept: Sequence[KeptTensor], changes: Mapping[str, int]) -> dict[str, int]:
    """Write tensors to the folder `part`, divided into files as in the source, with other numbers in the metadata.

    Returns:
        Checksums of the source's bytes by name.
    """
    by_file = {source: list(group) for source, group in groupby(kept, key=lambda each: each.source.file)}
    numbers = {**changes, "split.tensors.count": len(kept)}
    checksums: dict[str, int] = {}
    for source, reader in open_parts(file).items():
        checksums |= _write_file(reader, part / source.name, by_file.get(source, []), numbers)
    return checksums


def _write_file(
    reader: GGUFReader, target: Path, tensors: Sequence[KeptTensor], changes: Mapping[str, int]
) -> dict[str, int]:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    writer = GGUFWriter(target, "", endianess=reader.endianess)
    writer.kv_data[0].clear()  # the architecture, which only the first file of a split model has
    for field in reader.fields.values():
        if field.name.startswith("GGUF."):
            continue  # the header's own numbers, which the reader lists as metadata
        kind, value = field.types[0], changes.get(field.name, field.contents())
        writer.add_key_value(field.name, value, kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    writer.data_alignment = reader.alignment
    for tensor in tensors:
        # With a type given, the dtype only says that the shape is one of numbers, not of bytes.
        stored_as = GGMLQuantizationType[tensor.dtype]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    checksums = {}
    for tensor in tensors:
        copied: Any = _Copied(tensor)
        writer.write_tensor_data(copied, tensor_endianess=reader.endianess)
        checksums[tensor.name] = copied.checksum
    writer.close()
    return checksums


class _Copied:
    """What the library's writer asks of an array, for a tensor whose bytes are copied piece by piece."""

    def __init__(self, tensor: KeptTensor) -> None:
        self._tensor = tensor
        self.nbytes = tensor.nbytes
        self.checksum = 0

    def tofile(self, stream: IO[bytes]) -> None:
        self.checksum = self._tensor.copy(stream)
