"""The tokenizer of a Hugging Face checkpoint as metadata of a GGUF file: tokens, their types, and merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moevolve.evaluators.errors import UserError
from moevolve.workers.checkpoints.files import read_json

if TYPE_CHECKING:
    from gguf import GGUFWriter

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens; source: `TokenType` in gguf-py/gguf/constants.py of llama.cpp."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    ("words",): "gpt-2",
    ("digits", "words"): "smollm",
    (rf"{_WORDS}|\p{{N}}|{_OTHERS}",): "qwen2",
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}",): "llama-bpe",
}
"""Names in GGUF of how texts are divided before their bytes are merged, by the steps in tokenizer.json.

Source: the regular expressions of src/llama-vocab.cpp of llama.cpp.
"""


@dataclass(frozen=True)
class GgufVocabulary:
    """A vocabulary as GGUF has it.

    Attributes:
        model: `gpt2` for merges of bytes, `llama` for SentencePiece's merges of characters with bytes to fall back to.
        divided: Name of how texts are divided before.
        tokens, types: Text and type by id.
        scores: Scores by id, the higher the sooner merged; empty for `gpt2`, which has the merges themselves.
        begins: Whether a blank is put before a text.
    """

    model: str
    divided: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    begins: bool


def gguf_vocabulary(file: Path, size: int) -> GgufVocabulary:
    """Read a tokenizer.json; ids up to the `size` of the embedding that have no token get an unused one.

    Raises:
        UserError: It is of a kind that GGUF has no place or no name for.
    """
    if not file.is_file():
        raise UserError(f"{file}: there is no such file, and GGUF is written with the tokenizer of a tokenizer.json")
    content = read_json(file)
    model = content["model"]
    steps = _steps(content.get("pre_tokenizer"))
    fallback = bool(model.get("byte_fallback"))
    divided = "default" if fallback and not steps else _SPLITS.get(steps)
    if model["type"] != "BPE" or divided is None:
        raise UserError(f"{file}: GGUF has no name for a {model['type']} tokenizer that divides texts like this one")
    tokens, types = [f"[PAD{index}]" for index in range(size)], [_UNUSED] * size
    for token, index in model["vocab"].items():
        is_byte = fallback and len(token) == 6 and token.startswith("<0x")
        tokens[index] = token
        types[index] = _BYTE if is_byte else _UNKNOWN if token == model.get("unk_token") else _NORMAL
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        if types[added["id"]] != _UNKNOWN:
            types[added["id"]] = _CONTROL if added["special"] else _USER
    begins = any(each.get("type") == "Prepend" for each in _parts(content.get("normalizer"), "normalizers"))
    scores = _scores(model, tokens) if divided == "default" else []
    return GgufVocabulary("llama" if scores else "gpt2", divided, tokens, types, scores, begins)


def add_tokenizer(writer: GGUFWriter, folder: Path, size: int) -> None:
    """Add the tokenizer in a folder, with its special tokens and chat template, to the metadata of a file."""
    from gguf import SpecialVocab

    found = gguf_vocabulary(folder / "tokenizer.json", size)
    writer.add_tokenizer_model(found.model)
    writer.add_tokenizer_pre(found.divided)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.types)
    if found.scores:
        writer.add_token_scores(found.scores)
        writer.add_add_space_prefix(found.begins)
    SpecialVocab(folder, load_merges=not found.scores, n_vocab=size).add_to_gguf(writer, quiet=True)


def _steps(divider: Mapping[str, Any] | None) -> tuple[str, ...]:
    """What divides texts, in order: `digits`, `words` for GPT-2's expression, others as they are."""
    steps = []
    for part in _parts(divider, "pretokenizers"):
        match part:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
                steps += ["words"] if use_regex else []
            case {"type": "Digits", "individual_digits": True}:
                steps.append("digits")
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                steps.append(pattern)
            case _:
                steps.append(part["type"])
    return tuple(steps)


def _parts(whole: Mapping[str, Any] | None, name: str) -> list[Any]:
    if whole is None:
        return []
    return list(whole[name]) if whole["type"] == "Sequence" else [whole]


def _scores(model: Mapping[str, Any], tokens: Sequence[str]) -> list[float]:
    """Minus the place of the first merge that makes a token; 0 for those that none makes."""
    places: dict[str, float] = {}
    for place, merge in enumerate(model["merges"]):
        one, other = merge.split(" ") if isinstance(merge, str) else merge
        places.setdefault(one + other, -float(place))
    return [places.get(token, 0.0) for token in tokens]
