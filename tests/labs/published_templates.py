"""Chat templates with the structure and the marks of published ones, reduced to what a conversation needs.

They are in `chat_templates/`, with lines broken for readers only. A name is the model's whose template it follows;
those that end with `calling` write calls of tools, too. Images, and sentences that explain tools, are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def _read(name: str) -> str:
    file = Path(__file__).with_name("chat_templates") / f"{name}.jinja"
    return file.read_text(encoding="utf-8").replace("\n", "")


GPT_OSS, LLAMA, QWEN, MIXTRAL, OLMOE = map(_read, ("gpt-oss", "llama", "qwen", "mixtral", "olmoe"))
QWEN3, DEEPSEEK_V3, GLM = map(_read, ("qwen3-calling", "deepseek-v3-calling", "glm-calling"))
QWEN3_THINKING = QWEN3[: QWEN3.index("{%- if add_generation_prompt")] + (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
DEEPSEEK_R1 = DEEPSEEK_V3.replace("{{ '<｜Assistant｜>' }}", "{{ '<｜Assistant｜><think>\\n' }}").replace(
    "'<｜Assistant｜>' + m['content']", "'<｜Assistant｜>' + m['content'].split('</think>')[-1]"
)
DEEPSEEK_V31 = (
    "{%- if not thinking is defined -%}{%- if enable_thinking is defined -%}{%- set thinking = enable_thinking -%}"
    "{%- else -%}{%- set thinking = false -%}{%- endif -%}{%- endif -%}"
    + DEEPSEEK_V3[: DEEPSEEK_V3.index("{% if add")].replace("<｜Assistant｜>'", "<｜Assistant｜></think>'")
    + "{% if add_generation_prompt %}{{- '<｜Assistant｜>' }}{% if not thinking %}{{- '</think>' }}{% else %}"
    "{{- '<think>' }}{% endif %}{% endif %}"
)
CALLING = {
    "llama-3.1": _read("llama-calling"),
    "gpt-oss": _read("gpt-oss-calling"),
    "qwen3": QWEN3,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_R1,
    "glm-4.6": GLM,
    "kimi-k2": _read("kimi-calling"),
    "mistral": _read("mistral-calling"),
}
CASES: dict[str, tuple[str, str, str]] = {
    "gpt-oss": (GPT_OSS, "<|end|><|start|>assistant<|channel|>final<|message|>", "4"),
    "llama-3.2": (LLAMA, "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "4"),
    "qwen1.5": (QWEN, "<|im_end|>\n<|im_start|>assistant\n", "4"),
    "qwen3": (QWEN3, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "4"),
    "qwen3-thinking": (QWEN3_THINKING, "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "4"),
    "deepseek-v3": (DEEPSEEK_V3, "<｜Assistant｜>", "4"),
    "deepseek-v3.1": (DEEPSEEK_V31, "<｜Assistant｜></think>", "4"),
    "deepseek-r1": (DEEPSEEK_R1, "<｜Assistant｜><think>\n\n</think>\n\n", "4"),
    "glm-4.5": (GLM, "/nothink<|assistant|>\n<think></think>\n", "4"),
    "mixtral": (MIXTRAL, " [/INST]", " 4"),
    "olmoe": (OLMOE, "\n<|assistant|>\n", "4"),
}
"""By model: the template, what it puts between the question `2+2?` and its answer `4`, and the answer as it follows."""


def bytewise_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte a token, which adds a beginning token by itself as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*special, *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
