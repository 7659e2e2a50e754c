from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.batching import pad, plan_batches, tokenize_split, truncate
from moevolve.workers.config import EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def split_of(*examples: Example, prefix: str = " ") -> PreparedSplit:
    return PreparedSplit("words", "search", "generate", "accuracy", Matching(), 4, prefix, examples)


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """A copy that adds special tokens by itself."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5)), max_size=40),
    st.integers(1, 300),
)
def test_a_plan_runs_every_example_once_in_order_of_length_within_the_bound(
    sizes: list[tuple[int, int]], bound: int
) -> None:
    prompts, drafts = [p for p, _ in sizes], [d for _, d in sizes]
    batches = plan_batches(prompts, drafts, bound)
    flat = [i for batch in batches for i in batch]
    assert sorted(flat) == list(range(len(sizes)))
    assert [prompts[i] for i in flat] == sorted(prompts)
    for batch, following in zip(batches, [*batches, []][1:], strict=True):
        width = max(prompts[i] for i in batch) + max(drafts[i] for i in batch)
        assert len(batch) == 1 or len(batch) * width <= bound
        if following:  # the next example would not have fitted
            more = [*batch, following[0]]
            assert len(more) * (max(prompts[i] for i in more) + max(drafts[i] for i in more)) > bound


def test_equal_lengths_keep_the_order_of_examples() -> None:
    assert plan_batches([3, 2, 3, 2], [0, 0, 0, 0], 6) == [[1, 3], [0, 2]]


def test_padding_aligns_the_ends_of_prompts() -> None:
    columns = pad([(5, 6, 7), (8,)], [(), (9, 4)], torch.device("cpu"))
    assert columns.prompt_columns == 3
    assert columns.ids.tolist() == [[5, 6, 7, 0, 0], [0, 0, 8, 9, 4]]
    assert columns.mask.tolist() == [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]
    assert columns.positions.tolist() == [[0, 1, 2, 0, 0], [0, 0, 0, 1, 2]]


def test_truncation_keeps_head_and_tail() -> None:
    tokens = tuple(range(10))
    assert truncate(tokens, 5, 2) == (0, 1, 2, 8, 9)
    assert truncate(tokens, 5, 0) == (0, 1, 2, 3, 4)
    assert truncate(tokens, 10, 2) == tokens
    assert truncate(tokens, None, 2) == tokens


def test_answers_continue_the_whole_prompt_though_it_is_truncated(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    example = Example("w10 w11 w12 w13 w14 w15", ("w20 w21", "w22"), ("w20 w21", "w30"))
    config = EngineConfig(max_prompt_tokens=4, tail_tokens=2)
    tokenized = tokenize_split(tiny_tokenizer, split_of(example), config, bos=1)
    assert tokenized.prompts == ((1, 10, 14, 15),)
    assert tokenized.golds == ((20, 21),)
    assert tokenized.choices == (((20, 21), (30,)),)


@pytest.mark.parametrize(
    ("template", "bos", "prompt"), [("$A", None, (10, 11)), ("<s> $A", 1, (1, 10, 11)), ("<s> $A </s>", 1, (1, 10, 11))]
)
def test_special_tokens_open_a_prompt_once_and_never_close_it(
    tiny_tokenizer: PreTrainedTokenizerFast, template: str, bos: int | None, prompt: tuple[int, ...]
) -> None:
    tokenizer = with_template(tiny_tokenizer, template)
    tokenized = tokenize_split(tokenizer, split_of(Example("w10 w11", ("w20",))), EngineConfig(), bos)
    assert tokenized.prompts == (prompt,)
    assert tokenized.golds == ((20,),)


def test_an_answer_that_merges_with_the_prompt_is_tokenised_alone(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    # Without a space between them the prompt's last word and the answer are one word: w1 + w20.
    tokenized = tokenize_split(tiny_tokenizer, split_of(Example("w10 w11", ("w20",)), prefix=""), EngineConfig())
    assert tokenized.prompts == ((10, 11),)
    assert tokenized.golds == ((20,),)


def test_examples_without_references_or_choices_have_no_answer_tokens(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    tokenized = tokenize_split(tiny_tokenizer, split_of(Example("w10", ())), EngineConfig())
    assert (tokenized.golds, tokenized.choices) == (((),), ((),))


def test_an_empty_prompt_without_opening_token_names_the_example(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    split = split_of(Example("w10", ("w20",)), Example("", ("w20",)))
    assert tokenize_split(tiny_tokenizer, split, EngineConfig(), bos=1).prompts[1] == (1,)
    with pytest.raises(UserError, match="task words, split search, example 1: the prompt has no tokens"):
        tokenize_split(tiny_tokenizer, split, EngineConfig())


@pytest.mark.parametrize("tail", [-1, 8, 9])
def test_a_tail_that_leaves_no_head_is_refused(tiny_tokenizer: PreTrainedTokenizerFast, tail: int) -> None:
    config = EngineConfig(max_prompt_tokens=8, tail_tokens=tail)
    with pytest.raises(UserError, match=rf"engine\.tail_tokens is {tail}"):
        tokenize_split(tiny_tokenizer, split_of(Example("w10", ("w20",))), config)
