"""Conversations are rewritten only as far as the template requires, and nothing is lost."""

import re
from typing import cast

import msgspec
import pytest

from dragoman.core.errors import BadRequest
from dragoman.core.request import (
    GenerationRequest,
    Image,
    Message,
    Part,
    Reasoning,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolResult,
)
from dragoman.formats import FORMATS
from dragoman.formats.syntax import ModelFormat
from dragoman.prompt import ChatTemplate
from tests.prompt import families
from tests.prompt.families import CASES, hostile_request, source, special_controls

STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}</>{% endfor %}<assistant>"
)
HEADED = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</>"
    "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('system comes first') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}</>{% endfor %}<assistant>"
)
DROPPING = (
    "{% for message in messages %}{% if message.role in ('user', 'assistant') or loop.first %}"
    "<{{ message.role }}>{{ message.content }}</>{% endif %}{% endfor %}<assistant>"
)
OPEN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}<assistant>"
SHOWING = "{{ messages | tojson }}"
TEMPLATES = {"strict": STRICT, "headed": HEADED, "open": OPEN, "dropping": DROPPING}


def made(template: str, form: ModelFormat = FORMATS["hermes"]) -> ChatTemplate:
    return ChatTemplate(template, bos="", eos="", control=["<|im_end|>"], format=form)


def chat(turns: str) -> GenerationRequest:
    """Return a request with messages such as `user a, assistant b`."""
    messages = (turn.partition(" ") for turn in turns.split(", "))
    return GenerationRequest(messages=tuple(Message(cast("Role", role), (Text(text),)) for role, _, text in messages))


def shown(template: str, request: GenerationRequest, form: str = "hermes") -> str:
    return made(template, FORMATS[form]).render(request).text


SYSTEM = "<system>\n{}\n</system>"


REWRITTEN = {
    "all messages in place": (
        OPEN,
        "system s, system t, assistant a, user b, user c, system d",
        "<system>s</><system>t</><assistant>a</><user>b</><user>c</><system>d</>",
    ),
    "no system role": (STRICT, "system s, developer t, user a", "<user>s\n\nt\n\na</>"),
    "no system role and no other message": (STRICT, "system s", "<user>s</>"),
    "no system role and no user message": (STRICT, "system s, assistant a", "<user>s</><assistant>a</>"),
    "leading system messages": (HEADED, "system s, system t, user a", "<system>s\n\nt</><user>a</>"),
    "alternating roles": (
        STRICT,
        "user a, user b, assistant c, assistant, assistant d, user e",
        "<user>a\n\nb</><assistant>c\n\nd</><user>e</>",
    ),
    "leading assistant message": (STRICT, "assistant a, user b", "<user></><assistant>a</><user>b</>"),
    "late system message and alternating roles": (
        STRICT,
        "user a, assistant b, system s",
        f"<user>a\n\n{SYSTEM.format('s')}</><assistant>b</>",
    ),
    "system message between assistant messages": (
        STRICT,
        "user a, assistant b, system s, assistant c, user d",
        f"<user>a</><assistant>b\n\nc</><user>{SYSTEM.format('s')}\n\nd</>",
    ),
    **{
        f"supported by {name}": (template, "user a, assistant b, user c", "<user>a</><assistant>b</><user>c</>")
        for name, template in TEMPLATES.items()
    },
}


@pytest.mark.parametrize(("template", "turns", "expected"), REWRITTEN.values(), ids=REWRITTEN)
def test_conversation_is_rewritten_as_the_template_requires(template: str, turns: str, expected: str) -> None:
    assert shown(template, chat(turns)) == f"{expected}<assistant>"


@pytest.mark.parametrize("template", [HEADED, DROPPING])
def test_late_system_message_moves_to_adjacent_user(template: str) -> None:
    both = f"{SYSTEM.format('s')}\n\n{SYSTEM.format('t')}"
    before = shown(template, chat("user a, assistant b, system s, system t, user c"))
    assert before == f"<user>a</><assistant>b</><user>{both}\n\nc</><assistant>"
    after = shown(template, chat("user a, system s, assistant b, user c"))
    assert after == f"<user>a\n\n{SYSTEM.format('s')}</><assistant>b</><user>c</><assistant>"
    last = shown(template, chat("user a, assistant b, system s"))
    assert last == f"<user>a</><assistant>b</><user>{SYSTEM.format('s')}</><assistant>"


def test_first_rejection_is_raised_if_all_forms_fail() -> None:
    template = (
        "{% if 'x' in messages[-1].content %}{{ raise_exception('no ' + messages | length | string) }}{% endif %}"
    )
    with pytest.raises(BadRequest, match=r"^no 2$"):
        made(template).render(chat("user x, user x"))


def test_unexpected_rejection_falls_back_to_merged_messages() -> None:
    template = (
        "{% for message in messages %}{% if messages | length > 2 and message.role == loop.previtem.role %}"
        "{{ raise_exception('no') }}{% endif %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    )
    assert shown(template, chat("user a, user b, user c, assistant d")) == "<user>a\n\nb\n\nc</><assistant>d</>"


def test_content_as_a_list_of_parts() -> None:
    template = "{% for message in messages %}{% for part in message.content %}{{ part.text }};{% endfor %}{% endfor %}"
    request = GenerationRequest(messages=(Message("user", (Text("a"), Image(url="http://x/y.png"), Text("b"))),))
    assert shown(template, request) == "ab;"
    assert shown(OPEN, request) == "<user>ab</><assistant>"


CALLS = (ToolCall("call_1", "add", '{"a": 1, "b": "x"}'), ToolCall("call_2", "now", ""))


def working(*parts: Part, results: tuple[ToolResult, ...] | None = None) -> GenerationRequest:
    """A question, calls and their results."""
    given = results or tuple(ToolResult(call.id, (Text(f"r{call.id[-1]}"),)) for call in CALLS)
    return GenerationRequest(
        messages=(
            Message("user", (Text("q"),)),
            Message("assistant", parts),
            *(Message("tool", (result,)) for result in given),
        ),
        tools=(Tool("add", "adds", {"type": "object", "properties": {"a": {"type": "integer"}}}), Tool("now")),
    )


def test_unsupported_tools_calls_and_results_become_text() -> None:
    text = shown(STRICT, working(Text("Let me see."), *CALLS))
    assert text.startswith("<user>You may call these functions:\n<tools>\n")
    assert '{"type": "function", "function": {"name": "now", "description": "", ' in text
    assert '<tool_call>{"name": "NAME", "arguments": {"PARAMETER": "value"}}</tool_call>\n\nq</>' in text
    assert text.endswith(
        '<assistant>Let me see.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>\n'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call></>'
        '<user><tool_response name="add">\nr1\n</tool_response>\n\n<tool_response name="now">\nr2\n</tool_response></>'
        "<assistant>"
    )


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("plain", '{"name": "add", "arguments": {"a": 1, "b": "x"}}\n{"name": "now", "arguments": {}}'),
        ("json", '{"name": "add", "arguments": {"a": 1, "b": "x"}}\n{"name": "now", "arguments": {}}'),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": "x"}};{"name": "now", "parameters": {}}'),
        ("cohere", '[{"tool_name": "add", "parameters": {"a": 1, "b": "x"}}, {"tool_name": "now", "parameters": {}}]'),
        ("qwen_xml", "<function=add><parameter=a>\n1\n</parameter><parameter=b>\nx\n</parameter></function>"),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>"),
        ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "b": "x"}<｜tool▁call▁end｜>'),
        ("kimi", "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("gemma", '<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>'),
        ("pythonic", "[add(a=1, b='x'), now()]"),
    ],
)
def test_calls_as_text_use_the_model_format(form: str, expected: str) -> None:
    assert expected in shown(OPEN, working(*CALLS), form)


def test_format_without_call_markers_asks_for_json() -> None:
    asked = 'answer with JSON and nothing else: {"name": "NAME", "arguments": {"PARAMETER": "value"}}'
    assert asked in shown(OPEN, working(*CALLS), "plain")


def test_arguments_as_object_or_text() -> None:
    around = (
        "{{% for m in messages %}}{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{}{{% endfor %}}{{% endfor %}}"
    )
    as_object, as_text, either, pairs = (
        around.format(inner)
        for inner in (
            "{{ c.function.name }}{{ c.function.arguments | tojson }}",
            "{{ c.function.name + c.function.arguments }}",
            "{% set a = c.function.arguments %}{{ c.function.name }}{{ a if a is string else a | tojson }}",
            "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
        )
    )
    odd = ToolCall("call_1", "add", '{"a":1,   "b":"ä"}')
    assert 'qadd{"a": 1, "b": "ä"}' in shown(as_object, working(odd))
    assert 'qadd{"a":1,   "b":"ä"}' in shown(as_text, working(odd))
    assert 'qadd{"a": 1, "b": "ä"}' in shown(either, working(odd))
    assert "qadda=1;b=ä;" in shown(pairs, working(odd))
    printed = around.format("{{ c.function.name }}{{ c.function.arguments }}")
    assert 'qadd{"a":1,   "b":"ä"}' in shown(printed, working(odd))


def test_template_that_shows_calls_only_with_null_content() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}<call>{{ c.function.name + c.function.arguments }}</>{% endfor %}"
        "{% else %}<{{ m.role }}>{{ m.content }}</>{% endif %}{% endfor %}"
    )
    assert shown(template, working(*CALLS)).endswith(
        'q</><call>add{"a": 1, "b": "x"}</><call>now{}</><tool>r1</><tool>r2</>'
    )
    expected = "q</><assistant>Hm.</><call>now{}</><tool>r1</><tool>r2</>"
    assert shown(template, working(Text("Hm."), CALLS[1])).endswith(expected)


def test_invalid_arguments_are_passed_as_text() -> None:
    broken = ToolCall("call_1", "add", '{"a": ')
    assert '"arguments": "{\\"a\\": "' in shown(SHOWING, working(broken))


LLAMA3 = source("llama3")
HARMONY = source("harmony")


def test_parallel_calls_are_split_for_single_call_templates() -> None:
    text = shown(LLAMA3, working(Text("Hm."), *CALLS), "llama3")
    expected = re.findall(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n([^<]*)", text)[2:]
    assert expected == [
        ("assistant", "Hm."),
        ("assistant", '{"name": "add", "parameters": {"a": 1, "b": "x"}}'),
        ("ipython", "r1"),
        ("assistant", '{"name": "now", "parameters": {}}'),
        ("ipython", "r2"),
        ("assistant", ""),
    ]


def test_text_beside_reasoning_and_calls_joins_the_reasoning() -> None:
    text = shown(HARMONY, working(Reasoning("Think."), Text("Hm."), *CALLS), "harmony")
    assert "<|channel|>analysis<|message|>Think.\n\nHm.<|end|>" in text
    assert text.index('"b": "x"') < text.index('"r1"') < text.index("to=functions.now") < text.index('"r2"')


def test_system_message_is_shown_after_tool_results() -> None:
    case = CASES["mistral"]
    asked = working(*CALLS)
    request = msgspec.structs.replace(asked, messages=(Message("system", (Text("sys"),)), *asked.messages))
    assert "[INST]sys\n\nq[/INST]" in shown(source("mistral"), request, case.format)


@pytest.mark.parametrize("call_id", ["call_1", "abcdefgh1", "", "ü" * 40])
def test_mistral_call_ids(call_id: str) -> None:
    call = ToolCall(call_id, "add", "{}")
    text = shown(source("mistral"), working(call, results=(ToolResult(call_id, (Text("r"),)),)), "mistral_array")
    (of_call,) = re.findall(r'"id": "(.*?)"', text)
    (of_result,) = re.findall(r'"call_id": "(.*?)"', text)
    assert of_call == of_result
    assert re.fullmatch("[a-zA-Z0-9]{9}", of_call)
    assert of_call == call_id or len(call_id) != 9


def test_kimi_call_ids() -> None:
    first, again = working(*CALLS), working(CALLS[0], results=(ToolResult("call_1", (Text("r"),)),))
    request = msgspec.structs.replace(first, messages=first.messages + again.messages)
    text = shown("{{ messages | tojson }}", request, "kimi")
    assert re.findall(r'"id": "(.*?)"', text) == ["functions.add:0", "functions.now:1", "functions.add:2"]
    assert re.findall(r'"tool_call_id": "(.*?)"', text) == ["functions.add:0", "functions.now:1", "functions.add:2"]


def test_result_without_call() -> None:
    request = GenerationRequest(messages=(Message("tool", (ToolResult("unknown", (Text("r"),)),)),))
    assert '"tool_call_id": "unknown"' in shown(SHOWING, request)
    assert "r" in shown(HARMONY, request, "harmony")
    assert "[TOOL_RESULTS]" in shown(source("mistral"), request, "mistral_array")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("disk full", "Error: disk full"), ("", "Error: "), ("ERROR 5", "ERROR 5"), ('{"error": 1}', '{"error": 1}')],
)
def test_error_result_is_prefixed(text: str, expected: str) -> None:
    failed = working(CALLS[0], results=(ToolResult("call_1", (Text(text),), is_error=True),))
    assert shown(OPEN, failed).endswith(f"<tool>{expected}</><assistant>")


def test_reasoning_is_passed_only_under_the_templates_key() -> None:
    for key in ("reasoning_content", "thinking", "reasoning"):
        template = f"{{% for m in messages %}}{{{{ m.content }}}}[{{{{ m.{key} }}}}]{{% endfor %}}"
        assert shown(template, working(Reasoning("hm"))).endswith("q[][hm]r1[]r2[]")
    assert "hm" not in shown(OPEN, working(Reasoning("hm")))
    twice = "{% for m in messages %}{{ m.reasoning_content or m.reasoning }}{{ m.thinking }}{{ m.content }}{% endfor %}"
    assert shown(twice, working(Reasoning("hm"))).count("hm") == 1


def test_hidden_name_is_reported_as_ignored() -> None:
    request = GenerationRequest(messages=(Message("user", (Text("a"),), name="ann"),))
    assert made(OPEN).render(request).ignored == ("messages.name",)
    assert made(SHOWING).render(request).ignored == ()
    named_result = Message("tool", (ToolResult("c", (Text("r"),)),), name="f")
    assert made(OPEN).render(GenerationRequest(messages=(named_result,))).ignored == ()


def test_names_lost_by_merging_are_reported() -> None:
    template = STRICT.replace("<{{ message.role }}>", "<{{ message.role }} {{ message.name }}>")
    two = GenerationRequest(
        messages=(Message("user", (Text("a"),), name="ann"), Message("user", (Text("b"),), name="bob"))
    )
    assert made(template).render(two).ignored == ("messages.name",)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("form", ["hermes", "qwen_xml", "pythonic", "gemma", "kimi", "plain"])
def test_folded_content_stays_data(template: str, form: str) -> None:
    prompt = made(template, FORMATS[form]).render(hostile_request("<|im_end|>"))
    assert special_controls(prompt, ["<|im_end|>"]) == []
    assert prompt.text.count("<|im_end|>") >= 12


@pytest.mark.parametrize("name", CASES)
def test_content_stays_data_in_every_family(name: str) -> None:
    case, template = CASES[name], families.made(name)
    expected = special_controls(template.render(hostile_request("harmless")), case.control)
    for text in (*case.control, "".join(case.control), case.control[0][:-1], case.control[0][1:]):
        assert special_controls(template.render(hostile_request(text)), case.control) == expected
