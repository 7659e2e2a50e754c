"""What the metadata of a GGUF file say of a model and its tokenizer: all of it is applied, or a file is refused.

llama.cpp's converter writes them, and its code for an architecture reads them. Where a config.json is next to the file,
it counts, and metadata that say something else stop.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moevolve.evaluators.errors import UserError, opening
from moevolve.workers.checkpoints.files import gguf_parts
from moevolve.workers.checkpoints.headers import refuse_layers
from moevolve.workers.checkpoints.settings import Only, Settings, check_settings

if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_FIELDS = {
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_used_count": "num_experts_per_tok",
}
# Metadata with the number of layers for multi-token prediction, which nothing here runs.
_PREDICTED = "nextn_predict_layers"
# Metadata of an architecture that change no number.
_NOTES = (
    *("vocab_size", "context_length", "rope.scaling.finetuned", "tensor_data_layout", "pooling_type"),
    *("expert_shared_count", _PREDICTED),
)
# Metadata about all of a file, and about its tokenizer where none is next to it.
GGUF_SETTINGS: Settings = {
    "general.architecture": "applied",
    "general.type": Only(("model",), "something else than a model"),
    "general.quantization_version": Only((2,), "blocks in another order"),
}
# Ways to divide texts for which llama.cpp adds a BOS if the metadata don't say whether; so it does for SentencePiece.
_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
_BYTE_LEVEL = ("gpt-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "phi-2", "jais2")
# As these, after every digit has become a piece of its own (llama.cpp's `llm_tokenizer_bpe`).
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
TOKENIZER_SETTINGS: Settings = {
    **dict.fromkeys(("ggml.model", "ggml.tokens", "ggml.token_type", "ggml.scores", "ggml.merges"), "applied"),
    "ggml.pre": "see below",
    **dict.fromkeys(("ggml.bos_token_id", "ggml.eos_token_id", "ggml.eot_token_id", "ggml.eom_token_id"), "applied"),
    **dict.fromkeys(("ggml.unknown_token_id", "ggml.padding_token_id", "ggml.add_bos_token"), "applied"),
    **dict.fromkeys(("chat_template", "chat_templates"), "applied"),
    "ggml.add_eos_token": "prompts are continued",
    "ggml.add_sep_token": Only((), "a separator is added to texts"),
    "ggml.add_space_prefix": "see below",
    "ggml.remove_extra_whitespaces": Only((), "blanks are left out of texts"),
    "ggml.precompiled_charsmap": Only((), "characters of texts are replaced"),
    "ggml.token_type_count": Only((), "tokens have types"),
    **dict.fromkeys(("ggml.seperator_token_id", "ggml.cls_token_id", "ggml.mask_token_id"), "of other kinds of models"),
    "huggingface.json": "the same tokenizer once more",
    **dict.fromkeys([f"ggml.{name}_token_id" for name in ("prefix", "suffix", "middle")], "for filling gaps"),
    **dict.fromkeys([f"ggml.fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")], "the same"),
}

# Qwen's experts have their own width, and may have heads that aren't hidden size / heads wide.
_QWEN = {
    "attention.key_length": "head_dim",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Model type, further fields by key, and what llama.cpp's code does without a key for it, by architecture.
_CONFIGS: dict[str, tuple[str, dict[str, str], dict[str, object]]] = {
    "llama": ("mixtral", {"expert_count": "num_local_experts", "attention.key_length": "head_dim"}, {}),
    "olmoe": (
        "olmoe",
        {"expert_count": "num_experts", "attention.clamp_kqv": "clip_qkv"},
        {"norm_topk_prob": False},
    ),
    "qwen2moe": ("qwen2_moe", _QWEN, {"norm_topk_prob": False}),
    "qwen3moe": ("qwen3_moe", _QWEN, {"norm_topk_prob": True}),
}

# The same of files without a number of experts, which are dense models. Those of Gemma don't say what scores are
# multiplied with, nor StarCoder2's a window.
_DENSE_CONFIGS: dict[str, tuple[str, dict[str, str], dict[str, object]]] = {
    "llama": ("llama", {"attention.key_length": "head_dim"}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"attention.key_length": "head_dim"}, {}),
}

# Architecture in a file's metadata (`general.architecture`) by model type.
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


def open_parts(file: Path) -> dict[Path, GGUFReader]:
    """Map all files of a model into memory, in order, given one of them.

    Raises:
        UserError: One is missing or isn't a valid GGUF file, or the gguf library isn't installed.
    """
    try:
        from moevolve.workers.checkpoints.gguf_reader import QuickReader
    except ImportError as error:
        raise UserError(
            f"{file}: GGUF files are read by the library gguf; install it with: pip install 'moevolve[quantised]'"
        ) from error
    readers: dict[Path, GGUFReader] = {}
    for part in gguf_parts(file):
        with opening(f"{part} isn't a valid GGUF file, or ends early", "fetch the file again"):
            readers[part] = QuickReader(part)
    return readers


def metadata(reader: GGUFReader, key: str) -> Any:
    """Return a value of a file's metadata; None if it doesn't have the key."""
    found = reader.get_field(key)
    return None if found is None else found.contents()


def gguf_config(file: Path) -> PretrainedConfig:
    """Derive the config of a model from the metadata of its file, the first part of a split one.

    Raises:
        UserError: The file is invalid, or of an architecture or with a rotary scaling that metadata don't describe
            completely.
    """
    # A launch asks for the config several times.
    return copy.deepcopy(_derived(file, file.stat().st_mtime_ns))


@lru_cache(maxsize=8)
def _derived(file: Path, _changed: int) -> PretrainedConfig:
    from transformers import AutoConfig

    readers = list(open_parts(file).values())
    reader = readers[0]
    architecture = str(metadata(reader, "general.architecture"))
    beside = f"put the config.json of the model that it was made from next to it, in {file.parent}"
    if architecture not in ARCHITECTURES.values():
        raise UserError(
            f"{file}: architecture {architecture!r} isn't supported; use the safetensors checkpoint that it was made "
            f"from, or a file of one of {', '.join(sorted(set(ARCHITECTURES.values())))}"
        )
    configs = _DENSE_CONFIGS if is_dense_file(reader, architecture) else _CONFIGS
    if architecture not in configs:
        raise UserError(f"{file}: the config of architecture {architecture!r} can't be derived from it; {beside}")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    # llama.cpp writes the output projection only if it isn't the embedding's matrix.
    tied = not any(tensor.name == "output.weight" for each in readers for tensor in each.tensors)
    model_type, keys, settings = configs[architecture]
    for key, name in (_FIELDS | keys).items():
        value = metadata(reader, f"{architecture}.{key}")
        if isinstance(value, list):
            raise UserError(f"{file}: by its metadata {key} isn't the same in every layer; {beside}")
        if value is not None:
            settings = settings | {name: _shortest(value)}
    layers = settings.get("num_hidden_layers")
    if isinstance(layers, int):
        settings["num_hidden_layers"] = layers - predicted_layers(reader, architecture)
        refuse_layers(layers, sum(len(each.tensors) for each in readers), file)
    theta = _shortest(metadata(reader, f"{architecture}.rope.freq_base") or 10_000.0)
    with opening(f"{file}: its metadata don't describe a model"):
        found = AutoConfig.for_model(
            model_type,
            **settings,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            vocab_size=0 if tokens is None else len(tokens.data),
            tie_word_embeddings=tied,
            **{f"{name}_token_id": metadata(reader, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")},
            pad_token_id=metadata(reader, "tokenizer.ggml.padding_token_id"),
        )
    factors = next((each for reader in readers for each in reader.tensors if each.name == "rope_freqs.weight"), None)
    if factors is not None:
        found.rope_parameters = _scaling(
            torch.from_numpy(np.array(factors.data, np.float32)), found, f"{file}: {beside}"
        )
    check_metadata(reader, architecture, found, file)
    return found


def apply_tokens(settings: PretrainedConfig, file: Path) -> None:
    """Change a config by what a file that is a model's tokenizer says of how texts begin and answers end."""
    adds_bos, ends = _stored_tokens(file, file.stat().st_mtime_ns)
    if adds_bos is False:
        settings.bos_token_id = None  # prompts begin with the token that both config and tokenizer name
    own = settings.eos_token_id
    found = sorted({*ends, *(own if isinstance(own, list) else [] if own is None else [own])})
    settings.eos_token_id = found if len(found) > 1 else next(iter(found), None)


@lru_cache(maxsize=8)
def _stored_tokens(file: Path, _changed: int) -> tuple[bool | None, tuple[int, ...]]:
    """Whether texts begin with a token, if that is said, and the tokens that end answers, messages and turns."""
    reader = next(iter(open_parts(file).values()))
    ends = (metadata(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return metadata(reader, "tokenizer.ggml.add_bos_token"), tuple(end for end in ends if end is not None)


def _scaling(factors: Tensor, settings: PretrainedConfig, beside: str) -> dict[str, object]:
    """Return the rotary settings whose frequencies are divided by `factors`, those of Llama 3.

    llama.cpp's converter stores the factors alone. A wave as long as the original context or longer is divided by the
    largest of them, and those between it and a quarter of it by less.
    """
    rope = {"rope_type": "llama3", "rope_theta": settings.rope_parameters["rope_theta"], "factor": float(factors.max())}
    tried = copy.deepcopy(settings)
    for power in range(4, 24):
        tried.rope_parameters = rope | {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2**power,
        }
        if _same_factors(factors, tried):
            return dict(tried.rope_parameters)
    raise UserError(f"{beside}: the factors of its rotary frequencies, rope_freqs.weight, aren't those of Llama 3")


def _same_factors(factors: Tensor, settings: PretrainedConfig) -> bool:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = settings.rope_parameters
    steps = torch.arange(0, 2 * len(factors), 2, dtype=torch.float64) / (2 * len(factors))
    plain = rope["rope_theta"] ** -steps
    kind = rope.get("rope_type", "default")
    used = plain if kind == "default" else ROPE_INIT_FUNCTIONS[kind](settings, torch.device("cpu"))[0].double()
    return used.shape == plain.shape and torch.allclose(plain / used, factors.double(), rtol=1e-4)


def check_factors(factors: ReaderTensor, settings: PretrainedConfig, file: Path) -> None:
    """Refuse a file whose factors of rotary frequencies aren't those of its model's config.

    Those of Llama 3 have the name `rope_freqs.weight`, and those of longrope `rope_factors_long.weight` and `short`.
    """
    found, rope = torch.from_numpy(np.array(factors.data, np.float32)), settings.rope_parameters
    part = re.fullmatch(r"rope_factors_(long|short)\.weight", factors.name)
    if part is None:
        same = factors.name == "rope_freqs.weight" and _same_factors(found, settings)
    else:
        own = torch.tensor(rope.get(f"{part[1]}_factor") or ())
        same = found.shape == own.shape and torch.allclose(found, own)
    if not same:
        raise UserError(
            f"{file}: it has factors of rotary frequencies, {factors.name}, and by its config.json these are "
            f"{settings.rope_parameters}; replace the config.json next to it by that of the model that it was made from"
        )


def check_metadata(reader: GGUFReader, architecture: str, settings: PretrainedConfig, file: Path) -> None:
    """Refuse metadata of an architecture that say something else than the config that is computed with."""
    layers = settings.num_hidden_layers
    expected = dict(_expected(architecture, settings))
    expected["block_count"] = (layers, layers + predicted_layers(reader, architecture))
    for name in reader.fields:
        key, value = name.removeprefix(f"{architecture}."), metadata(reader, name)
        wanted = expected.get(key, ())
        not_set = value in (None, False, "", 0) and not any(each is True for each in wanted)
        if key == name or key in _NOTES or not_set:
            continue
        if not any(_same(value, each) for each in wanted):
            says = f"and by its config it is {' or '.join(map(str, wanted))}" if wanted else "which nothing here reads"
            raise UserError(
                f"{file}: its metadata have {name}: {value}, {says}; put the config.json of the model that it was made "
                f"from next to it, in {file.parent}, or use another file"
            )


def _same(one: Any, other: Any) -> bool:
    """Whether values are equal, numbers as float32."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-6) if numbers else bool(one == other)


def _expected(architecture: str, settings: PretrainedConfig) -> Mapping[str, tuple[object, ...]]:
    """Return the values that metadata of an architecture may have, by key, for a model that has a config."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def of(*names: str) -> tuple[object, ...]:
        return tuple(getattr(settings, name) for name in names if getattr(settings, name, None) is not None)[:1]

    whole = settings.rope_parameters
    rope, local = whole.get("full_attention", whole), whole.get("sliding_attention", {})
    kind = rope.get("rope_type", "default")
    factor = 1.0 if kind != "longrope" else ROPE_INIT_FUNCTIONS[kind](settings, torch.device("cpu"))[1]
    head = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    # llama.cpp spells the scaling of Llama 3 as factors in a tensor.
    scaled = kind not in ("default", "llama3")
    keys = _FIELDS | _QWEN | {"attention.clamp_kqv": "clip_qkv"}
    return {key: of(name) for key, name in keys.items()} | {
        "expert_count": of("num_experts", "num_local_experts"),
        "expert_feed_forward_length": of("moe_intermediate_size", "intermediate_size"),
        **dict.fromkeys(("attention.key_length", "attention.value_length"), (head,)),
        "rope.dimension_count": (int(head * rope.get("partial_rotary_factor", 1.0)),),
        "rope.freq_base": (rope["rope_theta"],),
        "rope.freq_base_swa": (local.get("rope_theta"),),
        "rope.scaling.type": (kind,) if scaled else ("none", "linear"),
        **dict.fromkeys(("rope.scaling.factor", "rope.scale_linear"), (rope.get("factor"),) if scaled else (1.0,)),
        "rope.scaling.original_context_length": (
            rope.get("original_max_position_embeddings") or settings.max_position_embeddings,
            settings.max_position_embeddings,
            *of("original_max_position_embeddings"),
        ),
        "rope.scaling.attn_factor": (factor,),
        "rope.scaling.yarn_attn_factor": (1.0,),
        "rope.scaling.yarn_ext_factor": (1.0, -1.0),
        "rope.scaling.yarn_beta_fast": (rope.get("beta_fast") or 32.0,),
        "rope.scaling.yarn_beta_slow": (rope.get("beta_slow") or 1.0,),
        "attention.sliding_window": of("sliding_window"),
        "attention.layer_norm_epsilon": of("norm_epsilon"),
        **{key: of(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")},
        "attention.sliding_window_pattern": (2,) if architecture == "gpt-oss" else (),
        "attention.causal": (True,),
        "expert_weights_norm": (bool(getattr(settings, "norm_topk_prob", True)),),
        # 1 is a softmax over all experts, 3 one over those that are chosen.
        "expert_gating_func": (3,) if architecture == "gpt-oss" else (1,),
        **dict.fromkeys(("expert_weights_scale", "logit_scale", "residual_scale", "embedding_scale"), (1.0,)),
        **dict.fromkeys(("expert_group_count", "expert_group_used_count"), (1,)),
        **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"), of("swiglu_limit")),
    }


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Make the tokenizer that a file's metadata describe.

    Raises:
        UserError: They have something that `transformers` doesn't read or reads otherwise than llama.cpp.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits
    from tokenizers.pre_tokenizers import Sequence as PreTokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    reader, *_ = open_parts(file).values()
    beside, stem, template = (
        f"put the tokenizer.json of the model next to it, in {file.parent}",
        "tokenizer.",
        "chat_template.",
    )
    found = {name.removeprefix(stem): metadata(reader, name) for name in reader.fields if name.startswith(stem)}
    named = {key.removeprefix(template): found.pop(key) for key in list(found) if key.startswith(template)}
    check_settings(found, TOKENIZER_SETTINGS, f"{file}: its tokenizer")
    kind, pre = found.get("ggml.model"), found.get("ggml.pre", "default")
    blank = found.get("ggml.add_space_prefix", kind == "llama")
    if kind == "gpt2" and pre not in (*GGUF_PRE_TOKENIZER_SPLITS, *_BYTE_LEVEL, *_DIGITS_APART):
        raise UserError(
            f"{file}: its tokenizer has ggml.pre: {pre!r}, a way to divide texts that isn't known; {beside}"
        )
    if blank != (kind == "llama"):
        raise UserError(
            f"{file}: its tokenizer has ggml.add_space_prefix: {blank}, unlike others of its kind; {beside}"
        )
    # `AutoTokenizer` would read the file's config first, which `transformers` can for few architectures.
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    if kind == "gpt2" and pre in _DIGITS_APART:
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizers(steps)
    if named:
        tokenizer.chat_template = {**({"default": found["chat_template"]} if "chat_template" in found else {}), **named}
    if found.get("ggml.add_bos_token", kind == "llama" or pre in _WITH_BOS):
        tokenizer.add_bos_token = True
    return tokenizer


def predicted_layers(reader: GGUFReader, architecture: str) -> int:
    """Return the number of layers for multi-token prediction, which follow those of the decoder."""
    return int(metadata(reader, f"{architecture}.{_PREDICTED}") or 0)


def is_dense_file(reader: GGUFReader, architecture: str) -> bool:
    """Whether metadata of an architecture are of a dense model."""
    return not metadata(reader, f"{architecture}.expert_count")


def _shortest(value: object) -> object:
    """Return the shortest decimal that is the same float32: 1e-5 and not 9.99999975e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
