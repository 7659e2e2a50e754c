"""Lists of the experts that a pruned model keeps, for servers that leave the others out while they load the checkpoint.

A line of `_WRITTEN` is a form: our own; that of vLLM-Ascend's `expert_list_file` (pull request 12525 of
vllm-project/vllm-ascend), a JSON object per line and MoE layer; and EASY-EP's mask (arXiv 2504.06792, RUCAIBox/EASYEP),
a JSON array with a row of n ones and zeros per MoE layer, in order of depth.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.text_files import parse_json, read_lines, writing_into
from moevolve.workers.contract.card import ExportCard, ExportReport, ListForm
from moevolve.workers.contract.edits import Edit
from moevolve.workers.contract.facts import ModelFacts, parameters_after
from moevolve.workers.contract.settings import ModelConfig
from moevolve.workers.export.source import changes_weights, pruning_exporter
from moevolve.workers.model.describe import describe_config, meta_model

# Kept experts, ascending, by decoder layer.
Kept = Mapping[int, Sequence[int]]


def export_list(model: ModelConfig, edit: Edit, file: Path, form: ListForm, card: ExportCard) -> ExportReport:
    """Write which experts an individual keeps; no weights are loaded.

    Raises:
        UserError: The individual does more than leave experts out, the model can't be read, or the file exists.
    """
    facts = describe_config(meta_model(model), model)
    try:
        kept = _kept(edit, facts)
    except UserError as error:
        raise UserError(f"--form {form} says only which experts are kept: {error}; export a checkpoint") from None
    if file.exists():
        raise UserError(f"{file} exists already; choose another name")
    with writing_into(file.parent):
        file.write_text(_WRITTEN[form](kept, facts, card), encoding="utf-8")
    retained = len(kept[facts.moe_layers[0]])
    notes = [("read it back with", f"moevolve import-eep {shlex.quote(str(file))} --experts-of {model.path}")]
    if form == "vllm-ascend":
        # It keeps the integer part of n (1 - ratio) experts; with n' + 0.5 rounding errors change nothing.
        ratio = (facts.experts - retained - 0.5) / facts.experts
        settings = json.dumps({"expert_list_file": str(file.absolute()), "expert_prune_ratio": ratio})
        notes.insert(0, ("serve with", f"--additional-config {shlex.quote(settings)}"))
    size, parameters = file.stat().st_size, parameters_after(facts, retained)
    return ExportReport(file, form, retained, facts.active, parameters, size, None, changes=tuple(notes))


def _kept(edit: Edit, facts: ModelFacts) -> Kept:
    changed = changes_weights(edit)
    if changed is not None:
        raise UserError(changed)
    selection = pruning_exporter(edit).selection(edit, facts)
    if selection.routers != selection.experts or any(len(set(each)) < len(each) for each in selection.experts):
        raise UserError("kept experts have the router rows of others, or are kept twice")
    if selection.active != facts.active:
        raise UserError(f"it has {selection.active} active experts per token, and the model's config {facts.active}")
    if facts.rule.scores == "sqrt_softplus_of_chosen":
        raise UserError("its routers have tables of the experts of token ids, in which others take their places")
    if selection.retained == facts.experts:
        raise UserError("it keeps all experts")
    return {layer: sorted(each) for layer, each in zip(facts.moe_layers, selection.experts, strict=True)}


def _ours(kept: Kept, facts: ModelFacts, card: ExportCard) -> str:
    head = {"model": card.base_model, "experts": facts.experts, "individual": card.individual}
    layers = ",\n".join(f'  "{layer}": {list(experts)}' for layer, experts in kept.items())
    return json.dumps(head, indent=1).removesuffix("\n}") + f',\n "kept": {{\n{layers}\n }}\n}}\n'


def _mask(kept: Kept, facts: ModelFacts, _: ExportCard) -> str:
    return json.dumps([np.isin(np.arange(facts.experts), each).astype(float).tolist() for each in kept.values()])


_WRITTEN: Mapping[ListForm, Callable[[Kept, ModelFacts, ExportCard], str]] = {
    "list": _ours,
    "vllm-ascend": lambda kept, *_: "".join(json.dumps({str(layer): kept[layer]}) + "\n" for layer in kept),
    "easy-ep": _mask,
}


def read_list(path: Path, facts: ModelFacts) -> NDArray[np.int64]:
    """Read which experts of a model a list of any form keeps; files with an object per line are called `.jsonl`.

    Returns:
        The kept experts of every MoE layer, ascending, int64 [layers, n'].

    Raises:
        UserError: The file can't be read, or doesn't fit the model; the message names file and layer.
    """
    lines = [line for line in read_lines(path) if line.strip()]
    parts = lines if path.suffix.lower() == ".jsonl" else ["\n".join(lines)]
    try:
        found = _by_layer([parse_json(part) for part in parts], facts)
        rows = [_row(found.pop(str(layer), None), layer, facts) for layer in facts.moe_layers]
        if found:
            raise ValueError(f"it names layer {next(iter(found))}, which has no experts")
        counts = sorted({len(row) for row in rows})
        if len(counts) > 1:
            raise ValueError(f"some layers keep {counts[0]} experts and others {counts[-1]}; keep equally many in all")
    except ValueError as error:
        raise UserError(f"{path}: not a list of this model's experts: {error}") from None
    return np.array(rows, dtype=np.int64)


def _by_layer(parts: Sequence[Any], facts: ModelFacts) -> dict[str, Any]:
    """Return what stands for each decoder layer."""
    layers, found = facts.moe_layers, dict[str, Any]()
    for part in parts:
        if isinstance(part, list):
            if len(part) != len(layers) or any(np.shape(row) != (facts.experts,) for row in part):
                raise ValueError(f"a mask has {len(layers)} rows, one per MoE layer, of {facts.experts} ones and zeros")
            found |= {str(layer): np.flatnonzero(row).tolist() for layer, row in zip(layers, part, strict=True)}
            continue
        by_layer = part.get("kept", part) if isinstance(part, dict) else None
        if not isinstance(by_layer, dict):
            raise ValueError("expected lists of experts by layer, or rows of ones and zeros")
        if part.get("experts", facts.experts) != facts.experts:
            raise ValueError(f"it is for layers of {part['experts']} experts, the model's have {facts.experts}")
        if found.keys() & by_layer.keys():
            raise ValueError(f"it names layer {min(found.keys() & by_layer.keys())} again")
        found |= by_layer
    return found


def _row(experts: Any, layer: int, facts: ModelFacts) -> list[int]:
    """Check the kept experts of a layer, and sort them."""
    count, groups = facts.experts, facts.rule.groups.count
    if not isinstance(experts, list) or not all(type(each) is int and 0 <= each < count for each in experts):
        raise ValueError(f"layer {layer} needs the numbers of the experts that it keeps, from 0 to {count - 1}")
    if len(set(experts)) < len(experts):
        raise ValueError(f"layer {layer} names an expert twice")
    if len(experts) in (0, count):
        raise ValueError(f"layer {layer} keeps none or all of {count} experts; cut rankings to the experts to keep")
    in_groups = np.bincount([each * groups // count for each in experts], minlength=groups)
    if len(set(in_groups)) > 1:
        raise ValueError(f"layer {layer} keeps {in_groups.tolist()} experts of its routing groups; keep equally many")
    return sorted(experts)
