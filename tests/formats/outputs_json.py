"""Outputs of the formats whose calls are JSON objects."""

from dragoman.core.request import Part, Reasoning, Text, ToolCall

ESCAPED = r'{"command": "mkdir {a,b && echo \"it' + "'" + r's\" \\d 😀\u00e9\n}] <b>\t</b>"}'
NESTED = '{"steps": [{"do": "a", "with": [1, -2.5, true, null]}, {}, []], "extra": {"a": {"b": {"c": "d"}}}}'

Outputs = dict[str, str | tuple[str, tuple[Part, ...]]]

HERMES: Outputs = {
    "thought, text, call": "<think>\nThe weather is wanted.\n</think>\n\nI'll look.\n<tool_call>\n"
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
    "several calls": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>{"arguments": {"city": "Rome", "days": 3}, "name": "get_weather"}</tool_call>',
    "text before and after": 'Let me see.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>\nThat is all.',
    "no arguments": '<tool_call>\n{"name": "now"}\n</tool_call>',
    "escapes": '<tool_call>\n{"name": "run", "arguments": ' + ESCAPED + "}\n</tool_call>",
    "nested": '<tool_call>\n{"name": "plan", "arguments": ' + NESTED + "}\n</tool_call>",
    "opener in the prompt": "\nTwo and two.\n</think>\n\nFour.",
    "call that ends a thought": '<think>I need the time.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "look-alikes": (
        "<think>This <think>is</think> not, nor is <tool_call>x</tool_call>, nor `</think>`.</think>Yes.",
        (Reasoning("This <think>is</think> not, nor is <tool_call>x</tool_call>, nor `</think>`."), Text("Yes.")),
    ),
    "malformed": (
        'So: <tool_call>{"name": now, "arguments": {}}</tool_call> and on.',
        (Text('So: <tool_call>{"name": now, "arguments": {}}</tool_call> and on.'),),
    ),
    "cut short": (
        '<think>Hm.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        (Reasoning("Hm."), ToolCall("", "get_weather", '{"city": "Par')),
    ),
}

ERNIE: Outputs = HERMES | {
    "thought, text, call": "<think>\nThe weather is wanted.\n</think>\n\n<response>\nI'll look.\n</response>\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n',
    "opener in the prompt": "\nTwo and two.\n</think>\n\n<response>\nFour.\n</response>",
    "look-alikes": (
        '<think>The "</think>" and a <response>.</think><response>A <response> is one.</response>',
        (Reasoning('The "</think>" and a <response>.'), Text("A <response> is one.")),
    ),
}

HUNYUAN: Outputs = {
    "thought, text, call": "<think>\nThe weather is wanted.\n</think>\n<answer>\nI'll look.\n</answer>"
    '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]</tool_calls>',
    "several calls": '<tool_calls>\n[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "now", "arguments": {}},\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]\n'
    "</tool_calls>",
    "text before and after": 'Let me see.<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>That is all.',
    "no arguments": '<tool_calls>[{"name": "now", "arguments": null}]</tool_calls>',
    "escapes": '<tool_calls>[{"name": "run", "arguments": ' + ESCAPED + "}]</tool_calls>",
    "nested": '<tool_calls>[{"name": "plan", "arguments": ' + NESTED + "}]</tool_calls>",
    "opener in the prompt": "Two and two.</think>\n<answer>Four.</answer>",
    "call that ends a thought": '<think>I need the time.<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>',
    "look-alikes": (
        "<think>'</think>' and <tool_calls> and <answer>.</think><answer>An <answer>.</answer>",
        (Reasoning("'</think>' and <tool_calls> and <answer>."), Text("An <answer>.")),
    ),
    "malformed": ("<answer>Hm.</answer><tool_calls>[now]</tool_calls>", (Text("Hm.<tool_calls>[now]</tool_calls>"),)),
    "cut short": (
        '<tool_calls>[{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"days": 1',
        (ToolCall("", "now", "{}"), ToolCall("", "get_weather", '{"days": 1')),
    ),
}

INTERNLM: Outputs = {
    "thought, text, call": "<think>\nThe weather is wanted.\n</think>\n\nI'll look."
    '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}<|action_end|>',
    "several calls": '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Paris"}}<|action_end|>'
    '\n<|action_start|> <|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>'
    '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}<|action_end|>',
    "text before and after": "Let me see.<|action_start|><|plugin|>"
    '{"name": "now", "parameters": {}}<|action_end|>\nThat is all.',
    "no arguments": '<|action_start|><|plugin|>{"name": "now"}<|action_end|>',
    "escapes": '<|action_start|><|plugin|>{"name": "run", "parameters": ' + ESCAPED + "}<|action_end|>",
    "nested": '<|action_start|><|plugin|>{"name": "plan", "parameters": ' + NESTED + "}<|action_end|>",
    "opener in the prompt": "Two and two.</think>Four.",
    "call that ends a thought": "<think>I need the time."
    '<|action_start|><|plugin|>{"name": "now", "parameters": {}}<|action_end|>',
    "look-alikes": (
        '<think>"<|action_start|><|plugin|>" begins one and <think>this</think> none.</think>Yes.',
        (Reasoning('"<|action_start|><|plugin|>" begins one and <think>this</think> none.'), Text("Yes.")),
    ),
    "malformed": (
        '<|action_start|><|plugin|>{"nome": "now"}<|action_end|> <|plugin|>',
        (Text('<|action_start|><|plugin|>{"nome": "now"}<|action_end|> <|plugin|>'),),
    ),
    "cut short": (
        '<|action_start|><|plugin|>{"name": "get_weather", "parameters": {"city": "P", "da',
        (ToolCall("", "get_weather", '{"city": "P", "da'),),
    ),
}

GRANITE: Outputs = {
    "thought, text, call": "Here is my thought process:\nThe weather is wanted.\n\nHere is my response:\nI'll look.\n"
    '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
    "several calls": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
    "text before and after": 'Let me see. <tool_call>[{"name": "now", "arguments": {}}]</tool_call> That is all.',
    "no arguments": '<|tool_call|>[{"name": "now", "arguments": {}}]',
    "escapes": '<|tool_call|>[{"name": "run", "arguments": ' + ESCAPED + "}]",
    "nested": '<tool_call>[{"name": "plan", "arguments": ' + NESTED + "}]</tool_call>",
    "opener in the prompt": "Two and two.</think><response>Four.</response>",
    "call that ends a thought": '<think>I need the time.\n<|tool_call|>[{"name": "now", "arguments": {}}]',
    "look-alikes": (
        'Here is my thought process: I say "Here is my response:" <|tool_call|>. Here is my response: Yes.',
        (Reasoning('I say "Here is my response:" <|tool_call|>.'), Text("Yes.")),
    ),
    "malformed": ("<|tool_call|>now()", (Text("<|tool_call|>now()"),)),
    "cut short": (
        'Here is my thought process: x Here is my response: <|tool_call|>[{"name": "get_weather", "arguments": {"cit',
        (Reasoning("x"), ToolCall("", "get_weather", '{"cit')),
    ),
}

PHI: Outputs = {
    "thought, text, call": "<think>The weather is wanted.</think>I'll look."
    'functools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
    "several calls": 'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
    "text before and after": 'Let me see.<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>That is all.',
    "no arguments": 'functools[{"name": "now", "arguments": {}}]',
    "escapes": 'functools[{"name": "run", "arguments": ' + ESCAPED + "}]",
    "nested": '<|tool_call|>[{"name": "plan", "arguments": ' + NESTED + "}]<|/tool_call|>",
    "opener in the prompt": "Two and two.</think>Four.",
    "call that ends a thought": '<think>I need the time. functools[{"name": "now", "arguments": {}}]',
    "look-alikes": (
        "<think>The module <think>functools</think> has `</think>` no calls.</think>Yes.",
        (Reasoning("The module <think>functools</think> has `</think>` no calls."), Text("Yes.")),
    ),
    "malformed": ("Use functools[partial] and functools.", (Text("Use functools[partial] and functools."),)),
    "cut short": (
        'functools[{"name": "run", "arguments": {"command": "l\\',
        (ToolCall("", "run", '{"command": "l\\'),),
    ),
}

COHERE: Outputs = {
    "thought, text, call": "<|START_THINKING|>The weather is wanted.<|END_THINKING|><|START_RESPONSE|>I'll look."
    '<|END_RESPONSE|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", '
    '"parameters": {"city": "Paris", "days": 2}}\n]<|END_ACTION|>',
    "several calls": '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    '{"city": "Paris"}},\n {"tool_call_id": "1", "tool_name": "now", "parameters": {}},\n '
    '{"tool_call_id": "2", "tool_name": "get_weather", "parameters": {"city": "Rome", "days": 3}}\n]<|END_ACTION|>',
    "text before and after": '<|START_TEXT|>Let me see.<|END_TEXT|><|START_ACTION|>[{"tool_name": "now", '
    '"parameters": {}}]<|END_ACTION|><|START_RESPONSE|>That is all.<|END_RESPONSE|>',
    "no arguments": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now"}]<|END_ACTION|>',
    "escapes": '<|START_ACTION|>[{"tool_name": "run", "parameters": ' + ESCAPED + "}]<|END_ACTION|>",
    "nested": '<|START_ACTION|>[{"tool_name": "plan", "parameters": ' + NESTED + "}]<|END_ACTION|>",
    "opener in the prompt": "Two and two.<|END_THINKING|><|START_RESPONSE|>Four.<|END_RESPONSE|>",
    "call that ends a thought": "<|START_THINKING|>I need the time."
    '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    "look-alikes": (
        '<|START_THINKING|>A "<|END_THINKING|>" and <|START_ACTION|>.<|END_THINKING|><|START_RESPONSE|>Yes.',
        (Reasoning('A "<|END_THINKING|>" and <|START_ACTION|>.'), Text("Yes.")),
    ),
    "malformed": (
        "<|START_RESPONSE|>Hm.<|END_RESPONSE|><|START_ACTION|>[}]<|END_ACTION|>",
        (Text("Hm.<|START_ACTION|>[}]<|END_ACTION|>"),),
    ),
    "cut short": (
        '<|START_THINKING|>x<|END_THINKING|><|START_ACTION|>[{"tool_name": "now", "parameters": {',
        (Reasoning("x"), ToolCall("", "now", "{")),
    ),
}

MISTRAL_ARRAY: Outputs = {
    "thought, text, call": "[THINK]The weather is wanted.[/THINK]I'll look."
    '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
    "several calls": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "now", "arguments": {}}, {"arguments": {"city": "Rome", "days": 3}, "name": "get_weather"}]',
    "text before and after": 'Let me see.[TOOL_CALLS][{"name": "now", "arguments": {}}]\n\nThat is all.',
    "no arguments": '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "a1b2c3d4e"}]',
    "escapes": '[TOOL_CALLS][{"name": "run", "arguments": ' + ESCAPED + "}]",
    "nested": '[TOOL_CALLS][{"name": "plan", "arguments": ' + NESTED + "}]",
    "opener in the prompt": "Two and two.[/THINK]Four.",
    "call that ends a thought": '[THINK]I need the time.[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "look-alikes": (
        "[THINK]It is [THINK]not[/THINK] the end, nor is `[/THINK]`.[/THINK]Yes.",
        (Reasoning("It is [THINK]not[/THINK] the end, nor is `[/THINK]`."), Text("Yes.")),
    ),
    "malformed": ("[TOOL_CALLS][1, 2]", (Text("[TOOL_CALLS][1, 2]"),)),
    "cut short": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Pa',
        (ToolCall("", "get_weather", '{"city": "Pa'),),
    ),
}

LLAMA3: Outputs = {
    "several calls": '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}; '
    '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}',
    "text before and after": 'Let me see.<|python_tag|>{"name": "now", "parameters": {}}<|eom_id|>That is all.',
    "no arguments": '{"name": "now", "parameters": {}}<|eot_id|>',
    "escapes": '<|python_tag|>{"type": "function", "name": "run", "parameters": ' + ESCAPED + "}",
    "nested": '{"type": "function", "function": {"name": "plan", "parameters": ' + NESTED + "}}",
    "look-alikes": ('{"name": "Bob", "parameters": {}}', (Text('{"name": "Bob", "parameters": {}}'),)),
    "malformed": ("<|python_tag|>print(1)", (Text("<|python_tag|>print(1)"),)),
    "cut short": (
        '{"name": "now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "Par',
        (ToolCall("", "now", "{}"), ToolCall("", "get_weather", '{"city": "Par')),
    ),
}

JSON: Outputs = {
    "thought, text, call": "<thinking>The weather is wanted.</thinking>\nI'll look.\n"
    '```json\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n```',
    "several calls": '[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}, '
    '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
    "text before and after": 'Let me see.\n```json\n[{"name": "now", "arguments": {}}]\n```\nThat is all.',
    "no arguments": '{"name": "now"}',
    "escapes": '{"name": "run", "arguments": ' + ESCAPED + "}",
    "nested": '<tool_call>{"name": "plan", "arguments": ' + NESTED + "}</tool_call>",
    "opener in the prompt": "Two and two.</reasoning>Four.",
    "call that ends a thought": '<thought>I need the time.\n```json\n{"name": "now", "arguments": {}}\n```',
    "look-alikes": (
        '<think>Say <thought>so</thought> or \'</think>\'.</think>Yes:\n```json\n{"name": "Bob"}\n```',
        (Reasoning("Say <thought>so</thought> or '</think>'."), Text('Yes:\n```json\n{"name": "Bob"}\n```')),
    ),
    "malformed": ("<tool_call>{name: now}</tool_call>", (Text("<tool_call>{name: now}</tool_call>"),)),
    "cut short": ('{"name": "get_weather", "arguments": {"city": ', (ToolCall("", "get_weather", '{"city": '),)),
}

OUTPUTS: dict[str, Outputs] = {
    "hermes": HERMES,
    "ernie": ERNIE,
    "hunyuan": HUNYUAN,
    "internlm": INTERNLM,
    "granite": GRANITE,
    "phi": PHI,
    "cohere": COHERE,
    "mistral_array": MISTRAL_ARRAY,
    "llama3": LLAMA3,
    "json": JSON,
}
