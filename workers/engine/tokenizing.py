"""Prompts and answers as tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import PreparedSplit
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.engine.chat import chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenizedSplit:
    """A split as token ids, in the order of its examples.

    Attributes:
        prompts: with system prompt and shots, the beginning-of-sequence token, and under a chat template what that
            writes around them; truncated, never empty. Of running text its windows, however many examples there are.
        golds: tokens of the first reference as it continues the prompt, without end token; empty without references.
            Under a chat template marks that come before every answer are in the prompt already.
        choices: likewise for every choice.
    """

    prompts: tuple[Tokens, ...]
    golds: tuple[Tokens, ...]
    choices: tuple[tuple[Tokens, ...], ...]


def tokenize_split(
    tokenizer: PreTrainedTokenizerBase, split: PreparedSplit, config: EngineConfig, bos: int | None = None
) -> TokenizedSplit:
    """Tokenise a split's prompts and answers.

    An answer's tokens are those by which prompt + `answer_prefix` + answer goes on after the prompt's own tokens. Where
    the tokenizer merges across that border, so that the prompt's tokens change, the answer is tokenised by itself.
    Both are settled before truncation.

    Under a chat template the prompt is what `apply_chat_template` of the tokenizer makes of the conversation, token by
    token, and what the template puts before an answer (see `ChatTemplate`): the template writes all special tokens, so
    none are added. The answer follows as the template has it.

    Args:
        tokenizer: its own special tokens are kept, but for an end token, which would close the prompt.
        split: what to tokenise.
        config: truncation and chat template.
        bos: token to begin every prompt with where the tokenizer doesn't put it there itself; not under a template.

    Raises:
        UserError: a prompt has no tokens, or the chat template is unknown or refuses a prompt.
    """
    if split.window is not None:
        windows = cut_windows(tokenizer, split, split.window, config, bos)
        return TokenizedSplit(windows, ((),) * len(windows), ((),) * len(windows))
    template = chat_template(tokenizer, config) if split.chat else None
    special = template is None
    if template is None:
        texts = [split.text(example) for example in split.examples]
        prefixes = [split.answer_prefix] * len(texts)
    else:
        bos, asked = None, [template.asked(split.turns(example)) for example in split.examples]
        texts = [each.prompt for each in asked]
        prefixes = [each.spaces + split.answer_prefix.lstrip() for each in asked]
    prompts = _encode(tokenizer, texts, special)
    pairs = [
        (i, answer)
        for i, example in enumerate(split.examples)
        for answer in dict.fromkeys((*example.references[:1], *example.choices))
    ]
    joined = _encode(tokenizer, [texts[i] + prefixes[i] + answer for i, answer in pairs], special)
    answers: dict[tuple[int, str], Tokens] = {}
    for (i, answer), whole in zip(pairs, joined, strict=True):
        head = len(prompts[i])
        if whole[:head] == prompts[i] and len(whole) > head:
            answers[i, answer] = whole[head:]
        else:
            alone = tokenizer(prefixes[i] + answer, add_special_tokens=False)["input_ids"]
            answers[i, answer] = tuple(alone)
    examples = split.examples
    return TokenizedSplit(
        prompts=tuple(_fit(tokens, i, split, bos, config) for i, tokens in enumerate(prompts)),
        golds=tuple(answers[i, e.references[0]] if e.references else () for i, e in enumerate(examples)),
        choices=tuple(tuple(answers[i, choice] for choice in e.choices) for i, e in enumerate(examples)),
    )


def cut_windows(
    tokenizer: PreTrainedTokenizerBase, split: PreparedSplit, window: int, config: EngineConfig, bos: int | None
) -> tuple[Tokens, ...]:
    """A split's running text in windows of equally many tokens, as GPTQ (arXiv 2210.17323), SparseGPT and ToMoE do.

    The text is tokenised as a whole, so a beginning-of-sequence token stands in the first window only. What is left at
    the end, shorter than a window, is dropped.

    Args:
        tokenizer: the model's.
        split: whose examples.
        window: tokens of a window.
        config: truncation.
        bos: see `tokenize_split`.

    Raises:
        UserError: the text is shorter than a window, or windows would be truncated.
    """
    where = f"task {split.task}, split {split.split}"
    if config.max_prompt_tokens is not None and window > config.max_prompt_tokens:
        raise UserError(
            f"{where}: windows of {window} tokens are longer than engine.max_prompt_tokens, which is "
            f"{config.max_prompt_tokens}; leave that out, or give the task a smaller window"
        )
    tokens = encode_text(tokenizer, split.running_text, bos, special=True)
    if len(tokens) < window:
        raise UserError(
            f"{where}: the text has {len(tokens)} tokens, fewer than a window of {window}; give the split more rows, "
            "or the task a smaller window"
        )
    return tuple(tokens[start : start + window] for start in range(0, len(tokens) - window + 1, window))


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, bos: int | None, special: bool) -> Tokens:
    """Token ids of one text, not truncated.

    Args:
        tokenizer: the model's.
        text: what to tokenise.
        bos: token to begin with where the tokenizer doesn't put it there itself.
        special: whether there are special tokens, as at the beginning of a prompt.
    """
    if not special:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return _opened(_encode(tokenizer, [text], special=True)[0], bos)


def missing_bos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token to begin prompts with where the tokenizer doesn't add it.

    A checkpoint whose config names a beginning-of-sequence token, which is its tokenizer's too and isn't the end token,
    was trained with it, whether or not the tokenizer's template adds it. Elsewhere the tokenizer's word stands.
    """
    bos: int | None = tokenizer.bos_token_id
    return bos if bos == getattr(model.config, "bos_token_id", None) and bos != tokenizer.eos_token_id else None


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EngineConfig) -> frozenset[int]:
    """Tokens that end an answer: those of the generation config, as `generate` has it, else the tokenizer's.

    So does the special token that the chat template closes an answer with.

    Raises:
        UserError: there is no such chat template.
    """
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    found = {ends} if isinstance(ends, int) else set(ends or ())
    chat = chat_template(tokenizer, config)
    closing = None if chat is None else chat.end_token()
    return frozenset(found if closing is None else found | {closing})


def truncate(tokens: Tokens, limit: int | None, tail: int) -> Tokens:
    """Keep the head and the last `tail` of more than `limit` tokens."""
    if limit is None or len(tokens) <= limit:
        return tokens
    return tokens[: limit - tail] + tokens[len(tokens) - tail :]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool) -> list[Tokens]:
    """Tokens, with the tokenizer's own `special` tokens if wanted, but for a closing end token."""
    if not texts:
        return []
    if not special:
        return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    closes = list(tokenizer("")["input_ids"])[-1:] == [tokenizer.eos_token_id] != [tokenizer.bos_token_id]
    encoded = tokenizer(texts)["input_ids"]
    return [tuple(ids[:-1] if closes else ids) for ids in encoded]


def _opened(tokens: Tokens, bos: int | None) -> Tokens:
    return (bos, *tokens) if bos is not None and tokens[:1] != (bos,) else tokens


def _fit(tokens: Tokens, index: int, split: PreparedSplit, bos: int | None, config: EngineConfig) -> Tokens:
    tokens = _opened(tokens, bos)
    if not tokens:
        raise UserError(
            f"task {split.task}, split {split.split}, example {index}: the prompt has no tokens; give it some text"
        )
    return truncate(tokens, config.max_prompt_tokens, config.tail_tokens)
