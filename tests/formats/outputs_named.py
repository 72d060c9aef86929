"""Outputs of formats with the tool name in a separate text, and of formats with channels."""

from dragoman.core.request import Reasoning, Text, ToolCall
from tests.formats.outputs_json import ESCAPED, HERMES, NESTED, Outputs

MISTRAL: Outputs = {
    "thought, text, call": "[THINK]The weather is wanted.[/THINK]I'll look."
    '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}',
    "several calls": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}'
    '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3}',
    "text before and after": "Let me see.[TOOL_CALLS]now[ARGS]{}\nThat is all.",
    "no arguments": "[TOOL_CALLS]now[ARGS]",
    "escapes": "[TOOL_CALLS]run[ARGS]" + ESCAPED,
    "nested": "[TOOL_CALLS]plan[ARGS]" + NESTED,
    "opener in the prompt": "Two and two.[/THINK]Four.",
    "call that ends a thought": "[THINK]I need the time.[TOOL_CALLS]now[ARGS]{}",
    "look-alikes": (
        "[THINK]It prints [TOOL_CALLS]now[ARGS]{} and `[/THINK]` then.[/THINK]Yes.",
        (Reasoning("It prints [TOOL_CALLS]now[ARGS]{} and `[/THINK]` then."), Text("Yes.")),
    ),
    "malformed": ("[TOOL_CALLS]not a name[ARGS]{}", (Text("[TOOL_CALLS]not a name[ARGS]{}"),)),
    "cut short": (
        '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Par',
        (ToolCall("", "now", "{}"), ToolCall("", "get_weather", '{"city": "Par')),
    ),
}

DEEPSEEK: Outputs = {
    "thought, text, call": "<think>The weather is wanted.</think>I'll look.<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "several calls": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "text before and after": "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>That is all.",
    "no arguments": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "escapes": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>run<｜tool▁sep｜>"
    + ESCAPED
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "nested": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>plan<｜tool▁sep｜>"
    + NESTED
    + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "opener in the prompt": "Two and two.</think>Four.",
    "call that ends a thought": "<think>I need the time.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "look-alikes": (
        '<think>"<｜tool▁calls▁begin｜>" and <think>that</think> is "</think>".</think>Yes.',
        (Reasoning('"<｜tool▁calls▁begin｜>" and <think>that</think> is "</think>".'), Text("Yes.")),
    ),
    "malformed": (
        "<｜tool▁calls▁begin｜>now()<｜tool▁calls▁end｜>",
        (Text("<｜tool▁calls▁begin｜>now()<｜tool▁calls▁end｜>"),),
    ),
    "cut short": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Par',
        (ToolCall("", "get_weather", '{"city": "Par'),),
    ),
}

DEEPSEEK_V3: Outputs = DEEPSEEK | {
    "thought, text, call": "<think>\nThe weather is wanted.\n</think>\n\nI'll look.<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris", "days": 2}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "several calls": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Rome", "days": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "escapes": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run\n```json\n"
    + ESCAPED
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "nested": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>plan\n```json\n"
    + NESTED
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "call that ends a thought": "<think>I need the time.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
    "<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "cut short": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Par',
        (ToolCall("", "get_weather", '{"city": "Par'),),
    ),
}

KIMI: Outputs = {
    "thought, text, call": "<think>The weather is wanted.</think>I'll look.<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris", "days": 2}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "several calls": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|>\n<|tool_call_begin|>functions.get_weather:2<|tool_call_argument_begin|>"
    '{"city": "Rome", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "text before and after": "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>That is all.",
    "no arguments": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "escapes": "<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>"
    + ESCAPED
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "nested": "<|tool_calls_section_begin|><|tool_call_begin|>plan:12<|tool_call_argument_begin|>"
    + NESTED
    + "<|tool_call_end|><|tool_calls_section_end|>",
    "opener in the prompt": "Two and two.◁/think▷Four.",
    "call that ends a thought": "◁think▷I need the time.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "look-alikes": (
        "◁think▷Not ◁think▷this◁/think▷ and <|tool_calls_section_begin|> nor '◁/think▷'.◁/think▷Yes.",
        (Reasoning("Not ◁think▷this◁/think▷ and <|tool_calls_section_begin|> nor '◁/think▷'."), Text("Yes.")),
    ),
    "malformed": (
        "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>",
        (Text("<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>"),),
    ),
    "cut short": (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{"command": "l',
        (ToolCall("", "run", '{"command": "l'),),
    ),
}

HARMONY: Outputs = {
    "thought, text, call": "<|channel|>analysis<|message|>The weather is wanted.<|end|><|start|>assistant<|channel|>"
    "commentary<|message|>I'll look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
    '<|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>',
    "several calls": '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris"}<|call|>'
    "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>"
    'commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome", "days": 3}<|call|>',
    "text before and after": "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>"
    "commentary to=functions.now<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>"
    "That is all.<|return|>",
    "no arguments": " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
    "escapes": "<|channel|>commentary to=functions.run <|constrain|>json<|message|>" + ESCAPED + "<|call|>",
    "nested": "<|channel|>commentary to=functions.plan <|constrain|>json<|message|>" + NESTED + "<|call|>",
    "opener in the prompt": "Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
    "call that ends a thought": "<|channel|>analysis<|message|>I need the time.<|start|>assistant<|channel|>analysis "
    "to=functions.now <|constrain|>json<|message|>{}<|call|>",
    "look-alikes": (
        "<|channel|>analysis<|message|>Not to=x {} nor <|chan.<|end|><|channel|>final<|message|>Yes, to=me<|return|>",
        (Reasoning("Not to=x {} nor <|chan."), Text("Yes, to=me")),
    ),
    "malformed": (
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>the time<|call|>",
        (Text("the time"),),
    ),
    "cut short": (
        '<|channel|>analysis<|message|>x<|end|><|channel|>commentary to=functions.get_weather<|message|>{"city": "Par',
        (Reasoning("x"), ToolCall("", "get_weather", '{"city": "Par')),
    ),
}

CHANNEL: Outputs = {
    "thought, text, call": "<|channel>thought\nThe weather is wanted.<|channel>final I'll look.\n"
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}</tool_call>',
    **{
        name: HERMES[name]
        for name in ("several calls", "text before and after", "no arguments", "escapes", "nested", "malformed")
    },
    "opener in the prompt": "Two and two.<|channel>answer\nFour.",
    "call that ends a thought": "<|channel> Thought I need the time.\n"
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "look-alikes": (
        '<|channel>analysis\nNeither <|channel>. nor "<|channel>" nor <|channel  are.<|channel>final\nYes <|channel>!',
        (Reasoning('Neither <|channel>. nor "<|channel>" nor <|channel  are.'), Text("Yes <|channel>!")),
    ),
    "cut short": (
        '<|channel>thought x<|channel>final <tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        (Reasoning("x"), ToolCall("", "get_weather", '{"city": "Par')),
    ),
}

OUTPUTS: dict[str, Outputs] = {
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi": KIMI,
    "harmony": HARMONY,
    "channel": CHANNEL,
}
