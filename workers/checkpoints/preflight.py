"""Compares the tensors that a checkpoint's files have with those that its model takes, before any weights are read.

`transformers` gives random numbers to parameters that it doesn't find, and ignores tensors that it doesn't know. Here
both are errors, found by loading the headers alone into the model on the meta device, as its weights are loaded later.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.headers import EXPERT
from moevolve.workers.checkpoints.pruning import is_mtp_stem
from moevolve.workers.checkpoints.state import SavedNames, layers_prefix, load_part
from moevolve.workers.checkpoints.text_models import ReadableTensor
from moevolve.workers.families.base import MTP_FIELDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Part of the names of a matrix that only layers for multi-token prediction have, which follow the decoder's layers.
_MTP_PART = "eh_proj"
# Scales of activations and of the KV cache, which computing with unpacked weights doesn't need.
_UNUSED_SCALES = re.compile(r".+[._](input|activation|act|output|k|v|kv|q|prob)_(scale|global_scale|zero_point)")
# Last names of tensors that belong to a quantised matrix.
_PACKED_PART = re.compile(r".+[._](scales?|scale_inv|zero_point|zeros|g_idx|packed|shape|absmax|quant_map)|.+\.SCB")


_PART_HINT = ", and quantization_config doesn't say that it is part of a quantised matrix"


def check_tensors(model: PreTrainedModel, tensors: Mapping[str, ReadableTensor], path: str) -> None:
    """Refuse a checkpoint whose tensors aren't exactly those of its model.

    Parts that the model doesn't have at all, such as those for images, may be there and are ignored.

    Args:
        model: Model on the meta device, whose parameters are replaced.
        tensors: Tensors of the checkpoint by the names in its family; see `UnpackedTensor.empty`.
        path: The checkpoint, for messages.

    Raises:
        UserError: A tensor is missing, unexpected, there twice, or of another shape; or the output projection is the
            embedding's by the config, and differs from it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    expected = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    conversions = get_model_conversion_mapping(model)
    for each in conversions:
        if getattr(each, "force_cpu", False):
            each.force_cpu = False  # to save memory of devices; tensors without numbers can't be moved
    sources = _sources(model, conversions, tensors, path)
    empty = {name: tensor.empty() for name, tensor in tensors.items()}
    info = load_part(model, conversions, empty, torch.device("meta"), model.dtype)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)  # noqa: SLF001 - the only place that knows what a class leaves out
    misshapen = sorted(info.conversion_errors) + sorted(name for name, *_ in info.mismatched_keys)
    unexpected = [name for name in sorted(info.unexpected_keys) if _changes_results(name, model, tensors, expected)]
    if misshapen:
        wrong = _misshapen(sources[misshapen[0]], empty, model.get_parameter_or_buffer(misshapen[0]).shape)
    elif info.missing_keys:
        wrong = _missing(min(info.missing_keys), info.unexpected_keys, unexpected, model)
    elif unexpected:
        wrong = (
            f"tensor {unexpected[0]} is in the files, and a {model.config.model_type} model with this config.json has "
            f"no such parameter{_PART_HINT if _PACKED_PART.fullmatch(unexpected[0]) else ''}; fetch config.json and "
            "the weights anew from one place"
        )
    else:
        wrong = _coded(sources, empty, expected) or _untied(model, sources, tensors)
    if wrong:
        raise UserError(f"model {path}: {wrong}")


def _sources(
    model: PreTrainedModel, conversions: list[object], tensors: Collection[str], path: str
) -> dict[str, list[str]]:
    """Names of the stored tensors that make up every parameter. Raises a `UserError` if there are two sets of them."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    parameters, prefix = model.state_dict(), f"{model.base_model_prefix}."
    found, parts = defaultdict[str, list[str]](list), dict[tuple[str, ...], str]()
    for name in sorted(tensors):
        if name.startswith(prefix * 2):  # which transformers reads, and other programs don't
            raise UserError(
                f"model {path}: tensor {name} has {prefix!r} twice in front; save the tensors without it again"
            )
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, parameters)
        match = EXPERT.fullmatch(name)
        part = (target, match["expert"], match["rest"]) if match and pattern else (target, pattern or "")
        other = parts.setdefault(part, name)
        if other != name and (match or pattern is None):
            raise UserError(
                f"model {path}: tensors {other} and {name} are both {target}; remove the one that isn't the model's"
            )
        found[target].append(name)
    return found


def _changes_results(name: str, model: PreTrainedModel, tensors: Collection[str], expected: Collection[str]) -> bool:
    """Whether a tensor that the model doesn't take belongs to a part that it has, so that it is another model's."""
    if is_mtp_stem(name) or _UNUSED_SCALES.fullmatch(name):
        return False
    base = f"{model.base_model_prefix}."
    if any(other.startswith(f"{base}{name.partition('.')[0]}.") for other in expected):
        name = f"{base}{name}"  # as in files of a decoder alone, which `transformers` reads as well
    layer = re.match(rf"{re.escape(layers_prefix(model))}(\d+)\.", name)
    if layer is not None:
        later = int(layer[1]) >= model.config.num_hidden_layers
        says_so = any(getattr(model.config, field, None) for field in MTP_FIELDS)
        return not (
            later and (says_so or any(layer[0].removeprefix(base) in each and _MTP_PART in each for each in tensors))
        )
    part = name.partition(".")[0]
    return any(other.startswith(f"{part}.") for other in expected)


def _coded(
    sources: Mapping[str, Sequence[str]], empty: Mapping[str, Tensor], expected: Mapping[str, torch.dtype]
) -> str:
    """Return what is wrong where a parameter's numbers are stored as codes that nothing says how to read."""
    for target, names in sources.items():
        for name in names if target in expected and expected[target].is_floating_point else ():
            dtype = empty[name].dtype
            if not dtype.is_floating_point or dtype.itemsize == 1:
                return (
                    f"tensor {name} has numbers of {dtype} without scales, so it's unknown what they stand for; fetch "
                    "config.json and the weights anew from one place, or save the weights as bfloat16"
                )
    return ""


def _missing(name: str, untaken: Collection[str], unexpected: Sequence[str], model: PreTrainedModel) -> str:
    """What is wrong where a parameter is missing: the model takes none of `untaken`, among them `unexpected` ones."""
    saved = next(iter(SavedNames(model).saved(name, model.get_parameter_or_buffer(name))))
    for wanted in (name, saved):
        misnamed = next((other for other in sorted(untaken) if other.endswith(f".{wanted}")), None)
        if misnamed is not None:
            return (
                f"tensor {saved} is missing, and the files' names begin with {misnamed.removesuffix(wanted)!r}, which "
                "the program that saved them put in front; save them again without it"
            )
    if unexpected:
        return (
            f"tensor {saved} isn't in the files, and they have {unexpected[0]}, which a {model.config.model_type} "
            "doesn't; save them with the names that transformers gives, or fetch config.json and the weights anew from "
            "one place"
        )
    hint = ", or set tie_word_embeddings: true in config.json if the embedding is its head, too"
    return (
        f"tensor {saved} isn't in the files, so the checkpoint is incomplete or of another model; fetch or convert it "
        f"again{hint if name.startswith('lm_head.') else ''}"
    )


def _misshapen(sources: Sequence[str], empty: Mapping[str, Tensor], wanted: torch.Size) -> str:
    """What is wrong with the tensors of a parameter of shape `wanted`; of experts, which is missing or differs."""
    parts: dict[str, dict[int, str]] = defaultdict(dict)
    for name in sources:
        match = EXPERT.fullmatch(name)
        if match is not None:
            parts[f"{match['block']}.*{match['rest'] or ''}"][int(match["expert"])] = name
    for part, experts in parts.items():
        # A set of all numbers would take gigabytes where config.json claims billions of experts.
        odd = next((number for number in range(wanted[0]) if number not in experts), None)
        if odd is None:
            odd = min((number for number in experts if number >= wanted[0]), default=None)
        if odd is not None:
            name, there = part.replace("*", str(odd)), odd in experts
            return (
                f"tensor {name} is {'in' if there else 'missing from'} the files, and config.json says {wanted[0]} "
                "experts; fetch config.json and the weights anew from one place"
            )
        (usual, _), *others = Counter(empty[name].shape for name in experts.values()).most_common()
        if others:
            name = next(name for name in experts.values() if empty[name].shape != usual)
            return (
                f"tensor {name} has shape {list(empty[name].shape)}, and those of other experts are {list(usual)}; "
                "fetch its file again"
            )
    name = sources[0]
    what = "all experts are" if parts else "it is"
    return (
        f"tensor {name} has shape {list(empty[name].shape)}, and by config.json {what} {list(wanted)}; fetch "
        "config.json and the weights anew from one place"
    )


def _untied(model: PreTrainedModel, sources: Mapping[str, Sequence[str]], tensors: Mapping[str, ReadableTensor]) -> str:
    """Return what is wrong where the output projection is the embedding by the config, and the files have both."""
    for target, source in model.all_tied_weights_keys.items():
        both = [*sources.get(target, ()), *sources.get(source, ())]
        if len(both) == 2 and not torch.equal(tensors[both[0]][...], tensors[both[1]][...]):
            return (
                f"by config.json {both[0]} is {both[1]} (tie_word_embeddings), and the files have two different ones; "
                "set tie_word_embeddings: false in config.json, or remove the tensor that isn't the model's"
            )
    return ""
