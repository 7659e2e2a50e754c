"""Tokenises the prompts and answers of splits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.fitness.kinds import FITNESSES
from moevolve.evaluators.types import PreparedSplit, meeting
from moevolve.workers.contract.edits import Tokens
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.engine.chat import chat_template

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenizedSplit:
    """The token ids of a split, in the order of its examples.

    Attributes:
        prompts: Non-empty, truncated prompts with system prompt, shots, beginning-of-sequence token and the text of the
            chat template. For running text these are its windows, whatever the number of examples.
        golds: Tokens of the first reference as the continuation of the prompt, without end token; empty for examples
            without references.
        choices: Tokens of every choice as the continuation of the prompt.
        cut: Number of prompts that were cut for the model's context.
    """

    prompts: tuple[Tokens, ...]
    golds: tuple[Tokens, ...]
    choices: tuple[tuple[Tokens, ...], ...]
    cut: int = 0


@dataclass(frozen=True, slots=True)
class PromptTokenizer:
    """Tokenises prompts and answers.

    Attributes:
        tokenizer: The special tokens that it adds are kept, except for an end token after the prompt.
        config: Settings of truncation and chat template.
        context: The model's number of positions; None without a limit.
    """

    tokenizer: PreTrainedTokenizerBase
    config: EngineConfig
    context: int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EngineConfig) -> PromptTokenizer:
        """Make one for a model's number of positions."""
        return cls(tokenizer, config, context_of(model.config))

    def split(self, split: PreparedSplit) -> TokenizedSplit:
        """Tokenise the prompts and answers of a split.

        The tokens of an answer are those of prompt + `answer_prefix` + answer after the tokens of the prompt. Blanks
        at the end of a text belong to the answer, and stand once (`meeting`). If the tokenizer merges text across that
        boundary, so that the prompt's tokens change, the answer is tokenised separately.
        Truncation comes last (`truncate`): to `max_prompt_tokens`, and to what the model's context has room
        for beside the answer.

        With a chat template the prompt is the conversation as `apply_chat_template` renders it, followed by the text
        that the template puts before answers (see `ChatTemplate`). It contains all special tokens, so none are added,
        nor to prompts that have been rendered. What the tokenizer adds to other texts is its own matter.

        Raises:
            UserError: A prompt has no tokens, an answer doesn't fit into the model's context, the running text
                is too short for its windows, or the chat template is unknown or refuses a prompt.
        """
        if split.window is not None:
            windows = self._windows(split, split.window)
            return TokenizedSplit(windows, ((),) * len(windows), ((),) * len(windows))
        texts, continued, special = self._texts(split)
        prompts = self._encode(texts, special)
        joined = self._encode([texts[i] + continuation for (i, _), continuation in continued.items()], special)
        answers: dict[tuple[int, str], Tokens] = {}
        for (i, answer), whole in zip(continued, joined, strict=True):
            head = len(prompts[i])
            if whole[:head] == prompts[i] and len(whole) > head:
                answers[i, answer] = whole[head:]
            else:
                answers[i, answer] = self.text(continued[i, answer], special=False)
        examples = split.examples
        golds = tuple(answers[i, e.references[0]] if e.references else () for i, e in enumerate(examples))
        choices = tuple(tuple(answers[i, choice] for choice in e.choices) for i, e in enumerate(examples))
        prompts = [self.truncated(tokens) for tokens in prompts]
        for i, tokens in enumerate(prompts):
            if not tokens:
                where = f"task {split.task}, split {split.split}, example {i}"
                raise UserError(f"{where}: the prompt has no tokens; give it some text")
        if self.context is None:
            return TokenizedSplit(tuple(prompts), golds, choices)
        fitting = []
        for i, (prompt, gold, offered) in enumerate(zip(prompts, golds, choices, strict=True)):
            room = self._room(i, max(len(gold), *map(len, offered), 0), split, self.context)
            fitting.append(truncate(prompt, room, self.tokenizer.bos_token_id))
        cut = sum(len(now) < len(before) for now, before in zip(fitting, prompts, strict=True))
        return TokenizedSplit(tuple(fitting), golds, choices, cut)

    def _texts(self, split: PreparedSplit) -> tuple[list[str], dict[tuple[int, str], str], bool]:
        """Return the prompts, the continuation of each with each answer, and whether special tokens are added."""
        template = chat_template(self.tokenizer, self.config) if split.chat is True else None
        if template is not None:
            rendered = [template.prompt(split.turns(example), split.thinks) for example in split.examples]
            texts = [each.text for each in rendered]
            prefixes = [each.spaces + split.answer_prefix.lstrip() for each in rendered]
        else:
            texts = [split.text(example) for example in split.examples]
            prefixes = [split.answer_prefix] * len(texts)
        special = template is None and split.chat != "rendered"
        prompts, continued = list[str](), dict[tuple[int, str], str]()
        for i, (example, text, prefix) in enumerate(zip(split.examples, texts, prefixes, strict=True)):
            # What a template wrote ends as it says.
            bare, rest = meeting(text, prefix, "") if special else (text, prefix)
            answers = dict.fromkeys((*example.references[:1], *example.choices))
            continued |= {(i, answer): meeting("", rest, answer)[1] for answer in answers}
            prompts.append(bare if answers else text)
        return prompts, continued, special

    def text(self, text: str, special: bool = True) -> Tokens:
        """Tokenise one text without truncation; if `special`, with special tokens as at the beginning of a prompt."""
        (tokens,) = self._encode([text], special)
        return tokens

    def truncated(self, tokens: Tokens) -> Tokens:
        """Truncate a prompt to the configured length."""
        return truncate(tokens, self.config.max_prompt_tokens, self.tokenizer.bos_token_id)

    def _encode(self, texts: list[str], special: bool) -> list[Tokens]:
        if not texts:
            return []
        tokenizer = self.tokenizer
        if not special:
            return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        closes = list(tokenizer("")["input_ids"])[-1:] == [tokenizer.eos_token_id] != [tokenizer.bos_token_id]
        return [tuple(ids[:-1] if closes else ids) for ids in tokenizer(texts)["input_ids"]]

    def _room(self, index: int, answer: int, split: PreparedSplit, context: int) -> int:
        """Return the number of tokens that the model's context has for a prompt beside its answer of so many."""
        if answer >= context:
            raise UserError(
                f"task {split.task}, split {split.split}, example {index}: the answer's {answer} tokens leave no room "
                f"for a prompt in the model's context of {context}; leave the row out"
            )
        fitness = FITNESSES[split.fitness]
        if fitness.reads in ("generation", "harness") or (fitness.compares and split.positions == "greedy"):
            # Most generated answers end before their limit.
            answer = max(answer, min(split.max_new_tokens, context // 2))
        return context - answer

    def _windows(self, split: PreparedSplit, window: int) -> tuple[Tokens, ...]:
        """Cut a split's running text into windows of equal length, as in GPTQ (arXiv 2210.17323), SparseGPT and ToMoE.

        The text is tokenised as a whole, so only the first window has a beginning-of-sequence token. An incomplete
        window at the end is dropped.
        """
        where, most = f"task {split.task}, split {split.split}", self.config.max_prompt_tokens
        if most is not None and window > most:
            raise UserError(
                f"{where}: windows of {window} tokens are longer than engine.max_prompt_tokens, which is {most}; leave "
                "that out, or give the task a smaller window"
            )
        if self.context is not None and window > self.context:
            raise UserError(
                f"{where}: windows of {window} tokens are longer than the model's context of {self.context} positions; "
                f"give the task a `window` of {self.context} or less"
            )
        tokens = self.text(split.running_text)
        if len(tokens) < window:
            raise UserError(
                f"{where}: the text has {len(tokens)} tokens, fewer than a window of {window}; give the split more "
                "rows, or the task a smaller window"
            )
        return tuple(tokens[start : start + window] for start in range(0, len(tokens) - window + 1, window))


def context_of(settings: PretrainedConfig) -> int | None:
    """Return the number of positions that a model was made for, counting its rotary scaling; None for no limit."""
    text = settings.get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings")
    if positions is None or not factor:
        return positions
    # Some configs count the scaled positions, some those before the scaling.
    return max(positions, int(factor * (trained or positions)))


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: EngineConfig) -> frozenset[int]:
    """Return the tokens that end an answer: those of the generation config, else of the tokenizer.

    The special token that the chat template puts after an answer is one of them, too.
    """
    ends = getattr(model.generation_config, "eos_token_id", None)
    if ends is None:
        ends = tokenizer.eos_token_id
    found = {ends} if isinstance(ends, int) else set(ends or ())
    chat = chat_template(tokenizer, config)
    if chat is not None and (closing := chat.end_token()) is not None:
        found.add(closing)
    return frozenset(found)


def truncate(tokens: Tokens, limit: int | None, bos: int | None) -> Tokens:
    """Truncate to `limit` tokens by leaving out the beginning, except for a beginning-of-sequence token."""
    if limit is None or len(tokens) <= limit:
        return tokens
    head = tokens[: limit > 1 and tokens[0] == bos]
    return head + tokens[len(tokens) - limit + len(head) :]
