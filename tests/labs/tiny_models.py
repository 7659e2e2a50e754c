"""Tiny random checkpoints and tokenizers with one token per word."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = ("red", "blue", "green", "cat", "dog", "bird", "is", "the", "a", "which", "Answer", ":", "A", "B", "C", "D")
"""The vocabulary of the tiny searches."""
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""Tokens 0 to 3 of every tokenizer."""
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
}
MIXTRAL: dict[str, Any] = {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}


def word_tokenizer(words: Sequence[str], spaces_only: bool = False) -> PreTrainedTokenizerFast:
    """Words are tokens 4, 5, ...; token 1 is put before a text, as Llama's tokenizer does.

    Args:
        words: Vocabulary without the special tokens.
        spaces_only: Split texts only at spaces, not between words and punctuation, and decode them to the same text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([*SPECIAL.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit() if spaces_only else pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if spaces_only:
        tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def save_tiny_model(directory: Path, model_type: str, words: Sequence[str], seed: int, **settings: Any) -> None:
    """Saves a random model of the smallest sizes with the tokenizer of `words`.

    Args:
        directory: Folder of the checkpoint.
        model_type: Model type of transformers, such as `mixtral`.
        words: Vocabulary without the special tokens.
        seed: Seed of the weights.
        settings: Settings of the model's config, instead of `SIZES`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = word_tokenizer(words)
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **(SIZES | TOKEN_IDS | settings))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def words(ids: list[int]) -> str:
    """Decode tokens of the tokenizer of `w4`, `w5` and so on, without special ones."""
    return " ".join(f"w{i}" for i in ids if i > 3)
