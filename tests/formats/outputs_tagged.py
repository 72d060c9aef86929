"""Outputs of formats whose calls are not JSON (tags, Gemma's braces, Python), and of plain text."""

from dragoman.core.request import Reasoning, Text, ToolCall
from tests.formats.outputs_json import ESCAPED, Outputs

RAW = 'mkdir {a,b && echo "it\'s" \\d 😀é\n}] <b>\t</b>'
STEPS = '[{"do": "a", "with": [1, -2.5, true, null]}, {}, []]'
EXTRA = '{"a": {"b": {"c": "d"}}}'

QWEN_XML: Outputs = {
    "thought, text, call": "<think>\nThe weather is wanted.\n</think>\n\nI'll look.\n\n<tool_call>\n"
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
    "</tool_call>",
    "several calls": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>\n<function=get_weather>\n<parameter=city>"
    "Rome</parameter><parameter=days>3</parameter></function></tool_call>",
    "text before and after": "Let me see.\n<tool_call><function=now></function></tool_call>\nThat is all.",
    "no arguments": "<seed:tool_call><function=now></function></seed:tool_call>",
    "escapes": f"<tool_call>\n<function=run>\n<parameter=command>\n{RAW}\n</parameter>\n</function>\n</tool_call>",
    "nested": f"<tool_call>\n<function=plan>\n<parameter=steps>\n{STEPS}\n</parameter>\n<parameter=extra>\n{EXTRA}\n"
    "</parameter>\n</function>\n</tool_call>",
    "opener in the prompt": "Two and two.\n</think>\n\nFour.",
    "call that ends a thought": "<seed:think>I need the time.\n\n<tool_call>\n<function=now>\n</function>\n"
    "</tool_call>",
    "look-alikes": (
        "<think>\"<tool_call>\" and <think>this</think> and <function=x> and '</think>'.</think>Yes.",
        (Reasoning("\"<tool_call>\" and <think>this</think> and <function=x> and '</think>'."), Text("Yes.")),
    ),
    "malformed": ("<tool_call>now</tool_call>.", (Text("<tool_call>now</tool_call>."),)),
    "cut short": (
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n2\n</parameter>\n<parameter=city>\nParis\n</para",
        (ToolCall("", "get_weather", '{"days": 2, "city": "Paris\\n</para'),),
    ),
}

GLM: Outputs = {
    "thought, text, call": "\n<think>The weather is wanted.</think>\nI'll look.\n<tool_call>get_weather\n"
    "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>",
    "several calls": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>\n"
    "<tool_call>now\n</tool_call><tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "text before and after": "Let me see.\n<tool_call>now\n</tool_call>\nThat is all.",
    "no arguments": "<tool_call>now</tool_call>",
    "escapes": f"<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>{RAW}</arg_value>\n</tool_call>",
    "nested": f"<tool_call>plan\n<arg_key>steps</arg_key>\n<arg_value>{STEPS}</arg_value>\n<arg_key>extra</arg_key>\n"
    f"<arg_value>{EXTRA}</arg_value>\n</tool_call>",
    "opener in the prompt": "Two and two.</think>\nFour.",
    "call that ends a thought": "<think>I need the time.\n<tool_call>now\n</tool_call>",
    "look-alikes": (
        "<think>`<tool_call>` then <tool_call>maybe</tool_call> or `</think>`, no.</think>Yes.",
        (Reasoning("`<tool_call>` then <tool_call>maybe</tool_call> or `</think>`, no."), Text("Yes.")),
    ),
    "malformed": ("<tool_call>(now)</tool_call>", (Text("<tool_call>(now)</tool_call>"),)),
    "cut short": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        (ToolCall("", "get_weather", '{"city": "Par'),),
    ),
}

MINIMAX: Outputs = {
    "thought, text, call": "<think>\nThe weather is wanted.\n</think>\n\nI'll look.\n<minimax:tool_call>\n"
    '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "several calls": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
    '</invoke>\n<invoke name="now">\n</invoke>\n<invoke name="get_weather"><parameter name="city">Rome</parameter>'
    '<parameter name="days">3</parameter></invoke>\n</minimax:tool_call>',
    "text before and after": 'Let me see.\n<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>\n'
    "That is all.",
    "no arguments": '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>',
    "escapes": f'<minimax:tool_call>\n<invoke name="run">\n<parameter name="command">{RAW}</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "nested": f'<minimax:tool_call>\n<invoke name="plan">\n<parameter name="steps">{STEPS}</parameter>\n'
    f'<parameter name="extra">{EXTRA}</parameter>\n</invoke>\n</minimax:tool_call>',
    "opener in the prompt": "Two and two.\n</think>\n\nFour.",
    "call that ends a thought": '<think>I need the time.<minimax:tool_call><invoke name="now"></invoke>'
    "</minimax:tool_call>",
    "look-alikes": (
        '<think>Say "<minimax:tool_call>", <think>or</think> "</think>".</think>Yes.',
        (Reasoning('Say "<minimax:tool_call>", <think>or</think> "</think>".'), Text("Yes.")),
    ),
    "malformed": (
        "<minimax:tool_call>\n<now/>\n</minimax:tool_call>",
        (Text("<minimax:tool_call>\n<now/>\n</minimax:tool_call>"),),
    ),
    "cut short": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Par',
        (ToolCall("", "get_weather", '{"city": "Par'),),
    ),
}

DSML: Outputs = {
    "thought, text, call": "<think>The weather is wanted.</think>I'll look.\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "several calls": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Paris</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "text before and after": 'Let me see.\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>\nThat is all.",
    "no arguments": '<｜DSML｜function_calls><｜DSML｜invoke name="now"></｜DSML｜invoke></｜DSML｜function_calls>',
    "escapes": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="run">\n<｜DSML｜parameter name="command" string="true">'
    f"{RAW}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "nested": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="plan">\n<｜DSML｜parameter name="steps" string="false">'
    f'{STEPS}</｜DSML｜parameter>\n<｜DSML｜parameter name="extra" string="false">{EXTRA}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "opener in the prompt": "Two and two.</think>Four.",
    "call that ends a thought": '<think>I need the time.\n<｜DSML｜function_calls><｜DSML｜invoke name="now">'
    "</｜DSML｜invoke></｜DSML｜function_calls>",
    "look-alikes": (
        "<think>`<｜DSML｜function_calls>` or <think>that</think> or `</think>`.</think>Yes.",
        (Reasoning("`<｜DSML｜function_calls>` or <think>that</think> or `</think>`."), Text("Yes.")),
    ),
    "malformed": (
        "<｜DSML｜function_calls>now</｜DSML｜function_calls>",
        (Text("<｜DSML｜function_calls>now</｜DSML｜function_calls>"),),
    ),
    "cut short": (
        '<｜DSML｜function_calls><｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Par',
        (ToolCall("", "get_weather", '{"city": "Par'),),
    ),
}

_STEPS = '[{do:<|"|>a<|"|>,with:[1,-2.5,true,null]},{},[]]'

GEMMA: Outputs = {
    "thought, text, call": "<|channel>thought\nThe weather is wanted.<channel|>I'll look.<|tool_call>call:get_weather"
    '{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
    "several calls": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>'
    '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>, days:3}<tool_call|><turn|>',
    "text before and after": "Let me see.<|tool_call>call:now{}<tool_call|>That is all.",
    "no arguments": "<|tool_call>call:now<tool_call|>",
    "escapes": f'<|tool_call>call:run{{command:<|"|>{RAW}<|"|>}}<tool_call|>',
    "nested": f'<|tool_call>call:plan{{steps:{_STEPS},extra:{{a:{{b:{{c:<|"|>d<|"|>}}}}}}}}<tool_call|>',
    "opener in the prompt": "Two and two.<channel|>Four.",
    "call that ends a thought": "<|channel>thought\nI need the time.<|tool_call>call:now{}<tool_call|>",
    "look-alikes": (
        "<|channel>thought\nA <|channel>, a <|tool_call>call:unknown{}<tool_call|>.<channel|>Yes.",
        (Reasoning("A <|channel>, a <|tool_call>call:unknown{}<tool_call|>."), Text("Yes.")),
    ),
    "malformed": ("<|tool_call>now{}<tool_call|>", (Text("<|tool_call>now{}<tool_call|>"),)),
    "cut short": (
        '<|tool_call>call:get_weather{days:2,city:<|"|>Par',
        (ToolCall("", "get_weather", '{"days": 2, "city": "Par'),),
    ),
}

FUNCTION_GEMMA: Outputs = {
    "several calls": "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call><start_function_call>call:get_weather{city:<escape>Rome<escape>,"
    "days:3}<end_function_call>",
    "text before and after": "Let me see.<start_function_call>call:now{}<end_function_call>That is all.<end_of_turn>",
    "no arguments": "<start_function_call>call:now{}<end_function_call>",
    "escapes": f"<start_function_call>call:run{{command:<escape>{RAW}<escape>}}<end_function_call>",
    "nested": f'<start_function_call>call:plan{{steps:{_STEPS},extra:{{a:{{b:{{c:<|"|>d<|"|>}}}}}}'.replace(
        '<|"|>', "<escape>"
    )
    + "}<end_function_call>",
    "look-alikes": (
        "A <start_function and a <escape> mean nothing.",
        (Text("A <start_function and a <escape> mean nothing."),),
    ),
    "malformed": (
        "<start_function_call>call:{}<end_function_call>",
        (Text("<start_function_call>call:{}<end_function_call>"),),
    ),
    "cut short": (
        "<start_function_call>call:get_weather{city:<escape>Par",
        (ToolCall("", "get_weather", '{"city": "Par'),),
    ),
}

PYTHONIC: Outputs = {
    "thought, text, call": "<think>The weather is wanted.</think>I'll look.\n<|python_start|>"
    '[get_weather(city="Paris", days=2)]<|python_end|>',
    "several calls": "[get_weather(city='Paris'), now(), get_weather(city=\"Rome\", days=3)]",
    "text before and after": "Let me see.<|tool_call_start|>[now()]<|tool_call_end|>That is all.",
    "no arguments": "<function_calls>\nnow()\n</function_calls>",
    "escapes": "[run(command=" + ESCAPED.removeprefix('{"command": ').removesuffix("}") + ")]",
    "nested": "[plan(steps=[{'do': 'a', 'with': [1, -2.5, True, None]}, {}, []], extra={'a': {\"b\": {'c': 'd'}}})]",
    "opener in the prompt": "Two and two.</think>Four.",
    "call that ends a thought": "<think>I need the time.<|tool_call_start|>[now()]<|tool_call_end|>",
    "look-alikes": (
        "<think>It is <think>so</think> and [now()] and `</think>`.</think>[1, now] is a list.",
        (Reasoning("It is <think>so</think> and [now()] and `</think>`."), Text("[1, now] is a list.")),
    ),
    "malformed": ("<|python_start|>[now(x)]<|python_end|>", (Text("<|python_start|>[now(x)]<|python_end|>"),)),
    "cut short": ("[now(), get_weather(city='Par", (ToolCall("", "now", "{}"), Text(", get_weather(city='Par"))),
}

PLAIN: Outputs = {
    "look-alikes": (
        '<think>x</think> <tool_call>{"name": "now", "arguments": {}}</tool_call>\n',
        (Text('<think>x</think> <tool_call>{"name": "now", "arguments": {}}</tool_call>\n'),),
    )
}

OUTPUTS: dict[str, Outputs] = {
    "qwen_xml": QWEN_XML,
    "glm": GLM,
    "minimax": MINIMAX,
    "deepseek_dsml": DSML,
    "gemma": GEMMA,
    "function_gemma": FUNCTION_GEMMA,
    "pythonic": PYTHONIC,
    "plain": PLAIN,
}
