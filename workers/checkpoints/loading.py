"""Loads checkpoints and tokenizers: safetensors only, without remote code unless the user allows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moevolve.evaluators.errors import UserError, opening
from moevolve.workers.checkpoints.files import config_file, gguf_file, local_directory, read_json
from moevolve.workers.checkpoints.formats.gguf import gguf_tensors
from moevolve.workers.checkpoints.formats.gguf_metadata import apply_tokens, gguf_config, gguf_tokenizer
from moevolve.workers.checkpoints.formats.registry import UnpackedTensor, packed_format, plain_tensors, unpacked_tensors
from moevolve.workers.checkpoints.headers import refuse_layers, stored_tensors
from moevolve.workers.checkpoints.preflight import check_tensors
from moevolve.workers.checkpoints.settings import check_generation, check_rope
from moevolve.workers.checkpoints.state import empty_model, load_part, restore_buffers
from moevolve.workers.checkpoints.stored_experts import StoredExperts
from moevolve.workers.checkpoints.text_models import (
    ReadableTensor,
    published_names,
    text_config,
    text_fields,
    text_tensors,
)
from moevolve.workers.contract.settings import Device, Dtype, ModelConfig
from moevolve.workers.families.base import EXPERTS_BACKEND, ExpertFamily
from moevolve.workers.families.registry import FAMILIES, dense_family, expert_family, family_of, register_class

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Tensors whose first numbers are read before a model is loaded: a second on a slow disk.
_SAMPLED = 500
# Where older programs wrote what others write into config.json.
_QUANTISATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# Classes of tokenizers that put BOS before texts by `add_bos_token`; others leave it to tokenizer.json.
_BEGUN_BY_SETTING = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
# A folder with one of them has a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def gpu_count() -> int:
    """Return the number of this machine's GPUs."""
    return torch.cuda.device_count()


def resolve_device(config: ModelConfig) -> torch.device:
    """Return the device for the model's inputs. Raise a `UserError` if `device` is `cuda` without a CUDA device."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "model.device is cuda but this worker sees no CUDA device; use device: auto or cpu, or give it a GPU"
        )
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def use_threads(count: int) -> None:
    """Run torch with so many threads, whatever OMP_NUM_THREADS is, which Ray sets to the CPUs of an actor."""
    torch.set_num_threads(count)


def placed(config: ModelConfig, device: Device | None = None, dtype: Dtype | None = None) -> ModelConfig:
    """Change the device and dtype of a search's model settings.

    Args:
        config: Model settings of the search.
        device: None for the search's, or the CPU if the search ran on a GPU and none is here.
        dtype: None for the search's.

    Returns:
        The new settings. On a CPU they have no device map, and `expert_offload: device` instead of `host`.
    """
    if device is None:
        device = config.device if config.device != "cuda" or torch.cuda.is_available() else "cpu"
    settings = replace(config, device=device, dtype=dtype or config.dtype)
    if resolve_device(settings).type != "cpu":
        return settings
    offload = "device" if config.expert_offload == "host" else config.expert_offload
    return replace(settings, device_map=None, expert_offload=offload)


def checkpoint_folder(config: ModelConfig) -> Path:
    """Return the folder with a checkpoint's files; those of a hub id are fetched if they aren't cached."""
    directory = local_directory(config)
    if directory is not None:
        return directory
    from huggingface_hub import snapshot_download

    # Repositories can have the same weights a second time, in folders or as pickles.
    skipped = ["*/*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack"]
    with opening(f"model {config.path}: not found on the hub or in its cache"):
        return Path(snapshot_download(config.path, revision=config.revision, ignore_patterns=skipped))


def has_weights(config: ModelConfig) -> bool:
    """Return whether a checkpoint's folder has weights, or is a GGUF file; assumed for hub ids."""
    directory = local_directory(config)
    return directory is None or gguf_file(config) is not None or any(directory.glob("*.safetensors"))


def _hub_arguments(config: ModelConfig) -> dict[str, str | bool]:
    return {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}


def backends(model_type: str) -> dict[str, str]:
    """Return the arguments of `from_pretrained` that set the backends of attention and experts for a family."""
    family = FAMILIES.get(model_type)
    attention = "sdpa" if family is None or family.sdpa else "eager"
    # Families with blocks of our own have no backends of experts in `transformers`.
    none = dense_family(model_type) or (isinstance(family, ExpertFamily) and family.adapted)
    experts = {} if none else {"experts_implementation": EXPERTS_BACKEND}
    return {"attn_implementation": attention, **experts}


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint's weights are packed; `tensors` unpacks to a dtype, by names in an unquantised checkpoint."""

    name: str
    tensors: Callable[[torch.dtype], Mapping[str, ReadableTensor]]


def packing(config: ModelConfig, settings: PretrainedConfig) -> Packing | None:
    """Return how the weights of a checkpoint with the config `settings` are packed; None if they are plain safetensors.

    Raises:
        UserError: The format can't be unpacked, as pruning and merging experts require.
    """
    file = gguf_file(config)
    if file is not None:
        return Packing("gguf", partial(gguf_tensors, file, settings))
    packed = getattr(settings, "quantization_config", None)
    if packed is None:
        if getattr(settings, "compression_config", None):
            raise UserError(
                f"model {config.path}: config.json has compression_config, as the first compressed-tensors wrote it; "
                "rename it to quantization_config"
            )
        for file in map(partial(_cached, config), _QUANTISATION_FILES):
            if file is not None and read_json(file):
                raise UserError(
                    f"{file} says how the weights are quantised, and config.json has no quantization_config; "
                    "put its content there, with the quant_method (modelopt, gptq, awq), or remove it if they aren't"
                )
        return None
    packed = packed if isinstance(packed, dict) else packed.to_dict()
    method = packed.get("quant_method")
    packed_as = packed_format(method, packed, config.path)
    return Packing(
        str(method), lambda dtype: unpacked_tensors(stored_tensors(checkpoint_folder(config)), packed_as, dtype)
    )


def dtype_of(config: ModelConfig, settings: PretrainedConfig) -> Dtype:
    """Return the parameter dtype after loading: `config.dtype`, or if that is `auto` the one in the config `settings`.

    Raises:
        UserError: `config.dtype` is `auto`, and `settings` has no dtype or an unsupported one.
    """
    if config.dtype != "auto":
        return config.dtype
    # Published quantised checkpoints compute in bfloat16.
    if gguf_file(config) is not None or getattr(settings, "quantization_config", None) is not None:
        return "bfloat16"
    own = None if settings.dtype is None else str(settings.dtype).removeprefix("torch.")
    for name in DTYPES:
        if name == own:
            return name
    raise UserError(
        f"model {config.path}: its config.json says {'no dtype' if own is None else f'dtype {own}'}; "
        f"set model.dtype to one of {', '.join(DTYPES)}"
    )


def own_dtype(config: ModelConfig) -> Dtype | None:
    """Return the value of `ModelConfig.own_dtype`: the checkpoint's dtype if `dtype` is `auto`, else None."""
    return dtype_of(config, load_config(config)) if config.dtype == "auto" else None


def _source(config: ModelConfig) -> str:
    return str(local_directory(config) or config.path)


def _alone(config: ModelConfig, *files: str) -> Path | None:
    """Return the checkpoint's GGUF file if none of the given files is next to it."""
    file = gguf_file(config)
    return None if file is None or any((file.parent / name).is_file() for name in files) else file


def load_config(config: ModelConfig) -> PretrainedConfig:
    """Load the `transformers` config of a checkpoint; of a multimodal one, that of its text model."""
    file = _alone(config, "config.json")
    if file is not None:
        settings = gguf_config(file)
    else:
        settings = text_config(_whole_config(config))
        check_rope(settings, raw_config(config, settings), config.path)
    tokenizer = file or _alone(config, *_TOKENIZER_FILES)
    if tokenizer is not None:
        apply_tokens(settings, tokenizer)
    return settings


def raw_config(config: ModelConfig, settings: PretrainedConfig) -> dict[str, Any]:
    """Return the part of config.json that a text model's config was made from, as stored; empty for a GGUF alone."""
    if _alone(config, "config.json") is not None:
        return {}
    raw = read_json(config_file(config))
    if not isinstance(raw, dict):
        return {}
    own = text_fields(raw, settings)
    for key in ("rope_scaling", "rope_parameters", "rope_theta") if own is not raw else ():
        if raw.get(key) not in (None, own.get(key)):
            raise UserError(
                f"model {config.path}: config.json has {key}: {raw[key]} beside the settings of its text model, which "
                f"say {own.get(key)}; put the one that is the model's there"
            )
    return own


def naming(config: ModelConfig) -> AbstractContextManager[None]:
    """Return a context in which `transformers` knows the names of a checkpoint's tensors (`published_names`)."""
    return nullcontext() if gguf_file(config) is not None else published_names(_whole_config(config))


def _whole_config(config: ModelConfig) -> PretrainedConfig:
    from transformers import AutoConfig

    with opening(f"model {config.path}: its config can't be read"):
        settings = AutoConfig.from_pretrained(_source(config), **_hub_arguments(config))
    register_class(settings)
    if gguf_file(config) is not None and hasattr(settings, "quantization_config"):
        del settings.quantization_config  # that of the checkpoint that the file was made from
    return settings


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint.

    Raises:
        UserError: There is none, it can't be read, or it has tokens that the model has no embeddings for.
    """
    from transformers import AutoTokenizer

    file = _alone(config, *_TOKENIZER_FILES)
    with opening(f"model {config.path}: its tokenizer can't be read"):
        if file is not None:
            tokenizer = gguf_tokenizer(file)
        else:
            tokenizer = AutoTokenizer.from_pretrained(_source(config), **_hub_arguments(config))
            _take_stored_steps(tokenizer, config)
            _begin_as_stated(tokenizer, config)
        if not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = _processor_template(config)
        vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
        tried = tokenizer("a text", add_special_tokens=False)["input_ids"]
    rows = load_config(config).vocab_size
    if vocabulary.keys() <= added.keys() or not tried:
        raise UserError(
            f"model {config.path}: its tokenizer makes no tokens of a text; fetch all files of the tokenizer, such as "
            "tokenizer.json and tokenizer_config.json"
        )
    # Special tokens that no text has, often for padding, may have no embedding; those of the chat template need one.
    for token, index in vocabulary.items():
        if index >= rows and (token not in added or token in str(tokenizer.chat_template)):
            raise UserError(
                f"model {config.path}: its tokenizer has token {token!r} of id {index}, and the model has embeddings "
                f"for ids below {rows}; use the tokenizer that belongs to the weights, or resize the embeddings"
            )
    return tokenizer


def _take_stored_steps(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Give a tokenizer the steps that its tokenizer.json says.

    Classes of `transformers` 5, such as those for GPT-2 and Llama, put their own in place of them, and so divide texts
    otherwise than in training: SmolLM2's and Granite's digits stay together, DeepSeek's blanks vanish, and
    Llama 2's have one at the beginning less.
    """
    from tokenizers import Tokenizer

    file, backend = _cached(config, "tokenizer.json"), getattr(tokenizer, "backend_tokenizer", None)
    if file is None or backend is None:
        return
    stored = Tokenizer.from_file(str(file))
    for step in ("normalizer", "pre_tokenizer", "model", "decoder"):
        setattr(backend, step, getattr(stored, step))


def _begin_as_stated(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Let texts begin with BOS if tokenizer_config.json has `add_bos_token` for a class that followed it.

    `transformers` 5 doesn't read the setting where there is a tokenizer.json, and DeepSeek's has no BOS.
    """
    file = _cached(config, "tokenizer_config.json")
    stated = {} if file is None else read_json(file)
    adds, kind = stated.get("add_bos_token"), str(stated.get("tokenizer_class")).removesuffix("Fast")
    if kind not in _BEGUN_BY_SETTING or adds is None or tokenizer.bos_token is None:
        return
    if (tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]) != adds:
        tokenizer.add_bos_token = adds


def _cached(config: ModelConfig, name: str) -> Path | None:
    """Return the path of a checkpoint's file, of a hub id from the hub or its cache; None if there is none."""
    from transformers.utils import cached_file

    # Without a connection the cache has what was fetched with the weights.
    absent = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(_source(config), name, revision=config.revision, **absent)
    return None if file is None else Path(file)


def _processor_template(config: ModelConfig) -> str | dict[str, str] | None:
    """Return the chat template that models with images have with their processor; None without one."""
    for name in ("chat_template.json", "processor_config.json"):
        file = _cached(config, name)
        found = None if file is None else read_json(file).get("chat_template")
        if found:
            several = isinstance(found, list)
            return {each["name"]: each["template"] for each in found} if several else found
    return None


def model_class(settings: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of causal language models of a config, whose family is supported."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]


def model_without_weights(config: ModelConfig, settings: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model of a checkpoint with the config `settings` on the meta device, with the backends of a worker."""
    with opening(f"model {config.path}: transformers can't make a model from its config"):
        form = backends(settings.model_type)
        return empty_model(model_class(settings), settings, dtype, **form)


def check_weights(config: ModelConfig) -> None:
    """Refuse a checkpoint whose files don't have exactly its model's tensors, by their headers; see `check_tensors`.

    Of some tensors the first numbers are read; that all are finite is known when they have been loaded.
    A folder without weights passes, and a hub id, whose files are checked when a worker has fetched them.
    """
    if local_directory(config) is None or not has_weights(config):
        return
    _, tensors, _ = _opened(config)
    plain = [each for each in tensors.values() if isinstance(each, UnpackedTensor) and each.codec.plain]
    for each in plain[:: max(1, len(plain) // _SAMPLED)]:
        each.check_beginning()


def _opened(config: ModelConfig) -> tuple[PretrainedConfig, Mapping[str, ReadableTensor], torch.dtype]:
    """Config of the unpacked model, its tensors by their names in its family, which are checked, and their dtype."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    settings = load_config(config)
    family_of(settings, config.path)
    packed, dtype = packing(config, settings), DTYPES[dtype_of(config, settings)]
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    # Read and unpacked on `tensor[...]`.
    if packed is None:
        stored: Mapping[str, ReadableTensor] = plain_tensors(stored_tensors(checkpoint_folder(config)), dtype)
    else:
        stored = packed.tensors(dtype)
    tensors = text_tensors(stored, settings)
    refuse_layers(settings.num_hidden_layers, len(tensors), config.path)
    model = model_without_weights(config, settings, dtype)
    with opening(f"model {config.path}: its weights can't be read"), naming(config):
        check_tensors(model, tensors, config.path)
    return settings, tensors, dtype


def _read_generation_config(model: PreTrainedModel, config: ModelConfig) -> None:
    """Give a model the generation config of its checkpoint, which has the end tokens of chats; there needn't be one."""
    from transformers import GenerationConfig

    file = checkpoint_folder(config) / "generation_config.json"
    if not file.is_file():
        return
    with opening(f"{file}: it can't be read"):
        check_generation(read_json(file), str(file))
        model.generation_config = GenerationConfig.from_pretrained(file.parent)
    ends = model.generation_config.eos_token_id
    if ends is not None and not all(type(end) is int for end in (ends if isinstance(ends, list) else [ends])):
        raise UserError(f"{file}: eos_token_id is {ends!r}, where the id of a token or a list of ids is expected")


def load_without_experts(config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, StoredExperts]:
    """Load a mixture of experts whose routed experts stay in its files, and its tokenizer; see `load_model`.

    Returns:
        The model on the host, with experts on the meta device; its tokenizer; the experts.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    settings, tensors, dtype = _opened(config)
    tokenizer, family = load_tokenizer(config), expert_family(settings.model_type)
    assert family is not None
    model = model_without_weights(config, settings, dtype)
    frame = {name: tensor for name, tensor in tensors.items() if not family.stores_experts(name)}
    with opening(f"model {config.path}: its weights don't load"), naming(config):
        experts = StoredExperts(model, tensors)
        load_part(model, get_model_conversion_mapping(model), frame, torch.device("cpu"), dtype)
        model.tie_weights()
    restore_buffers(model, torch.device("cpu"))
    _read_generation_config(model, config)
    return model, tokenizer, experts


def load_model(config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model for inference, and its tokenizer.

    The weights are on `resolve_device(config)`, with a `device_map` spread over the GPUs, and with
    `expert_offload="host"` left on the host, from where `ResidentModel` moves them. Quantised checkpoints are
    dequantised to `dtype_of`.

    Raises:
        UserError: The checkpoint is missing, has other tensors than its model, or doesn't load with these settings.
    """
    device = resolve_device(config)
    settings, tensors, dtype = _opened(config)
    tokenizer = load_tokenizer(config)
    form = {"dtype": dtype, "device_map": config.device_map, **backends(settings.model_type)}
    # The tensors are given, rather than the folder, so that what is loaded is what was checked.
    with opening(f"model {config.path}: its weights don't load"), naming(config):
        model: PreTrainedModel = model_class(settings).from_pretrained(
            None, config=settings, state_dict=dict(tensors), **form
        )
    _read_generation_config(model, config)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            f"model {config.path}: device_map {config.device_map!r} leaves part of it off the devices; "
            "use more GPUs, a smaller dtype, or expert_offload: host"
        )
    if config.device_map is None and config.expert_offload == "device":
        torch.nn.Module.to(model, device)
    model.eval()
    model.requires_grad_(False)
    return model, tokenizer
