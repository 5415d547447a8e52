"""Chat templates that write calls of tools in the forms of published models, as short as they can be."""

TAGGED_JSON = (  # Hermes, Qwen
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}{% for c in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BARE_JSON = (  # Llama 3
    "{% for m in messages %}<|start|>{{ m.role }}<|end_header|>{{ '\n\n' }}{% if tools and m.role == 'user' %}"
    "{{ tools | tojson(indent=4) }}{% endif %}{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{{ '{\"name\": \"' + m.tool_calls[0].function.name }}"
    "{{ '\", \"parameters\": ' + m.tool_calls[0].function.arguments | tojson + '}' }}{% else %}{{ m.content }}"
    "{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end_header|>\n\n' }}{% endif %}"
)
LISTED_JSON = (  # Mistral 7B
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}"
    "{{ ', \"id\": \"' + c.id + '\"}' }}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
NAMED_JSON = (  # later ones of Mistral
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
SECTIONED_JSON = (  # DeepSeek V3.1
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "<|User|>{{ m.content }}{% else %}<|Assistant|></think>{{ m.content or '' }}{% if m.tool_calls %}<|calls_begin|>"
    "{% for c in m.tool_calls %}<|call_begin|>{{ c.function.name }}<|sep|>{{ c.function.arguments | tojson }}"
    "<|call_end|>{% endfor %}<|calls_end|>{% endif %}<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|></think>{% endif %}"
)
TAGGED_ARGUMENTS = (  # Qwen3-Coder
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% else %}<|im_start|>assistant{% if m.content %}"
    "{{ '\n' + m.content }}"
    "{% endif %}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\n' }}{{ v }}{{ '\n</parameter>\n' }}"
    "{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
KEYS_AND_VALUES = (  # GLM 4.5
    "[gMASK]<sop>{% if tools %}<|system|>{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "<|user|>\n{{ m.content }}{% else %}<|assistant|>\n<think></think>{% if m.content %}"
    "{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>' }}"
    "{% endfor %}{{ '\n</tool_call>' }}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_TOOLS = (  # SmolLM2
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FENCED_JSON = (  # DeepSeek V3 and R1
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "<|User|>{{ m.content }}{% else %}<|Assistant|>{{ m.content or '' }}{% if m.tool_calls %}<|calls_begin|>"
    "{% for c in m.tool_calls %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<|call_begin|>function<|sep|>' + c.function.name + '\n```json\n' + c.function.arguments | tojson }}"
    "{{ '\n```<|call_end|>' }}{% endfor %}<|calls_end|>{% endif %}<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
INVOKED = (  # MiniMax M2
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ ']b]user\n' + m.content + '[e[\n' }}{% else %}{{ ']b]ai\n' + (m.content or '') }}{% if m.tool_calls %}"
    "{{ '\n<calls>\n' }}{% for c in m.tool_calls %}{{ '<invoke name=\"' + c.function.name + '\">\n' }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '<parameter name=\"' + k + '\">' + v + '</parameter>\n' }}{% endfor %}{{ '</invoke>\n' }}{% endfor %}"
    "{{ '</calls>' }}{% endif %}{{ '[e[\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']b]ai\n' }}{% endif %}"
)
TOKEN_AND_LIST = (  # Granite 3
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}{% if m.tool_calls %}{{ '<|tool_call|>[' }}"
    '{% for c in m.tool_calls %}{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments | tojson + '}' }}{% if not loop.last %}, {% endif %}{% endfor %}]{% else %}"
    "{{ m.content }}{% endif %}{{ '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
NUMBERED_JSON = (  # Mistral Small 3.2
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson }}"
    "{% endfor %}{{ eos_token }}{% endif %}{% endfor %}"
)
