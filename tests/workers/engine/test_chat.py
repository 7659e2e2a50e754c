from __future__ import annotations

import datetime as dt
import resource
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from published_templates import CASES, GPT_OSS, LLAMA, bytewise_tokenizer

from moevolve.evaluators.errors import UserError
from moevolve.evaluators.types import Example, Matching, PreparedSplit
from moevolve.workers.contract.settings import PACKAGED_TEMPLATES, EngineConfig, ModelConfig, engine_fingerprint
from moevolve.workers.engine.chat import chat_template
from moevolve.workers.engine.tokenizing import PromptTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


# Ways of writing conversations that there are: marks of their own with a system role, none with roles that must
# alternate, and two with a block of thoughts before the answer, one of which can be switched off.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %} [INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
DROPPING = (
    "{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}: "
    "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think></think>' if enable_thinking is false }}{% endif %}"
)


@pytest.fixture(scope="module")
def bytewise() -> PreTrainedTokenizerFast:
    return bytewise_tokenizer()


def talking(tokenizer: PreTrainedTokenizerFast, template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    """The tokenizer with a chat template."""
    from copy import deepcopy

    copy = deepcopy(tokenizer)
    copy.chat_template = template
    return copy


SPLIT = PreparedSplit(
    *("words", "search", "generate", "accuracy", Matching(), 4, " "),
    (
        Example("2+2?", ("4", "four"), ("4", "5"), (("1+1?", "2"), ("0+1?", "1"))),
        Example("3+3?", ("6",), (), (("1+1?", "2"), ("0+1?", "1"))),
    ),
    system="Be brief.",
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "0+1?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "2+2?"},
]
MERGED = [{"role": "user", "content": "Be brief.\n\n1+1?"}, *CONVERSATION[2:]]


def test_without_a_template_shots_are_text(bytewise: PreTrainedTokenizerFast) -> None:
    for split, name in ((SPLIT, "auto"), (SPLIT, "none"), (replace(SPLIT, chat=False), "mixtral")):
        tokenized = PromptTokenizer(bytewise, EngineConfig(chat_template=name)).split(split)
        assert bytewise.decode(tokenized.prompts[0]) == "<s>Be brief.\n\n1+1? 2\n\n0+1? 1\n\n2+2?"
        assert bytewise.decode(tokenized.golds[0]) == " 4"


@pytest.mark.parametrize(
    ("template", "conversation", "marks", "answer"),
    [
        (CHATML, CONVERSATION, "", "4"),
        (ALTERNATING, MERGED, "", " 4"),
        (DROPPING, MERGED, "<think></think>", "4"),
        (THINKING, CONVERSATION, "", "4"),
    ],
)
def test_prompts_are_what_the_tokenizer_makes_of_the_conversation(
    bytewise: PreTrainedTokenizerFast, template: str, conversation: list[dict[str, str]], marks: str, answer: str
) -> None:
    tokenizer = talking(bytewise, template)
    tokenized = PromptTokenizer(tokenizer, EngineConfig()).split(SPLIT)
    made = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, enable_thinking=False)["input_ids"]
    assert tokenized.prompts[0] == (*made, *tokenizer(marks, add_special_tokens=False)["input_ids"])
    assert tokenized.prompts[0].count(1) == (1 if template == ALTERNATING else 0), "the beginning token comes once"
    assert tokenizer.decode(tokenized.golds[0]) == answer
    assert [tokenizer.decode(choice) for choice in tokenized.choices[0]] == [answer, answer.replace("4", "5")]


def test_the_packaged_template_is_the_authors_of_eep(bytewise: PreTrainedTokenizerFast) -> None:
    tokenized = PromptTokenizer(talking(bytewise, CHATML), EngineConfig(chat_template="mixtral")).split(SPLIT)
    written = "<s>[INST]Be brief.\n\n1+1?[/INST]2</s>[INST]0+1?[/INST]1</s>[INST]2+2?[/INST]"
    assert bytewise.decode(tokenized.prompts[0]) == written
    assert bytewise.decode(tokenized.golds[1]) == "6"


def test_an_answer_prefix_of_words_is_part_of_every_answer(bytewise: PreTrainedTokenizerFast) -> None:
    split = replace(SPLIT, answer_prefix="\nAnswer: ", system="")
    tokenized = PromptTokenizer(talking(bytewise, CHATML), EngineConfig()).split(split)
    text = bytewise.decode(tokenized.prompts[0] + tokenized.golds[0])
    assert text.startswith("<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\nAnswer: 2<|im_end|>\n")
    assert text.endswith("<|im_start|>assistant\nAnswer: 4")


@pytest.mark.parametrize("limit", [300, 1948])
def test_a_long_prompt_that_loses_its_beginning_is_what_the_authors_tokenizer_makes_of_it(
    bytewise: PreTrainedTokenizerFast, limit: int
) -> None:
    """A question of MMLU after five long ones, with the settings of the EEP paper's Table 4 except for the limit. They
    truncate on the left (`truncation_side`), with a text that begins with another `<s>`."""
    asked = (
        "There is a single choice question about professional law. Answer the question by replying A, B, C or D.\n"
        "Question: {}\nA. guilty\nB. liable\nC. both\nD. neither\nAnswer: "
    )
    shots = tuple((asked.format(f"Case {number}. " + "The defendant denies it. " * 20), "C") for number in range(5))
    question = asked.format("Is a tenant who leaves bound?")
    example = Example(question, ("B",), ("A", "B", "C", "D"), shots)
    split = PreparedSplit(*("mmlu", "test", "generate", "accuracy", Matching(), 4, ""), (example,))
    config = EngineConfig(chat_template="mixtral", max_prompt_tokens=limit)
    (prompt,) = PromptTokenizer(talking(bytewise, CHATML), config).split(split).prompts
    assert len(prompt) == limit and bytewise.decode(prompt).endswith(f"{question}[/INST]")
    assert prompt.count(1) == 1 and prompt[0] == 1
    written = "".join(f"[INST]{shot}[/INST]{answer}</s>" for shot, answer in shots)
    theirs = talking(bytewise, None)
    theirs.truncation_side = "left"
    made = theirs(f"<s>{written}[INST]{question}[/INST]", truncation=True, max_length=limit)["input_ids"]
    assert prompt == tuple(made)


def test_templates_by_name(bytewise: PreTrainedTokenizerFast) -> None:
    named = talking(bytewise, {"default": CHATML, "terse": DROPPING})
    turns = (("user", "Hi"),)
    for name, expected in (("auto", "<|im_start|>user"), ("default", "<|im_start|>user"), ("terse", "user: Hi")):
        template = chat_template(named, EngineConfig(chat_template=name))
        assert template is not None
        assert template.prompt(turns).text.startswith(expected)
    assert chat_template(named, EngineConfig(chat_template="none")) is None
    assert chat_template(bytewise, EngineConfig()) is None
    with pytest.raises(UserError, match=r"^engine.chat_template: .* no template `x`; use one of: none, auto, mi"):
        chat_template(named, EngineConfig(chat_template="x"))
    with pytest.raises(UserError, match="no default template; use one of: none, auto, mixtral, terse"):
        chat_template(talking(bytewise, {"terse": DROPPING}), EngineConfig())


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (ALTERNATING, "</s>"), (DROPPING, None)])
def test_the_token_that_closes_a_turn_ends_answers(
    bytewise: PreTrainedTokenizerFast, template: str, end: str | None
) -> None:
    found = chat_template(talking(bytewise, template), EngineConfig())
    assert found is not None
    assert found.end_token() == (None if end is None else bytewise.convert_tokens_to_ids(end))


def test_name_and_text_of_a_template_are_fingerprinted(monkeypatch: pytest.MonkeyPatch) -> None:
    def prints() -> list[str]:
        settings = (EngineConfig(chat_template=name) for name in ("mixtral", "none"))
        return [engine_fingerprint(ModelConfig("somewhere"), each) for each in settings]

    first = prints()
    assert len(set(first)) == 2
    monkeypatch.setitem(PACKAGED_TEMPLATES, "mixtral", CHATML)
    assert len({*first, *prints()}) == 3


def test_answers_are_those_of_transformers_in_the_conversation(bytewise: PreTrainedTokenizerFast) -> None:
    """Compares greedy answers up to the end of a turn and gold log-probabilities with plain `transformers`."""
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    from moevolve.workers.engine.engine import GenerationEngine

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MistralConfig(
        vocab_size=len(bytewise), num_key_value_heads=2, initializer_range=0.6, eos_token_id=2, bos_token_id=1, **shape
    )
    model = MistralForCausalLM(config).eval()
    tokenizer = talking(bytewise, CHATML)
    split = replace(SPLIT, max_new_tokens=12)
    made = GenerationEngine(model, tokenizer, EngineConfig()).generate(split, lambda _, text: False)
    prompt = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    ends = [2, int(tokenizer.convert_tokens_to_ids("<|im_end|>"))]
    with torch.inference_mode():
        said = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=2)
        logprobs = model(prompt).logits[0, -1].double().log_softmax(dim=-1)
    assert made.texts[0] == tokenizer.decode(said[0, prompt.shape[1] :], skip_special_tokens=True)
    answer = int(tokenizer.convert_tokens_to_ids("4"))
    assert made.gold_logprobs[0] == pytest.approx(float(logprobs[answer]), abs=1e-5)


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        ("gpt-oss", "<|end|><|start|>assistant"),
        ("qwen3", "<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3-thinking", "<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        ("deepseek-v3.1", "<｜Assistant｜><think>"),
        ("glm-4.5", "<|assistant|>"),
        ("mixtral", " [/INST]"),
    ],
)
def test_a_model_may_think_where_a_split_lets_it(bytewise: PreTrainedTokenizerFast, model: str, asked: str) -> None:
    tokenizer = talking(bytewise, CASES[model][0])
    prompt = PromptTokenizer(tokenizer, EngineConfig()).split(replace(SPLIT, thinks=True)).prompts[0]
    assert bytewise.decode(prompt).endswith(f"2+2?{asked}")


@pytest.mark.parametrize("model", list(CASES))
def test_marks_before_an_answer_are_in_the_prompt(bytewise: PreTrainedTokenizerFast, model: str) -> None:
    """Holds for generation and gold answers, with thinking off; spaces belong to the answer's first word."""
    template, between, answer = CASES[model]
    tokenized = PromptTokenizer(talking(bytewise, template), EngineConfig()).split(SPLIT)
    asked = bytewise.decode(tokenized.prompts[0])
    assert asked.endswith(f"2+2?{between}")
    assert asked.count("Be brief.") == 1
    assert bytewise.decode(tokenized.golds[0]) == answer
    # Given answers of earlier turns are as the template has them, without what is thought of the last one only.
    assert asked.index("0+1?") < asked.index("2+2?")
    whole = tokenized.prompts[0] + tokenized.golds[0]
    assert bytewise.decode(whole) == asked + answer


@pytest.mark.parametrize(
    ("template", "now", "told"),
    [(GPT_OSS, "%Y-%m-%d", "Current date: 2025-01-01\n"), (LLAMA, "%d %b %Y", "Today Date: 01 Jan 2025\n")],
)
def test_the_same_prompt_tomorrow_and_low_effort(
    bytewise: PreTrainedTokenizerFast, template: str, now: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import chat_template_utils

    class Clock(dt.datetime):
        today = dt.datetime(2031, 3, 8, 12, tzinfo=dt.UTC)

        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:  # type: ignore[override]
            return cls.today

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    tokenizer = talking(bytewise, template)
    plain = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert Clock.today.strftime(now) in plain, "the clock is what transformers asks"
    prompts = []
    for day in (8, 9):
        Clock.today = dt.datetime(2031, 3, day, 12, tzinfo=dt.UTC)
        prompts.append(PromptTokenizer(tokenizer, EngineConfig()).split(SPLIT).prompts)
    assert prompts[0] == prompts[1]
    assert told in bytewise.decode(prompts[0][0])
    assert template == LLAMA or "Reasoning: low\n" in bytewise.decode(prompts[0][0])


def test_every_form_of_a_date_is_the_fixed_one(bytewise: PreTrainedTokenizerFast) -> None:
    form = "%A, %B %-d %y, %F %H:%M:%S %j"
    template = f"{{{{ strftime_now('{form}') }}}}|{{{{ messages[0].content }}}}"
    found = chat_template(talking(bytewise, template), EngineConfig())
    assert found is not None
    assert found.prompt((("user", "Hi"),)).text == "Wednesday, January 1 25, 2025-01-01 00:00:00 001|Hi"


def test_a_template_that_writes_given_answers_otherwise_is_asked_as_it_asks(bytewise: PreTrainedTokenizerFast) -> None:
    """A conversation with an answer isn't used if it doesn't begin like the prompt."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ 'said ' if m.role == 'assistant' else '' }}{{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}your turn: {% endif %}"
    )
    tokenized = PromptTokenizer(talking(bytewise, template), EngineConfig()).split(replace(SPLIT, system=""))
    assert bytewise.decode(tokenized.prompts[0]).endswith("assistant: said 1\nuser: 2+2?\nyour turn: ")
    assert bytewise.decode(tokenized.golds[0]) == "4"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel bounds memory")
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 4 * 10 ** 9 }}",
        "{% set s = namespace(t='x') %}{% for _ in range(40) %}{% set s.t = s.t + s.t %}{% endfor %}",
        "{{ messages[0].content.center(4 * 10 ** 9) }}",
    ],
    ids=["a product", "sums", "padding"],
)
def test_a_template_that_writes_gigabytes_is_refused(
    bytewise: PreTrainedTokenizerFast, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moevolve.workers.engine.chat._ROOM", 2**26)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    bytewise.chat_template = source
    template = chat_template(bytewise, EngineConfig())
    assert template is not None
    with pytest.raises(UserError, match="the tokenizer's template takes more than 64 MiB for a prompt; use another"):
        template.prompt((("user", "question"),))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
