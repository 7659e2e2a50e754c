"""Chat templates that write calls of tools, with the structure and the marks of published ones.

A name is the model's whose template it follows. What is left out are the sentences that explain the tools.
"""

LLAMA = (
    "{{- bos_token }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- for t in tools %}"
    "{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}"
    "{%- for m in messages %}{%- if not (m.role == 'tool' or 'tool_calls' in m) %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in m %}{%- if not m.tool_calls | length == 1 %}"
    "{{- raise_exception('one call at once') }}{%- endif %}{%- set call = m.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
GPT_OSS = (
    "{%- for t in tools or [] %}{{- '<|start|>developer<|message|>type ' + t.function.name + '<|end|>' }}{%- endfor %}"
    "{%- set ns = namespace(called=none) %}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if 'tool_calls' in m %}{%- set call = m.tool_calls[0].function %}"
    "{%- if m.content and m.thinking %}{{- raise_exception('content and thinking beside a call') }}"
    "{%- elif m.content or m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson }}{{- '<|call|>' }}{%- set ns.called = call.name %}"
    "{%- elif loop.last and not add_generation_prompt %}{%- if 'thinking' in m %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}"
    "{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + ns.called }}"
    "{{- ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"
)
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content if m.content is string else '' %}"
    "{%- if m.role == 'assistant' %}{%- set thoughts = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thoughts = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last and (loop.last or thoughts) %}"
    "{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- content }}{%- endif %}{%- for call in m.tool_calls or [] %}"
    "{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{%- if call.function.arguments is string %}{{- call.function.arguments }}"
    "{%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
DEEPSEEK_V3 = (
    "{%- set ns = namespace(first=true, tool=false, system='') -%}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{%- set ns.system = m.content %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{{ ns.system }}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.tool = false -%}"
    "{{- '<｜User｜>' + m['content'] }}{%- endif %}"
    "{%- if m.role == 'assistant' and m['content'] is none %}{%- set ns.tool = false -%}"
    "{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- for call in m.tool_calls %}"
    "{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}"
    "{{- '\\n```json\\n' + call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}"
    "{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}"
    "{%- if m.role == 'assistant' and m['content'] is not none %}{%- if ns.tool %}"
    "{{- '<｜tool▁outputs▁end｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}{%- set ns.tool = false -%}"
    "{%- else %}{{- '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endif %}"
    "{%- if m.role == 'tool' %}{%- set ns.tool = true -%}"
    "{%- if ns.first %}{{- '<｜tool▁outputs▁begin｜>' }}{%- set ns.first = false %}{%- endif %}"
    "{{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor -%}"
    "{% if ns.tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}"
    "{% if add_generation_prompt and not ns.tool %}{{ '<｜Assistant｜>' }}{% endif %}"
)
DEEPSEEK_R1 = DEEPSEEK_V3.replace("{{ '<｜Assistant｜>' }}", "{{ '<｜Assistant｜><think>\\n' }}").replace(
    "'<｜Assistant｜>' + m['content']", "'<｜Assistant｜>' + m['content'].split('</think>')[-1]"
)
GLM = (
    "[gMASK]<sop>{%- for t in tools or [] %}{{- '<|system|>\\n' + t | tojson }}{%- endfor %}"
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}{%- if m.role == 'assistant' -%}"
    "<|assistant|>{{- '\\n<think>' }}{{- (m.reasoning_content or '').strip() if loop.index0 > ns.last else '' }}"
    "{{- '</think>\\n' }}{{- m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '\\n<tool_call>' + call.function.name }}{%- for k, v in call.function.arguments.items() %}"
    "{{- '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{- v if v is string else v | tojson }}"
    "{{- '</arg_value>' }}{%- endfor %}{{- '\\n</tool_call>' }}{%- endfor %}"
    "{%- elif m.role == 'tool' -%}{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- else -%}{{- '<|' + m.role + '|>\\n' + m.content }}"
    "{{- '/nothink' if m.role == 'user' and enable_thinking is defined and not enable_thinking else '' }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>"
    "{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}"
)
KIMI = (
    "{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_' + m.role + '|>' + (m.name or m.role) + '<|im_middle|>' }}"
    "{%- if m.role == 'tool' %}{{- '## Return of ' + m.tool_call_id + '\\n' }}{%- endif %}"
    "{%- if m.content is not none %}{{- m.content }}{%- endif %}{%- for call in m.tool_calls or [] %}"
    "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools and m == users[-1] %}"
    "{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.tool_calls is defined %}{{- '[TOOL_CALLS][' }}{%- for call in m.tool_calls %}"
    "{%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('an id has 9 characters') }}"
    "{%- endif %}{{- (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}"
    "{{- ', ' if not loop.last else ']' }}{%- endfor %}{{- eos_token }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]{\"content\": ' + m.content | string + ', \"call_id\": \"' }}"
    "{{- m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{%- else %}{{- m.content + (eos_token if m.role == 'assistant' else '') }}{%- endif %}{%- endfor %}"
)

CASES = {
    "llama-3.1": LLAMA,
    "gpt-oss": GPT_OSS,
    "qwen3": QWEN3,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_R1,
    "glm-4.6": GLM,
    "kimi-k2": KIMI,
    "mistral": MISTRAL,
}
