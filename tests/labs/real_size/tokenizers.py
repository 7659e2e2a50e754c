"""Tokenizers of published sizes, trained on the spot, with special tokens where the published ones have theirs.

Words are learnt from the reference text that comes with Python. What the vocabulary has beyond is filled with tokens
that no text contains.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from published_templates import DEEPSEEK_V3, GLM, GPT_OSS, MIXTRAL, QWEN, QWEN3

_LEARNT = 6000
_QWEN_TOKENS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
_FORMS: dict[str, tuple[dict[str, int], dict[str, str], str | None]] = {
    "mixtral": ({"<unk>": 0, "<s>": 1, "</s>": 2}, {"bos": "<s>", "eos": "</s>"}, MIXTRAL),
    "qwen2_moe": (_QWEN_TOKENS, {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}, QWEN),
    "qwen3_moe": (
        _QWEN_TOKENS | {"<think>": 151667, "</think>": 151668},
        {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
        QWEN3,
    ),
    "olmoe": ({"<|padding|>": 1, "<|endoftext|>": 50279}, {"eos": "<|endoftext|>", "pad": "<|padding|>"}, None),
    "deepseek_v2": (
        {"<｜begin▁of▁sentence｜>": 100000, "<｜end▁of▁sentence｜>": 100001},
        {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>"},
        None,
    ),
    "deepseek_v3": (
        {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜User｜>": 128803, "<｜Assistant｜>": 128804},
        {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>"},
        DEEPSEEK_V3,
    ),
    "deepseek_v4": (
        {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1},
        {"bos": "<｜begin▁of▁sentence｜>"},
        None,
    ),
    "glm4_moe": (
        {
            "<|endoftext|>": 151329,
            "[gMASK]": 151331,
            "<sop>": 151333,
            "<|user|>": 151336,
            "<|assistant|>": 151337,
            "<|observation|>": 151338,
            "<think>": 151350,
            "</think>": 151351,
        },
        {"eos": "<|endoftext|>", "pad": "<|endoftext|>"},
        GLM,
    ),
    "gpt_oss": (
        {
            "<|startoftext|>": 199998,
            "<|endoftext|>": 199999,
            "<|return|>": 200002,
            "<|channel|>": 200005,
            "<|start|>": 200006,
            "<|end|>": 200007,
            "<|message|>": 200008,
        },
        {"bos": "<|startoftext|>", "eos": "<|return|>", "pad": "<|endoftext|>"},
        GPT_OSS,
    ),
    "llama": (
        {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001},
        {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"},
        None,
    ),
    "opt": ({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}, {"bos": "</s>", "eos": "</s>", "pad": "<pad>"}, None),
}
"""By model type: special tokens and their ids, which of them do what, and the chat template."""


def write_tokenizer(name: str, config: dict[str, Any], directory: Path) -> None:
    """Write the files of a tokenizer for a config of the lab."""
    special, roles, template = _FORMS[config["model_type"]]
    special = {token: place % config["vocab_size"] for token, place in special.items()}
    learnt, merges = _words()
    free = iter(sorted(set(range(config["vocab_size"])) - set(special.values())))
    vocabulary = {word: next(free) for word in learnt} | special
    vocabulary |= {f"<|unused_{number}|>": number for number in free}
    tokenizer = json.loads(_trained())
    tokenizer["model"] |= {"vocab": vocabulary, "merges": merges}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] = [{"id": place, "content": token} | flags for token, place in special.items()]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {f"{role}_token": token for role, token in roles.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    if template is not None and not name.startswith(("qwen2-57b",)):
        (directory / "chat_template.jinja").write_text(template)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    (directory / "generation_config.json").write_text(json.dumps(generation))


@cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_LEARNT, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(topics.values(), trainer)
    text: str = tokenizer.to_str()
    return text


def _words() -> tuple[list[str], list[Any]]:
    """What was learnt: tokens in order of their ids, and merges."""
    model = json.loads(_trained())["model"]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), model["merges"]
