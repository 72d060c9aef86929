"""Outputs with peculiarities of one family. Arguments are compared as text."""

from dragoman.core.events import FinishReason
from dragoman.core.request import Part, Reasoning, Text, ToolCall
from tests.formats.cases import TOOLS, Case, Scenario, call


def other(
    syntax: str,
    name: str,
    output: str,
    *parts: Part,
    warns: bool = False,
    reason: FinishReason = "stop",
    thinking: bool = False,
    offered: bool = True,
) -> Case:
    said = Scenario(parts, reason, thinking, warns, exact=True)
    return Case(syntax, name, output, said, TOOLS if offered else ())


def weather(arguments: str) -> ToolCall:
    return call("get_weather", arguments)


NOW = call("now", "{}")
HERMES_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

LONG = '<tool_call>{"name": "' + "n" * 2000 + '"}</tool_call>'
ENDLESS = "<|tool_calls_section_begin|><|tool_call_begin|>" + "n" * 2000

FENCED = "```xml\n<think>\nfoo\n</think>\n```\nSo it looks."

THOUGHTS = [
    other("hermes", "in a fence", FENCED, Text(FENCED)),
    other("hermes", "empty thought", "<think>\n\n</think>\n\nHi", Text("Hi")),
    other(
        "hermes",
        "opener again though the prompt had it",
        "<think>\nHm.</think>Hi",
        Reasoning("Hm."),
        Text("Hi"),
        thinking=True,
    ),
    other(
        "hermes",
        "two thoughts",
        "<think>a</think>x\n<think>b</think>y",
        Reasoning("a"),
        Text("x"),
        Reasoning("b"),
        Text("y"),
    ),
    other("hermes", "late thought", "Say <think>so</think> now.", Text("Say"), Reasoning("so"), Text("now.")),
    other(
        "hermes", "opener talked about", "Write `<think>` or <think> first.", Text("Write `<think>` or <think> first.")
    ),
    other("hermes", "thought cut short", "<think>Hm, </thi", Reasoning("Hm, </thi"), reason="length"),
    other("hermes", "quoted closer that did close", "<think>It is '</think>'Yes'", Reasoning("It is '"), Text("'Yes'")),
    other(
        "hermes",
        "call talked about",
        f"<think>I could {HERMES_NOW} but no.</think>No.",
        Reasoning(f"I could {HERMES_NOW} but no."),
        Text("No."),
    ),
    other("hermes", "call as all a thought ends with", f"<think>Yes. {HERMES_NOW}</think>\n", Reasoning("Yes."), NOW),
    other(
        "hermes",
        "call of an unknown tool in a thought",
        '<think>a <tool_call>{"name": "x"}</tool_call>',
        Reasoning('a <tool_call>{"name": "x"}</tool_call>'),
    ),
    other(
        "hermes",
        "no tools were offered",
        f"<think>a</think>{HERMES_NOW}",
        Reasoning("a"),
        Text(HERMES_NOW),
        offered=False,
    ),
    other("granite", "prose without its end", "Here is my thought process: so.", Reasoning("so.")),
    other("cohere", "text tags", "<|START_TEXT|>Hi<|END_TEXT|>", Text("Hi")),
    other("ernie", "line break behind the answer", "<response>\nHi\n</response>\n", Text("Hi")),
    other("cohere", "spaces inside the tags", "<|START_RESPONSE|> Hi <|END_RESPONSE|>\n", Text("Hi")),
    other("hunyuan", "answer without a thought", "<answer>\nHi\n</answer>", Text("Hi")),
    other("hunyuan", "answer tag further on", "An <answer> is </answer>.", Text("An <answer> is </answer>.")),
    other("kimi", "both kinds", "<think>a</think>◁think▷b◁/think▷c", Reasoning("ab"), Text("c")),
    other("channel", "names in any case", "<|channel>THINKING a<|channel>   Final b", Reasoning("a"), Text("b")),
    other("channel", "text first", "a <|channel>analysis b", Text("a"), Reasoning("b")),
    other("gemma", "an end without a beginning", "a<channel|>b", Text("ab")),
    other("gemma", "answer channel", "<|channel>final\nHi<turn|>", Text("Hi")),
    other("harmony", "no header", "Hello", Text("Hello")),
    other("harmony", "final cut short", "<|channel|>final<|message|>Hel", Text("Hel"), reason="length"),
    other("harmony", "thought only", "<|channel|>analysis<|message|>Hm", Reasoning("Hm"), reason="length"),
    other("plain", "markers are text", "<think>a</think>", Text("<think>a</think>")),
]

CALLS = [
    other(
        "hermes",
        "arguments as text",
        r'<tool_call>{"name": "now", "arguments": "{\"a\": 1}"}</tool_call>',
        call("now", '{"a": 1}'),
    ),
    other(
        "hermes",
        "spaces are kept",
        '<tool_call>{"name":"now","arguments":{ "a" :1 }}</tool_call>',
        call("now", '{ "a" :1 }'),
    ),
    other(
        "hermes",
        "line break in a string",
        '<tool_call>{"name": "run", "arguments": {"command": "a\nb\tc"}}</tool_call>',
        call("run", r'{"command": "a\nb\tc"}'),
    ),
    other(
        "hermes",
        "invalid escape",
        r'<tool_call>{"name": "run", "arguments": {"command": "\d\'s"}}</tool_call>',
        call("run", r"""{"command": "\\d's"}"""),
    ),
    other(
        "hermes",
        "marker in a string",
        '<tool_call>{"name": "run", "arguments": {"command": "</tool_call><think>"}}</tool_call>',
        call("run", '{"command": "</tool_call><think>"}'),
    ),
    other("hermes", "end forgotten", '<tool_call>{"name": "now", "arguments": {}}', NOW),
    other(
        "hermes",
        "braces forgotten",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "P"</tool_call>',
        weather('{"city": "P"}'),
        warns=True,
    ),
    other(
        "hermes",
        "not JSON",
        '<tool_call>{"name": "now", "arguments": {"a": x!}}</tool_call>Hi',
        call("now", '{"a": x!}}'),
        Text("Hi"),
        warns=True,
    ),
    other(
        "hermes",
        "string not closed",
        '<tool_call>{"name": "run", "arguments": {"command": "l\\',
        call("run", '{"command": "l\\'),
        warns=True,
    ),
    other(
        "hermes",
        "no name",
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        Text('<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        warns=True,
    ),
    other(
        "hermes",
        "invalid arguments",
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        Text('<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
        warns=True,
    ),
    other(
        "hermes",
        "wrapped once",
        '<tool_call>{"type": "function", "function": {"name": "now", "arguments": {}}}</tool_call>',
        NOW,
    ),
    other("hermes", "unknown tool", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', call("other", "{}")),
    other("hermes", "marker cut short", "Hi <tool_ca", Text("Hi <tool_ca"), reason="length"),
    other(
        "hermes",
        "name cut short",
        '<tool_call>{"name": "no',
        Text('<tool_call>{"name": "no'),
        reason="length",
        warns=True,
    ),
    other("qwen_xml", "object of Hermes", HERMES_NOW, NOW),
    other(
        "qwen_xml",
        "end of a value inside it",
        "<tool_call><function=run><parameter=command>\na\n</parameter>\nb\n</parameter></function></tool_call>",
        call("run", r'{"command": "a\n</parameter>\nb"}'),
    ),
    other(
        "qwen_xml",
        "string that looks like a number",
        "<tool_call><function=get_weather><parameter=city>12</parameter></function></tool_call>",
        weather('{"city": "12"}'),
    ),
    other(
        "qwen_xml",
        "invalid number",
        "<tool_call><function=get_weather><parameter=days>two</parameter></function></tool_call>",
        weather('{"days": "two"}'),
    ),
    other(
        "qwen_xml",
        "Python's words",
        "<tool_call><function=plan><parameter=extra>True</parameter></function></tool_call>",
        call("plan", '{"extra": true}'),
    ),
    other(
        "qwen_xml",
        "only its own line breaks",
        "<tool_call><function=run><parameter=command>\n\n a \n\n</parameter></function></tool_call>",
        call("run", r'{"command": "\n a \n"}'),
    ),
    other(
        "qwen_xml",
        "invalid name",
        "<tool_call><function=run it</function></tool_call>",
        Text("<tool_call><function=run it</function></tool_call>"),
        warns=True,
    ),
    other(
        "qwen_xml",
        "function not closed",
        "<tool_call><function=run><parameter=command>\nls\n</parameter></tool_call>x",
        call("run", '{"command": "ls"}'),
        Text("x"),
    ),
    other(
        "glm",
        "value cut short",
        "<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>2",
        weather('{"days": 2'),
        reason="length",
    ),
    other("glm", "name cut short", "<tool_call>get_wea", Text("<tool_call>get_wea"), reason="length", warns=True),
    other(
        "deepseek",
        "fenced as before",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>x",
        NOW,
        Text("x"),
    ),
    other(
        "deepseek_v3",
        "without a fence",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>x",
        NOW,
        Text("x"),
    ),
    other("mistral", "array as before", '[TOOL_CALLS][{"name": "now", "arguments": {}}]', NOW),
    other("mistral", "no arguments mark", '[TOOL_CALLS]get_weather{"city": "P"}', weather('{"city": "P"}')),
    other("mistral_array", "names as later", "[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}", NOW, NOW),
    other("llama3", "data, not a call", '{"name": "now", "age": 3}', Text('{"name": "now", "age": 3}')),
    other("llama3", "JSON answer", '{"answer": [1, 2]}', Text('{"answer": [1, 2]}')),
    other("llama3", "spaces before data", '\n {"a": 1}', Text('\n {"a": 1}')),
    other("pythonic", "positional", "[get_weather('P', 2)]", weather('{"city":"P","days":2}')),
    other(
        "pythonic",
        "words of JSON",
        "[plan(extra=true, steps=[null, -1, (2,)])]",
        call("plan", '{"extra":true,"steps":[null,-1,[2]]}'),
    ),
    other(
        "pythonic", "three quotes", "[run(command='''a\n'b' \"\"''')]", call("run", r"""{"command":"a\n'b' \"\""}""")
    ),
    other("pythonic", "escape that Python does not know", r"[run(command='\d')]", call("run", r'{"command":"\\d"}')),
    other("pythonic", "code, not a call", "[now(x=open('a'))]", Text("[now(x=open('a'))]")),
    other("pythonic", "unknown names", "[unknown()]", Text("[unknown()]")),
    other("pythonic", "nested beyond reason", f"[now(x={'-' * 5000}1)]", Text(f"[now(x={'-' * 5000}1)]")),
    other(
        "gemma",
        "keys in quotes",
        '<|tool_call>call:get_weather{<|"|>city<|"|>:<|"|>P<|"|>}<tool_call|>',
        weather('{"city": "P"}'),
    ),
    other(
        "gemma",
        "word without quotes",
        "<|tool_call>call:get_weather{city:Paris}<tool_call|>",
        weather('{"city": "Paris"}'),
    ),
    other(
        "gemma",
        "not closed",
        '<|tool_call>call:get_weather{city:<|"|>P<|"|> and<tool_call|>x',
        weather('{"city": "P", and'),
        Text("x"),
        warns=True,
    ),
    other("gemma", "value cut short", "<|tool_call>call:get_weather{days:12", weather('{"days": 12'), reason="length"),
    other(
        "gemma",
        "deeper than anything",
        f"<|tool_call>call:plan{{extra:{'[' * 80}<tool_call|>x",
        call("plan", '{"extra": ' + "[" * 80),
        Text("x"),
        warns=True,
    ),
    other(
        "harmony",
        "recipient before the channel",
        '<|start|>assistant to=functions.get_weather<|channel|>commentary<|message|>{"city": "P"}',
        weather('{"city": "P"}'),
    ),
    other(
        "harmony",
        "tool of its own",
        '<|channel|>commentary to=browser.search<|message|>{"q": 1}<|call|>',
        Text('{"q": 1}'),
    ),
    other(
        "hermes", "brackets too many", '<tool_call>{"name": "now", "arguments": {}}}}\n</tool_call>x', NOW, Text("x")
    ),
    other("qwen_xml", "in code", "Use `<function=now>` like this", Text("Use `<function=now>` like this")),
    other("hermes", "in quotes", 'The "<tool_call>" tag', Text('The "<tool_call>" tag')),
    other(
        "qwen_xml",
        "optional text",
        "<tool_call><function=note><parameter=text>12</parameter><parameter=by>null</parameter></function></tool_call>",
        ToolCall("", "note", '{"text": "12", "by": null}'),
    ),
    other("json", "more behind it", '{"name": "now", "arguments": {}, "foo": 1}', NOW),
    other(
        "hermes",
        "two names",
        '<tool_call>{"arguments": {}, "name": "now", "name": ""}</tool_call>' + HERMES_NOW,
        NOW,
        NOW,
    ),
    other("hermes", "endless name", LONG, Text(LONG), warns=True),
    other("kimi", "endless header", ENDLESS, Text(ENDLESS), warns=True),
    other(
        "hermes",
        "calls in thoughts in calls",
        "<think>" + "<tool_call>x\n<think>\n" * 200,
        Reasoning("<tool_call>x\n<think>\n" * 200),
    ),
    other(
        "harmony",
        "an assistant in a text",
        "assistant professors earn little",
        Text("assistant professors earn little"),
    ),
    other(
        "harmony",
        "unknown tool in a thought",
        '<|channel|>analysis to=functions.nope<|message|>{"a": 1}<|end|>',
        Reasoning('{"a": 1}'),
    ),
    other(
        "glm",
        "no value",
        "<tool_call>get_weather<arg_key>city</arg_key></tool_call>x",
        weather('{"city": null}'),
        Text("x"),
        warns=True,
    ),
    other(
        "hermes",
        "not quite JSON",
        '<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>',
        call("now", '{"a": }'),
        warns=True,
    ),
    other("cohere", "newer keys", '<|START_ACTION|>[{"name": "now", "arguments": {}}]<|END_ACTION|>', NOW),
    other(
        "json", "fence of something else", 'So:\n```json\n{"a": 1}\n```\nok', Text('So:\n```json\n{"a": 1}\n```\nok')
    ),
    other("json", "fence first", '```json\n{"name": "now", "arguments": {}}\n```', NOW),
    other("json", "data with a name", '{"name": "Bob", "arguments": {}}', Text('{"name": "Bob", "arguments": {}}')),
    other("json", "array of data", "[1, 2, 3]", Text("[1, 2, 3]")),
    other(
        "internlm",
        "function* beyond reason",
        "<|action_start|><|plugin|>" + '{"function": ' * 2000,
        Text("<|action_start|><|plugin|>" + '{"function": ' * 2000),
        warns=True,
    ),
]

OTHERS = [*THOUGHTS, *CALLS]
