"""Chat templates with the structure and the marks of published ones, reduced to what a plain conversation needs.

What is left out are tools, images, and the long sentences about them; some of them, in `calling_templates`, write calls
too. A name is the model's whose template it follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calling_templates import DEEPSEEK_R1, DEEPSEEK_V3, GLM, QWEN3

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GPT_OSS = (
    "{%- macro system() -%}{{- 'You are ChatGPT.\\n' }}"
    "{{- 'Current date: ' + strftime_now('%Y-%m-%d') + '\\n\\n' }}"
    "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
    "{{- 'Reasoning: ' + reasoning_effort + '\\n\\n' }}{{- '# Valid channels: analysis, commentary, final.' }}"
    "{%- endmacro -%}"
    "{{- '<|start|>system<|message|>' }}{{- system() }}{{- '<|end|>' }}"
    "{%- if messages[0].role == 'system' %}{%- set instructions = messages[0].content %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set instructions = '' %}{%- set turns = messages %}{%- endif %}"
    "{%- if instructions %}{{- '<|start|>developer<|message|># Instructions\\n\\n' + instructions + '<|end|>' }}"
    "{%- endif %}"
    "{%- for m in turns -%}{%- if m.role == 'assistant' -%}"
    "{%- if loop.last and not add_generation_prompt %}"
    "{%- if 'thinking' in m %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- else -%}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)
LLAMA = (
    "{{- bos_token }}"
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}"
    "{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{{- 'Today Date: ' + date_string + '\\n\\n' }}"
    "{{- system }}{{- '<|eot_id|>' }}"
    "{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim"
    " + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
QWEN = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN3_THINKING = QWEN3[: QWEN3.index("{%- if add_generation_prompt")] + (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
DEEPSEEK_V31 = (
    "{%- if not thinking is defined -%}{%- if enable_thinking is defined -%}{%- set thinking = enable_thinking -%}"
    "{%- else -%}{%- set thinking = false -%}{%- endif -%}{%- endif -%}"
    + DEEPSEEK_V3[: DEEPSEEK_V3.index("{% if add")].replace("<｜Assistant｜>'", "<｜Assistant｜></think>'")
    + "{% if add_generation_prompt %}{{- '<｜Assistant｜>' }}{% if not thinking %}{{- '</think>' }}{% else %}"
    "{{- '<think>' }}{% endif %}{% endif %}"
)
MIXTRAL = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set turns = messages %}{%- endif %}{{- bos_token }}"
    "{%- for m in turns %}{%- if m.role == 'user' %}{%- if loop.first and system is defined %}"
    "{{- ' [INST] ' + system + '\\n\\n' + m.content + ' [/INST]' }}"
    "{%- else %}{{- ' [INST] ' + m.content + ' [/INST]' }}"
    "{%- endif %}{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)
OLMOE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ '<|system|>\\n' + m.content + '\\n' }}"
    "{% elif m.role == 'user' %}{{ '<|user|>\\n' + m.content + '\\n' }}"
    "{% else %}{{ '<|assistant|>\\n' + m.content + eos_token }}{% if not loop.last %}{{ '\\n' }}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)

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
