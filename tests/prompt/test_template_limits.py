"""Templates that run forever or exhaust memory fail within their limits."""

import threading
import time

import pytest

from dragoman.core.errors import ConfigError, EngineFailed
from dragoman.core.request import GenerationRequest, Message, Text
from dragoman.prompt import ChatTemplate
from dragoman.prompt.template_limits import TemplateLimitError, check_time, limit_rendering

CHAT = GenerationRequest(messages=(Message("user", (Text("hello"),)),))
MANY = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
END = "{% endfor %}{% endfor %}{% endfor %}"

SLOW = {
    "nested loops": MANY + END,
    "loops that say something": MANY + "x" + END,
    "loops that choose nothing": (
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "a loop in a block": "{% set x %}" + MANY + END + "{% endset %}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a recursive loop": "{% for a in [[1, 2, 3]] recursive %}{{ loop([1, 2, 3]) if loop.depth < 60 }}{% endfor %}",
}
GROWING = "{% set n = namespace(x=START) %}{% for i in range(60) %}MORE{% set n.x = MADE %}{% endfor %}"


def growing(start: str, made: str, more: str = "") -> str:
    return GROWING.replace("START", start).replace("MADE", made).replace("MORE", more)


LARGE = {
    "a long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "a large number": "{{ 10 ** (10 ** 10) }}",
    "a number that grows": growing("9", "n.x * n.x"),
    "a repeated text": "{{ 'x' * 10 ** 12 }}",
    "a text that doubles by +": growing("'x'", "n.x + n.x"),
    "a text that doubles by ~": growing("'x'", "n.x ~ n.x"),
    "a list that doubles": growing("[1]", "n.x + n.x"),
    "a list that is repeated": "{{ ([1] * 10 ** 12) | length }}",
    "a text that doubles in a block": growing("'x'", "y", "{% set y %}{{ n.x }}{{ n.x }}{% endset %}"),
    "much output": "{% set x = 'x' * 10 ** 7 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "replace": "{% set x = 'x' * 10 ** 7 %}{{ x.replace('x', x) }}",
    "the filter replace": "{% set x = 'x' * 10 ** 7 %}{{ x | replace('x', x) }}",
    "join": "{% set x = 'x' * 10 ** 7 %}{{ x.join(x) }}",
    "join of what is made one by one": "{{ ('x' * 10 ** 7).join(range(99999) | map('string')) }}",
    "join of attributes": "{{ ([{'x': 'x' * 10 ** 7}] * 9999) | join(attribute='x') }}",
    "the filter join": "{% set x = 'x' * 10 ** 7 %}{{ range(99999) | join(x) }}",
    "center": "{{ 'x'.center(10 ** 12) }}",
    "rjust": "{{ 'x'.rjust(10 ** 12) }}",
    "format": "{{ '{:>999999999999}'.format('x') }}",
    "format with a width": "{{ '{:>{}}'.format('x', 10 ** 12) }}",
    "the filter format": "{{ '%999999999999d' | format(1) }}",
    "% with names": "{{ '%(x)s' * 10 ** 6 % {'x': 'x' * 10 ** 7} }}",
    "% with a name and a width": "{{ '%(x)-999999999999d' % {'x': 1} }}",
    "%": "{{ '%*d' % (10 ** 12, 1) }}",
    "indent": "{{ 'x\ny' | indent(10 ** 12) }}",
    "tojson": "{{ [1] | tojson(indent=10 ** 12) }}",
    "expandtabs": "{{ '\t'.expandtabs(30000000) }}",
    "translate": "{{ ('x' * 10 ** 4).translate({120: 'x' * 10 ** 4}) | length }}",
    "a number as bytes": "{{ (5).to_bytes(100000000, 'big') | length }}",
    "a number as bytes with a name": "{{ (5).to_bytes(length=100000000, byteorder='big') | length }}",
    "a method by another way": "{{ ([5] | map(attribute='to_bytes') | first)(100000000, 'big') | length }}",
    "bytes that are repeated": "{{ ('x'.encode() * 30000000) | length }}",
    "a method of bytes": "{{ 'x'.encode().center(30000000) }}",
    "round": "{{ 1.5 | round(10 ** 7, 'ceil') }}",
    "sum": "{{ ([[1] * 10 ** 6] * 100) | sum(start=[]) | length }}",
}


TREE = "{% set m = namespace(x=START) %}{% for i in range(60) %}{% set m.x = MADE %}{% endfor %}"
LISTS, TUPLES = growing("[1]", "[n.x, n.x]"), growing("(1,)", "(n.x, n.x)")
OTHERS = TREE.replace("START", "[1]").replace("MADE", "[m.x, m.x]")
TREES = {
    "printed": LISTS + "{{ n.x }}",
    "printed inside of another": LISTS + "{{ {'a': n.x}.items() }}",
    "printed as a namespace": LISTS + "{{ n }}",
    "dicts": growing("{}", "{'a': n.x, 'b': n.x}") + "{{ n.x }}",
    "tojson": LISTS + "{{ n.x | tojson }}",
    "string": LISTS + "{{ n.x | string | length }}",
    "~": LISTS + "{{ n.x ~ 'a' }}",
    "%": LISTS + "{{ '%s' % (n.x,) }}",
    "format": LISTS + "{{ '{}'.format(n.x) }}",
    "join": LISTS + "{{ n.x | join(',') }}",
    "upper": LISTS + "{{ n.x | upper }}",
    "pprint": LISTS + "{{ n.x | pprint }}",
    "urlencode": LISTS + "{{ {'a': n.x} | urlencode }}",
    "map": LISTS + "{{ [n.x] | map('string') | list | length }}",
    "an exception": LISTS + "{{ raise_exception(n.x) }}",
    "compared": OTHERS + LISTS + "{{ n.x == m.x }}",
    "compared by a test": OTHERS + LISTS + "{{ n.x is eq(m.x) }}",
    "looked for": OTHERS + LISTS + "{{ n.x in [m.x] }}",
    "looked for by a method": OTHERS + LISTS + "{{ [m.x].index(n.x) }}",
    "sorted": OTHERS + LISTS + "{{ [n.x, m.x] | sort | length }}",
    "unique": TUPLES + "{{ [n.x] | unique | list | length }}",
    "a key": TUPLES + "{{ {n.x: 1} | length }}",
    "a key of dict": TUPLES + "{{ dict([[n.x, 1]]) | length }}",
    "a key to look up": TUPLES + "{{ {}[n.x] }}",
    "one long text many times": "{{ ([['x' * 10 ** 6] * 1000] * 1000) }}",
}
STEPS = {
    "split": "{{ ('a ' * 20000000).split() | length }}",
    "split by a word": "{{ ('a ' * 20000000).split('a') | length }}",
    "title": "{{ ('a b ' * 9000000) | title | length }}",
    "wordcount": "{{ ('a b ' * 9000000) | wordcount }}",
    "strftime_now": "{{ strftime_now('%c' * 1000000) | length }}",
}
ONLY_HELLO = "{%% if messages[0].content == 'hello' %%}%s{%% endif %%}"
"""Exceeds a limit only for the conversation `CHAT`, not for the examples at load time."""


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_rendering_time_limit(source: str) -> None:
    template = ChatTemplate(ONLY_HELLO % source, bos="", eos="", control=[], seconds=0.3)
    with pytest.raises(EngineFailed, match=r"the model's chat template failed: limit exceeded: more than 0\.3 s"):
        template.render(CHAT)


def test_time_of_other_threads_does_not_count() -> None:
    with limit_rendering(0.2):
        time.sleep(0.5)
        assert check_time()
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass
        with pytest.raises(TemplateLimitError, match=r"more than 0\.2 s"):
            check_time()


@pytest.mark.parametrize("source", (LARGE | TREES | STEPS).values(), ids=LARGE | TREES | STEPS)
def test_rendering_size_limit(source: str) -> None:
    template = ChatTemplate(ONLY_HELLO % source, bos="", eos="", control=[], seconds=20)
    with pytest.raises(EngineFailed, match="the model's chat template failed") as failure:
        template.render(CHAT)
    assert "more than 20 s" not in failure.value.message


@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_slow_template_is_rejected(source: str) -> None:
    with pytest.raises(ConfigError, match=r"the chat template exceeds a limit for a short example: more than 0\.5 s"):
        ChatTemplate(source, bos="", eos="", control=[], seconds=0.1)


HOARDS = {
    "texts": "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = n.x + ['x' * 10000000] %}{% endfor %}",
    "lists": "{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = n.x + [[1] * 1000000] %}{% endfor %}",
}


@pytest.mark.parametrize("source", (LARGE | TREES | STEPS | HOARDS).values(), ids=LARGE | TREES | STEPS | HOARDS)
def test_template_that_exhausts_memory_is_rejected(source: str) -> None:
    message = failure_of(source)
    assert message.startswith(("the chat template exceeds a limit ", "the model's chat template failed: "))
    assert "more than 20 s" not in message
    assert "more than 100 s" not in message


def failure_of(source: str) -> str:
    """Return the error at load time if the template exceeds a limit, or at rendering if Python itself refuses."""
    try:
        ChatTemplate(source, bos="", eos="", control=[], seconds=20).render(CHAT)
    except (ConfigError, EngineFailed) as error:
        return str(error)
    return ""


INVALID = {
    "a long text": ("x" * 300_000, "has 300000 characters, more than 262144"),
    "parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is nested too deeply"),
    "many loops": ("{% for a in [1] %}" * 100 + "{% endfor %}" * 100, "cannot be compiled"),
    "a long number": ("{{ " + "9" * 5000 + " }}", "cannot be compiled"),
    "a macro without end": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recurses without end"),
}


@pytest.mark.parametrize(("source", "message"), INVALID.values(), ids=INVALID)
def test_invalid_template_is_rejected(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"the chat template {message}"):
        ChatTemplate(source, bos="", eos="", control=[])


def test_ordinary_operations_work_within_limits() -> None:
    source = (
        "{{ 2 * 3 + 2 ** 8 }} {{ 'ab' * 3 }} {{ '%s-%05d' % ('a', 12345678) }} {{ '{}:{:>4}'.format('k', 1) }} "
        "{{ ['a', 'b'] | join('/') }} {{ ','.join(['a', 'b']) }} {{ 'a-b' | replace('-', '+') }} {{ 1 ~ 'x' ~ none }} "
        "{{ 'x\ny' | indent(2) }} {{ 'a b'.split() | length }} {{ 'x'.rjust(3) }} "
        "{{ [{'n': 1}] | map(attribute='n') | join }} "
        "{{ [{'n': 'a'}, {'n': 'b'}] | join('+', attribute='n') }} {{ '%(k)s' % {'k': 1} }} "
        "{{ 2.345 | round(1) }} {{ [1, 2] | sum }}"
    )
    template = ChatTemplate(source, bos="", eos="", control=[])
    assert template.render(CHAT).text == "262 ababab a-12345678 k:   1 a/b a,b a+b 1xNone x\n  y 2   x 1 a+b 1 2.3 3"


def test_time_limit_is_per_rendering() -> None:
    source = "{% for i in range(99999) %}{% if messages[0].content != 'slow' %}{% break %}{% endif %}" + MANY + END
    template = ChatTemplate(source + "{% endfor %}done", bos="", eos="", control=[], seconds=0.5)
    slow = GenerationRequest(messages=(Message("user", (Text("slow"),)),))
    failures: list[EngineFailed] = []

    def fail() -> None:
        with pytest.raises(EngineFailed) as caught:
            template.render(slow)
        failures.append(caught.value)

    threads = [threading.Thread(target=fail) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert template.render(CHAT).text == "done"
    for thread in threads:
        thread.join()
    assert len(failures) == 2
    assert template.render(CHAT).text == "done"


def test_long_conversation_renders_quickly() -> None:
    source = "{% for message in messages %}<{{ message.role }}>{{ message.content ~ '\n' }}{% endfor %}"
    messages = tuple(Message("user" if i % 2 else "assistant", (Text("word " * 200),)) for i in range(10_000))
    start = time.process_time()
    prompt = ChatTemplate(source, bos="", eos="", control=["<|im_end|>"], seconds=60).render(
        GenerationRequest(messages=messages)
    )
    assert time.process_time() - start < 5
    assert len(prompt.text) > 10_000_000
