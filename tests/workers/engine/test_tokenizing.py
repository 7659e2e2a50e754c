from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from published_templates import bytewise_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.contract.settings import EngineConfig
from moevolve.workers.engine.tokenizing import PromptTokenizer, context_of, truncate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def split_of(*examples: Example, prefix: str = " ") -> PreparedSplit:
    return PreparedSplit("words", "search", "generate", "accuracy", Matching(), 4, prefix, examples)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """A copy of a tokenizer that adds special tokens."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_truncation_keeps_the_end_and_the_opening_token() -> None:
    tokens = tuple(range(10))
    assert truncate(tokens, 5, 0) == (0, 6, 7, 8, 9)
    assert truncate(tokens, 5, 3) == (5, 6, 7, 8, 9)
    assert truncate(tokens, 1, 0) == (9,)
    assert truncate(tokens, 10, 0) == truncate(tokens, None, 0) == tokens


def test_answers_continue_the_whole_prompt_though_it_is_truncated(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    example = Example("w10 w11 w12 w13 w14 w15", ("w20 w21", "w22"), ("w20 w21", "w30"))
    config = EngineConfig(max_prompt_tokens=4)
    tokenized = PromptTokenizer(tiny_tokenizer, config).split(split_of(example))
    assert tokenized.prompts == ((1, 13, 14, 15),)
    assert tokenized.golds == ((20, 21),)
    assert tokenized.choices == (((20, 21), (30,)),)


@pytest.mark.parametrize(
    ("template", "prompt"), [("$A", (10, 11)), ("<s> $A", (1, 10, 11)), ("<s> $A </s>", (1, 10, 11))]
)
def test_the_tokenizer_says_what_opens_a_text_and_nothing_closes_it(
    tiny_tokenizer: PreTrainedTokenizerFast, template: str, prompt: tuple[int, ...]
) -> None:
    tokenizer = with_template(tiny_tokenizer, template)
    tokenized = PromptTokenizer(tokenizer, EngineConfig()).split(split_of(Example("w10 w11", ("w20",))))
    assert tokenized.prompts == (prompt,)
    assert tokenized.golds == ((20,),)


def test_an_answer_that_merges_with_the_prompt_is_tokenised_alone(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    # Without a space between them the prompt's last word and the answer are one word: w1 + w20.
    tokenized = PromptTokenizer(tiny_tokenizer, EngineConfig()).split(split_of(Example("w10 w11", ("w20",)), prefix=""))
    assert tokenized.prompts == ((1, 10, 11),)
    assert tokenized.golds == ((20,),)


@pytest.mark.parametrize(
    ("prompt", "prefix", "answer", "text"),
    [
        ("A:", " ", "4", "A: 4"),
        ("A: ", " ", "4", "A: 4"),
        ("A:", " ", " 4", "A: 4"),
        ("A: ", "", " 4", "A: 4"),
        ("A:\n", " ", "4", "A:\n4"),
        ("A:", " ", "\n4", "A:\n4"),
        ("def f():\n", " ", "    pass", "def f():\n    pass"),
        ("def f():\n    ", " ", "pass", "def f():\n    pass"),
        ("A", "\nAnswer: ", "4", "A\nAnswer: 4"),
    ],
)
def test_a_blank_between_prompt_and_answer_stands_once(prompt: str, prefix: str, answer: str, text: str) -> None:
    """The tokens are those of the text, and the blank belongs to the answer, as tokenizers have it."""
    tokenizer, example = bytewise_tokenizer(), Example(prompt, (answer,))
    tokenized = PromptTokenizer(tokenizer, EngineConfig()).split(split_of(example, prefix=prefix))
    assert tokenized.prompts[0] + tokenized.golds[0] == tuple(tokenizer(text)["input_ids"])
    assert tokenizer.decode(tokenized.prompts[0]) == f"<s>{prompt.rstrip(' ')}"
    shown = split_of(Example("B", ("5",), shots=((prompt, answer),)), prefix=prefix)
    assert shown.text(shown.examples[0]) == f"{text}\n\nB"


def test_examples_without_references_or_choices_have_no_answer_tokens(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenized = PromptTokenizer(tiny_tokenizer, EngineConfig()).split(split_of(Example("w10", ())))
    assert (tokenized.golds, tokenized.choices) == (((),), ((),))


def test_an_empty_prompt_without_opening_token_names_the_example(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    split = split_of(Example("w10", ("w20",)), Example("", ("w20",)))
    assert PromptTokenizer(tiny_tokenizer, EngineConfig()).split(split).prompts[1] == (1,)
    with pytest.raises(UserError, match="task words, split search, example 1: the prompt has no tokens"):
        PromptTokenizer(with_template(tiny_tokenizer, "$A"), EngineConfig()).split(split)


LONG = Example("w10 w11 w12 w13 w14 w15", ("w20 w21",))


def test_a_prompt_beyond_the_context_loses_its_beginning_and_never_its_answer(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    split = replace(split_of(LONG, Example("w10", ("w20",))), fitness="rank")
    tokenized = PromptTokenizer(tiny_tokenizer, EngineConfig(), context=6).split(split)
    assert (tokenized.prompts, tokenized.golds) == (((1, 13, 14, 15), (1, 10)), ((20, 21), (20,)))
    assert tokenized.cut == 1
    generated = PromptTokenizer(tiny_tokenizer, EngineConfig(), context=8).split(split_of(LONG))
    assert generated.prompts == ((1, 13, 14, 15),), "room for the answer that is generated"
    assert PromptTokenizer(tiny_tokenizer, EngineConfig(), context=9).split(split).cut == 0


def test_an_answer_beyond_the_context_is_refused_by_number(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    split = replace(split_of(Example("w10", ()), LONG), fitness="rank")
    with pytest.raises(UserError, match="task words, split search, example 1: the answer's 2 tokens leave no room"):
        PromptTokenizer(tiny_tokenizer, EngineConfig(), context=2).split(split)


@pytest.mark.parametrize(
    ("settings", "positions"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 256),
        (
            {
                "max_position_embeddings": 256,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
            256,
        ),
    ],
)
def test_scaled_positions_count(settings: dict[str, Any], positions: int) -> None:
    from transformers import MixtralConfig

    assert context_of(MixtralConfig(**settings)) == positions
