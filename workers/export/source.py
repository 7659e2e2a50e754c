"""Writes a pruned model in its source checkpoint's own format, by copying bytes; no weights are loaded.

Files omit pruned experts, the others are renumbered, and router rows follow them. Whatever
else the source has is kept: quantised values and their scales, the tokenizer, the quantisation config, the files'
division.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeGuard

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.files import gguf_file, read_json
from moevolve.workers.checkpoints.formats.gguf import GgufNames, stored_gguf
from moevolve.workers.checkpoints.formats.gguf_metadata import ARCHITECTURES, open_parts
from moevolve.workers.checkpoints.formats.registry import packed_format
from moevolve.workers.checkpoints.headers import INDEX_FILE, StoredTensor, read_header, stored_tensors
from moevolve.workers.checkpoints.loading import check_weights, checkpoint_folder, load_config, naming
from moevolve.workers.checkpoints.pruning import KeptTensor, Pruning
from moevolve.workers.checkpoints.text_models import text_fields
from moevolve.workers.contract.card import CardFacts, ExportCard, ExportReport, MtpLayers
from moevolve.workers.contract.edits import Edit, underlying
from moevolve.workers.contract.facts import parameters_after
from moevolve.workers.contract.methods import ExpertSelection, PruningExporter
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.anew import GgufRewriter, PackedRewriter, Rewriter, Rewritten, rewrite
from moevolve.workers.export.config_files import changed_fields, copy_files, write_json
from moevolve.workers.export.folder import VerificationError, check_room, finished, new_checkpoint, write_card
from moevolve.workers.export.gguf import kept_gguf, write_gguf
from moevolve.workers.families.base import MTP_FIELDS, ExpertFamily
from moevolve.workers.families.registry import FAMILIES
from moevolve.workers.methods.registry import exporter_of
from moevolve.workers.model.describe import describe_config, meta_model
from moevolve.workers.model.resident import ResidentModel


@dataclass(frozen=True)
class SourceExport:
    """An export in the source checkpoint's format that has been checked, but not written.

    Attributes:
        settings: Contents of JSON files to write, by name.
        changes: New numbers in the metadata of a GGUF file, by key.
    """

    source: SourceCheckpoint
    selection: ExpertSelection
    kept: Sequence[KeptTensor]
    settings: Mapping[str, Any]
    changes: Mapping[str, int] = field(default_factory=dict)


def changes_weights(edit: Edit) -> str | None:
    """What an edit changes besides leaving experts out, so that its source form needs the model; None if nothing."""
    return "it is repaired" if underlying(edit) is not edit else pruning_exporter(edit).merges(edit)


def pruning_exporter(edit: Edit) -> PruningExporter:
    """Return the exporter of an edit. Raises a `UserError` if the edit divides a dense model into experts."""
    exporter = exporter_of(edit)
    if not isinstance(exporter, PruningExporter):
        raise UserError("a dense model divided into experts can't be written in its checkpoint's format")
    return exporter


class SourceCheckpoint:
    """What is known about a checkpoint of experts without its weights.

    Attributes:
        config: `transformers` config of its text model.
        layers: Number of decoder layers without those for MTP.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.facts = describe_config(meta_model(model), model)
        self.folder, self.gguf, self.config = checkpoint_folder(model), gguf_file(model), load_config(model)
        family = FAMILIES[self.facts.family]
        assert isinstance(family, ExpertFamily)
        self.family = family
        self.layers = int(self.config.num_hidden_layers)

    def stored(self, folder: Path) -> dict[str, StoredTensor]:
        """Return the tensors of the files in its folder, or in that of an export."""
        return stored_tensors(folder) if self.gguf is None else stored_gguf(open_parts(folder / self.gguf.name))

    def pruning(
        self, stored: Mapping[str, StoredTensor], selection: ExpertSelection, mtp: MtpLayers = "drop"
    ) -> Pruning:
        """Choose the tensors that a pruned model keeps of those of safetensors files; see `Pruning`."""
        facts = self.facts
        return Pruning(stored, self.family, facts.moe_layers, facts.experts, self.layers, selection, mtp)


def plan_source(model: ModelConfig, edit: Edit, mtp: MtpLayers = "drop") -> SourceExport:
    """Check that an edited model can be written in its checkpoint's format, and choose what to write.

    Raises:
        UserError: No checkpoint of the source's class expresses the edit, the checkpoint can't be read, or its files
            disagree with each other or with its config.
    """
    exporter, changed = pruning_exporter(edit), changes_weights(edit)
    check_weights(model)
    source = SourceCheckpoint(model)
    facts, folder, config, file = source.facts, source.folder, source.config, source.gguf
    if changed is not None and mtp == "prune":
        raise UserError(f"--mtp prune: {changed}, which can't be done to layers for MTP; choose drop or keep")
    selection = exporter.selection(underlying(edit), facts)
    settings: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        settings["config.json"] = read_json(folder / "config.json")
        fields = text_fields(settings["config.json"], config)
        counts = {name: fields[name] for name in MTP_FIELDS if name in fields}
        resized = copy.deepcopy(config)
        source.family.resize(resized, facts.rule, selection.retained, selection.active)
        fields |= changed_fields(fields, config, resized) | dict.fromkeys(counts, 0)
    if file is not None:
        kept, changes = kept_gguf(file, facts, selection, source.layers, mtp)
        return SourceExport(source, selection, kept, settings, changes)
    pruning = source.pruning(stored_tensors(folder), selection, mtp)
    kept = pruning.kept()
    if mtp != "drop" and pruning.has_mtp:
        fields |= counts
    else:
        fields |= _without_mtp(fields, config, sum(count or 0 for count in counts.values()))
    if "quantization_config" in (content := _quantised(settings["config.json"], config)):
        content["quantization_config"] = pruning.renamed(content["quantization_config"])
    if (folder / "hf_quant_config.json").is_file():
        settings["hf_quant_config.json"] = pruning.renamed(read_json(folder / "hf_quant_config.json"))
    return SourceExport(source, selection, kept, settings)


def export_source(
    model: ModelConfig,
    edit: Edit,
    plan: SourceExport,
    directory: Path,
    card: ExportCard,
    requantise: bool = False,
    load: Callable[[], ResidentModel] | None = None,
) -> ExportReport:
    """Write an edited model in its checkpoint's format, and compare every written tensor with the source's bytes.

    The plan is that of `plan_source` for this model and edit. If the edit changes weights, the model is loaded, by
    `load` if that is given, and with `requantise` quantised tensors that it changes are packed anew. For the directory
    see `new_checkpoint`.

    Raises:
        UserError: See `rewrite`; or the directory is taken, or the disk is full.
        ExportError: A written tensor differs from the source's.
    """
    with new_checkpoint(directory, card.title) as part:
        check_room(part, sum(tensor.nbytes for tensor in plan.kept))
        copy_files(plan.source.folder, part)
        for name, content in plan.settings.items():
            write_json(part / name, content)
        scratch, found = part / ".anew", Rewritten()
        if changes_weights(edit) is not None:
            resident = ResidentModel.load(model) if load is None else load()
            plan, found = _rewritten(plan, model, resident, edit, scratch, requantise)
            check_room(part, sum(tensor.nbytes for tensor in plan.kept))
        checksums = _write_tensors(plan, part)
        scratch.unlink(missing_ok=True)
        _compare_bytes(plan.source.stored(part), plan.kept, checksums)
        summary = pruning_exporter(edit).selection_summary(underlying(edit), plan.source.facts, _note(plan))
        summary = replace(summary, rows=(*summary.rows, *found.rows()))
        parameters = parameters_after(plan.source.facts, plan.selection.retained)
        write_card(part, card, CardFacts(summary, "source", parameters, edit.phenotype_hash), plan.source.folder)
    anew = sum(each.anew is not None for each in plan.kept)
    report = ExportReport(
        part,
        "source",
        summary.experts,
        summary.active,
        parameters,
        0,
        agreement=None,
        copied=len(plan.kept) - anew,
        anew=anew,
        difference=found.difference,
        changes=found.rows(),
    )
    return finished(report, directory)


def _rewritten(
    plan: SourceExport, model: ModelConfig, resident: ResidentModel, edit: Edit, scratch: Path, requantise: bool
) -> tuple[SourceExport, Rewritten]:
    """Apply the edit, and write what it changes to a scratch file; see `rewrite`."""
    exporter, base = pruning_exporter(edit), underlying(edit)
    with scratch.open("wb") as stream, resident.layers_with(edit) as layers:
        blueprint = exporter.build(resident, base, "stock", scratch.parent)
        rewriter: Rewriter
        if plan.source.gguf is None:
            settings = _quantised(plan.settings["config.json"], plan.source.config).get("quantization_config")
            packed = None if settings is None else packed_format(str(settings["quant_method"]), settings, model.path)
            rewriter = PackedRewriter(plan.kept, packed, stream, requantise)
        else:
            config = resident.model.config
            names = GgufNames(ARCHITECTURES[config.model_type], config.num_hidden_layers)
            rewriter = GgufRewriter(plan.kept, names, stream, requantise)
        with naming(model):
            kept, found = rewrite(resident, layers, blueprint, rewriter)
    return replace(plan, kept=kept), found


def _quantised(content: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the part of a config.json that has its quantization_config: that of the text model, or the whole."""
    text = text_fields(content, config)
    return text if text.get("quantization_config") else content


def _note(plan: SourceExport) -> str:
    if plan.source.gguf is not None:
        kinds = Counter(tensor.dtype for tensor in plan.kept if tensor.rows is not None)
        values = f"in GGUF ({', '.join(sorted(kinds))})" if kinds else "in GGUF"
    else:
        content = _quantised(plan.settings["config.json"], plan.source.config)
        packed = (content.get("quantization_config") or {}).get("quant_method")
        values = f"quantised ({packed})" if packed else f"in {plan.source.facts.dtype}"
    but = " except for those named above" if any(tensor.anew is not None for tensor in plan.kept) else ""
    return f"In the format of the base model: its tensors, {values}, are copied byte for byte{but}."


def _without_mtp(raw: Mapping[str, object], config: Any, extra: int) -> dict[str, list[object]]:
    """Return the lists of a config.json with an entry per layer, without the last `extra` ones for MTP layers."""
    layers, known = config.num_hidden_layers, config.to_dict()

    def per_layer(value: object, count: int) -> TypeGuard[list[object]]:
        return isinstance(value, list) and len(value) == count

    return {
        name: value[:layers]
        for name, value in raw.items()
        if per_layer(value, layers + extra) and per_layer(known.get(name), layers)
    }


def _write_tensors(plan: SourceExport, part: Path) -> dict[str, int]:
    """Write all tensors, divided into files as in the source; returns the checksums of the source's bytes by name."""
    if plan.source.gguf is not None:
        return write_gguf(plan.source.gguf, part, plan.kept, plan.changes)
    checksums: dict[str, int] = {}
    places: dict[str, str] = {}
    by_file = sorted(plan.kept, key=lambda kept: kept.source.file.name)
    for file, group in groupby(by_file, key=lambda kept: kept.source.file):
        tensors = list(group)
        checksums |= _write_file(file, part / file.name, tensors)
        places |= {tensor.name: file.name for tensor in tensors}
    index = plan.source.folder / INDEX_FILE
    if index.is_file():
        content = read_json(index)
        content.setdefault("metadata", {})["total_size"] = sum(tensor.nbytes for tensor in plan.kept)
        # The source's order of the same names, so that an unpruned index is the source's.
        order = {name: position for position, name in enumerate(content["weight_map"])}
        names = sorted(places, key=lambda name: (order.get(name, len(order)), name))
        content["weight_map"] = {name: places[name] for name in names}
        write_json(part / INDEX_FILE, content)
    return checksums


def _write_file(source: Path, target: Path, tensors: Sequence[KeptTensor]) -> dict[str, int]:
    original, begin = read_header(source)
    # A file that keeps every tensor under its name gets the same bytes, header included.
    names = original.keys() - {"__metadata__"}
    whole = len(tensors) == len(names) and all(
        each.rows is None and each.table is None and each.name == each.source.name for each in tensors
    )
    if whole:
        ordered = sorted(tensors, key=lambda each: each.source.start)
        with source.open("rb") as stream:
            header = stream.read(begin)
    else:
        # Without gaps, tensors start at multiples of their element's size if larger elements come first.
        ordered = sorted(tensors, key=lambda each: -each.source.alignment)
        header = _header_of(original.get("__metadata__"), ordered)
    with target.open("wb") as stream:
        stream.write(header)
        return {tensor.name: tensor.copy(stream) for tensor in ordered}


def _header_of(metadata: object, tensors: Iterable[KeptTensor]) -> bytes:
    """Return the header of a safetensors file with some tensors, without gaps and in this order."""
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for tensor in tensors:
        where = [position, position + tensor.nbytes]
        entries[tensor.name] = {"dtype": tensor.source.dtype, "shape": list(tensor.shape), "data_offsets": where}
        position += tensor.nbytes
    content = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    content = content.ljust(-(-len(content) // 8) * 8)
    return len(content).to_bytes(8, "little") + content


def _compare_bytes(
    written: Mapping[str, StoredTensor], kept: Sequence[KeptTensor], checksums: Mapping[str, int]
) -> None:
    """Raise a `VerificationError` if written tensors, read back, aren't what was read from the source."""
    wanted = {tensor.name: tensor for tensor in kept}
    if written.keys() != wanted.keys():
        raise VerificationError(f"tensor {min(written.keys() ^ wanted.keys())} is either missing or not expected")
    for name, tensor in written.items():
        same = (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape)
        if not same or tensor.checksum() != checksums[name]:
            raise VerificationError(f"tensor {name} in {tensor.file.name} isn't what the source has; check the disk")
