"""Target `templates`: chat templates, real ones and generated, with any conversation.

A template is refused, fails, or makes a prompt, within its time. Content never becomes a control token: a conversation
with the texts of control tokens has the same control tokens in its prompt as one with other texts in their place.
"""

import functools
from random import Random
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest, ConfigError, DragomanError
from dragoman.core.request import GenerationRequest
from dragoman.formats import FORMATS
from dragoman.prompt import ChatTemplate, Prompt
from dragoman.protocols.registry import PROTOCOLS
from tools.fuzz import bodies, values
from tools.fuzz.cases import random_for
from tools.fuzz.shapes import Wrong
from tools.fuzz.state import ROOT

CONTROL = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<s>", "</s>", "[INST]", "<|end|>", "<start_of_turn>", "<eos>")
PLAIN = tuple("~" * len(text) for text in CONTROL)
SECONDS = 0.5
PIECES = (
    "{{ messages }}",
    "{{ messages[0].content }}",
    "{{ messages[99].content }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{{ m.role + m.content }}",
    "{% if tools %}",
    "{% endif %}",
    "{{ tools | tojson }}",
    "{% set ns = namespace(x='') %}",
    "{% set ns.x = ns.x + ns.x + 'a' %}",
    "{{ ns.x }}",
    "{{ raise_exception('no') }}",
    "{{ strftime_now('%Y') }}",
    "{{",
    "{{ ''.__class__.__mro__ }}",
    "{{ self }}",
    "{{ cycler }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
    "{% raw %}",
    "{{ 'x' * 10**9 }}",
    "{{ range(10**9) | list | length }}",
    "{% for i in range(99999) %}",
    "{{ 9**9**9 }}",
    "{#",
    "{{ m.content | upper | replace('a', 'b' * 1000) }}",
    "{{ m.tool_calls[0].function.arguments | tojson(indent=2) }}",
    "<|im_start|>",
    "<|im_end|>\n",
    "{{ bos_token }}",
    "{{ eos_token }}",
    "{{ '<|im_' + 'end|>' }}",
    "{{ m.content[::-1] }}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{{ '%10000000s' % 'x' }}",
    "{{ '{:>99999999}'.format(1) }}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% break %}",
    "{{ undefined.x.y }}",
    "{{ 1/0 }}",
    "{{ [1,2]|sum }}",
    "\x00",
    "{{ messages | map(attribute='content') | join('<|im_end|>') }}",
    "{{ messages | groupby('role') | list }}",
    "{% else %}",
    "{{ enable_thinking }}",
    "{{ documents }}",
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "}}",
    "{% for a in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
    "{{ lipsum(1000) }}",
    "{{ dict(a=1).items() | list }}",
)


@functools.cache
def real() -> tuple[str, ...]:
    return tuple(file.read_text() for file in sorted((ROOT / "tests" / "prompt" / "templates").glob("*.jinja")))


def case(seed: str, number: int) -> Any:
    random = random_for("templates", seed, number)
    kind = random.random()
    template: str | int
    if kind < 0.4:
        template = random.randrange(len(real()))
    elif kind < 0.7:
        template = "".join(random.choices(PIECES, k=random.randint(1, 8)))
    else:
        template = real()[random.randrange(len(real()))]
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(template))
            cut = random.choice((0, 1, 10, 200))
            template = template[:at] + random.choice((*PIECES, "", "")) + template[at + cut :]
    body = bodies.chat(random)
    body.pop("chat_template_kwargs", None)
    body = values.copied(body)
    if random.random() < 0.3:
        values.mutate(random, body, random.randint(1, 3))
    return {
        "template": template,
        "body": values.encoded(body).decode("utf-8", "replace"),
        "format": random.choice(list(FORMATS)),
        "words": [random.choice(CONTROL) for _ in range(3)],
    }


def _loaded(value: Any) -> ChatTemplate:
    source = real()[value["template"]] if isinstance(value["template"], int) else value["template"]
    return ChatTemplate(
        source, bos="<s>", eos="</s>", control=CONTROL, format=FORMATS[value["format"]], seconds=SECONDS
    )


def _decoded(text: str) -> GenerationRequest:
    return PROTOCOLS["chat"].decode(text.encode())


def check(value: Any) -> str:
    try:
        template = _loaded(value)
    except ConfigError:
        return "refused"
    try:
        request = _decoded(value["body"])
    except DragomanError:
        return "bad request"
    try:
        prompt = template.render(request)
    except BadRequest:
        return "not taken"
    except DragomanError as error:
        if "chat template failed" not in error.message:
            raise Wrong(f"{type(error).__name__}: {error.message[:300]}") from error
        if isinstance(value["template"], int):
            raise Wrong(f"a real template fails: {error.message[:300]}") from error
        return "failed"
    if isinstance(value["template"], int):
        _check_content(template, request, Random(value["body"]))
    return "rendered" if prompt.segments else "empty"


def _check_content(template: ChatTemplate, request: GenerationRequest, random: Random) -> None:
    """The same conversation with and without control texts in its contents has the same control tokens."""
    at = random.randrange(len(CONTROL))
    with_control = _with_text(request, f"a{CONTROL[at]}b")
    without = _with_text(request, f"a{PLAIN[at]}b")
    try:
        first, second = template.render(with_control), template.render(without)
    except DragomanError:
        return
    if _control_tokens(first) != _control_tokens(second):
        raise Wrong(f"content became a control token: {CONTROL[at]} in {first.text[:300]!r}")


def _with_text(request: GenerationRequest, text: str) -> GenerationRequest:
    """Every text of the conversation is this one."""
    messages = []
    for message in request.messages:
        parts = tuple(
            msgspec.structs.replace(part, text=text) if hasattr(part, "text") else part for part in message.parts
        )
        messages.append(msgspec.structs.replace(message, parts=parts))
    return msgspec.structs.replace(request, messages=tuple(messages))


def _control_tokens(prompt: Prompt) -> list[int]:
    text = "\x00".join(segment.text for segment in prompt.segments if segment.special)
    return [text.count(token) for token in CONTROL]
