# ruff: noqa: RUF001 - DeepSeek's marks are written with other characters than ASCII's
"""Chat templates with the reasoning and the calls of published mixtures of experts, as short as they can be."""

QWEN3 = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{% if m.role == 'tool' %}{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}{% else %}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}{% endif %}{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
GLM45 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n{{ m.content }}{% elif m.role == 'tool' %}"
    "<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}<|assistant|>\n<think>"
    "{{ m.reasoning_content or '' }}</think>{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' }}"
    "{{ (v if v is string else v | tojson) + '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is false %}{{ '\n<think></think>' }}"
    "{% endif %}{% endif %}"
)
GLM53 = (  # always thinks, in more or less depth; calls have no new lines
    "[gMASK]<sop>{% set depth = reasoning_effort if reasoning_effort in ['low', 'high'] else 'max' %}"
    "<|system|>Reasoning Effort: {{ depth | capitalize }}{% if tools %}<|system|>\n{{ tools | tojson }}{% endif %}"
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'tool' %}"
    "<|observation|><tool_response>{{ m.content }}</tool_response>{% else %}<|assistant|><think>"
    "{% if not clear_thinking or loop.index0 > last.user %}{{ m.reasoning_content or '' }}{% endif %}</think>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '<tool_call>' ~ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
MINIMAX_M2 = (
    "]~!b[{% if tools %}{{ ']~b]system\n' }}{{ tools | tojson }}{{ '[e~[\n' }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ ']~b]user\n' + m.content }}{% elif m.role == 'tool' %}"
    "{{ ']~b]tool\n<response>' + m.content + '</response>' }}{% else %}{{ ']~b]ai\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}{% if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{% for c in m.tool_calls %}"
    "{{ '<invoke name=\"' + c.function.name + '\">\n' }}{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter name=\"' + k + '\">' + (v if v is string else v | tojson) + '</parameter>\n' }}{% endfor %}"
    "{{ '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{% endif %}{{ '[e~[\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"
)
KIMI_K2 = (  # the id of a call stands for its name
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_user|>user<|im_middle|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>{{ '## ' + m.tool_call_id + '\n' + m.content }}{% else %}"
    "<|im_assistant|>assistant<|im_middle|><think>{{ m.reasoning_content or '' }}</think>{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments if c.function.arguments is string else "
    "c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
DEEPSEEK_V31 = (  # arguments are text
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}{% elif m.role == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% else %}"
    "{{ '<｜Assistant｜></think>' + (m.content or '') }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
