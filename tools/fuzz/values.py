"""Values that tend to break things, and mutations of JSON.

A mutated body may contain `msgspec.Raw`: bytes that are written as they are, so that it need not be valid JSON.
"""

import base64
import string
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

CONTROL_TOKENS = (
    *("<|im_start|>", "<|im_end|>", "<|im_start|>system\n", "<|endoftext|>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("<|start_header_id|>", "<|eot_id|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel|>final"),
    *("<|start|>assistant", "<|message|>", "<|call|>", "<start_of_turn>", "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>"),
)
WORDS = ("hello", "weather", "in", "Paris", "the", "sky", "is", "blue", "42", "tell", "me", "a", "story", "{}", "```")
PNG = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
        "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
    )
).decode()
ADDRESSES = (
    *("http://127.0.0.1/x.png", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd", "http://[::1]/a"),
    *("data:image/png;base64," + PNG, "data:image/png;base64,é", "data:,", "data:image/png;base64,AAAA"),
    *(
        "gopher://a",
        "http://localhost:1/",
        "data:text/plain;base64,aGk=",
        "https://example.invalid/a.png",
        "//a",
        "http://",
    ),
)
TEXTS = (
    *("", " ", "a", "\x00", "a\x00b", "\n", "\r\n", "\t", "\x7f", "\x1b[31mred", "true", "null", "0", "-1", "NaN"),
    *(
        "é",
        "e\u0301",
        "😀",
        "👩‍👩‍👧",
        "中文",
        "\u202eabc",
        "\u2028",
        "\ufeff",
        "\ufffd",
        "\uffff",
        "ß",
        "ſ",
        "İ",
        "\U0010ffff",
    ),
    *(
        "../../etc/passwd",
        "/etc/passwd",
        "..\\..\\x",
        "%2e%2e%2f",
        "C:\\x",
        "a/b",
        "org/nested",
        "'; DROP TABLE keys;--",
    ),
    *("{{ 7*7 }}", "{% for x in range(10**9) %}{% endfor %}", "%s%n", "{0}", "${HOME}", "<script>", "`" * 6, '"', "\\"),
    *("(a+)+b", "[", "(?<=a)b", "a{1000000}", "\\p{L}", "start: /a/", "{", '{"a": 1}', "[1, 2]", "auto", "none", "any"),
    *("required", "user", "system", "assistant", "tool", "function", "text", "json_schema", "object", "high", "24h"),
)
INTEGERS = (
    *(0, 1, -1, 2, 3, 4, 5, 16, 20, 21, 64, 128, 129, 255, 256, 1000, 1024, 4096, 65536, 10**6, 10**9, -2, -100),
    *(2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), -(2**63) + 1),
)
FLOATS = (0.0, -0.0, 1.0, 0.5, 1.5, -1.5, 2.0, 0.1, 1e-7, 1e-40, 5e-324, 1e16, 1e38, 1e300, -1e300, 0.999999, 100.0)
RAW = tuple(
    msgspec.Raw(text)
    for text in (
        *(
            b"NaN",
            b"Infinity",
            b"-Infinity",
            b"1e999",
            b"-1e999",
            b"1E400",
            b"01",
            b"+1",
            b".5",
            b"1.",
            b"0x10",
            b"--1",
        ),
        *(
            b"18446744073709551616",
            b"-9223372036854775809",
            b"9" * 400,
            b"9" * 5000,
            b"1e-400",
            b"1" + b"0" * 300 + b".0",
        ),
        *(
            b'"\\ud800"',
            b'"\\udc00\\ud800"',
            b'"\\ud83d\\ude00"',
            b'"\xff"',
            b'"\xed\xa0\x80"',
            b'"\\x41"',
            b'"\x01"',
            b'"',
        ),
        *(
            b"tru",
            b"{",
            b"[",
            b"]",
            b"",
            b"undefined",
            b"'a'",
            b"/**/1",
            b"[1,]",
            b'{"a":1,}',
            b'{"a":1,"a":2}',
            b"{a:1}",
        ),
        *(b"[" * 70 + b"]" * 70, b'{"a":' * 70 + b"1" + b"}" * 70, b'{"a\\ud800":1}', b'"\\u0000"', b"\xef\xbb\xbf1"),
    )
)
NAMES = (
    *("model", "messages", "content", "role", "type", "text", "name", "id", "index", "input", "output", "tools", "n"),
    *("stream", "stop", "max_tokens", "temperature", "top_p", "seed", "logprobs", "user", "metadata", "function"),
    *("arguments", "parameters", "tool_calls", "tool_call_id", "call_id", "tool_use_id", "thinking", "reasoning"),
    *(
        "response_format",
        "json_schema",
        "schema",
        "properties",
        "required",
        "source",
        "data",
        "url",
        "image_url",
        "system",
    ),
    *("__proto__", "constructor", "", "a.b", "a[0]", "\n", "é", "chat_template", "chat_template_kwargs", "documents"),
)


def text(random: Random) -> str:
    kind = random.random()
    if kind < 0.4:
        return random.choice(TEXTS)
    if kind < 0.55:
        return random.choice(CONTROL_TOKENS) * random.choice((1, 1, 2))
    if kind < 0.8:
        return " ".join(random.choices(WORDS, k=random.randint(1, 12)))
    if kind < 0.85:
        return random.choice(ADDRESSES)
    if kind < 0.97:
        return "".join(
            chr(random.choice((random.randrange(128), random.randrange(0xD7FF)))) for _ in range(random.randint(1, 8))
        )
    return random.choice("aé\n\x00😀`{") * random.choice((100, 1025, 4000, 20_000))


def scalar(random: Random) -> Any:
    kind = random.random()
    if kind < 0.15:
        return random.choice((None, True, False))
    if kind < 0.45:
        return random.choice(INTEGERS)
    if kind < 0.6:
        return random.choice(FLOATS)
    if kind < 0.68:
        return random.choice(RAW)
    return text(random)


def nested(random: Random) -> Any:
    """Deep or wide. 64 levels are the limit of a body."""
    value = scalar(random)
    depth = random.choice((1, 2, 5, 30, 60, 64, 65, 100))
    as_list = random.random() < 0.5
    for _ in range(depth):
        value = [value] if as_list else {random.choice(NAMES): value}
    return value


def anything(random: Random) -> Any:
    kind = random.random()
    if kind < 0.7:
        return scalar(random)
    if kind < 0.8:
        return random.choice(([], {}, [[]], [{}], [None], {"type": "text"}, {"type": "nothing"}, [0, "", {}]))
    if kind < 0.86:
        return nested(random)
    if kind < 0.98:
        return {random.choice(NAMES): scalar(random) for _ in range(random.randint(1, 4))}
    return [random.choice((0, "a", {}, [], None))] * random.choice((33, 129, 1025, 2049, 5000))


STOP = 0.25
"""How often a random place is not looked for any deeper."""
Place = tuple[Any, Any]
"""A container, and a key or an index in it."""


def place(random: Random, root: Any) -> Place | None:
    """A random place: more likely one that is not deep."""
    node, found = root, None
    while isinstance(node, dict | list) and node:
        key = random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
        found, node = (node, key), node[key]
        if random.random() < STOP:
            break
    return found


def _drop(random: Random, node: Any, key: Any) -> None:
    del node[key]


def _replace(random: Random, node: Any, key: Any) -> None:
    node[key] = anything(random)


def _retype(random: Random, node: Any, key: Any) -> None:
    value = node[key]
    text_of = encoded(value)[:2000].decode("utf-8", "replace")
    changes: list[Any] = [[value], {"value": value}, text_of, None, {"type": value}, [value, value]]
    if isinstance(value, str):
        changes += [len(value), value.encode().hex()[:200], bool(value), list(value[:20])]
    if isinstance(value, int | float):
        changes += [float(value), -value]
    node[key] = random.choice(changes)


def _twice(random: Random, node: Any, key: Any) -> None:
    """An item once more; a key twice in one object."""
    if isinstance(node, list):
        node.insert(key, node[key])
        if random.random() < 0.1:
            node *= random.choice((2, 20, 200))
    elif isinstance(key, str):
        value = node.pop(key)
        name = msgspec.json.encode(key)
        try:
            inner = msgspec.json.encode(value)
        except (TypeError, ValueError, OverflowError):
            inner = b"1"
        node[key] = msgspec.Raw(inner + b"," + name + b":" + inner)


def _rename(random: Random, node: Any, key: Any) -> None:
    if isinstance(node, dict):
        value = node.pop(key)
        node[random.choice((random.choice(NAMES), str(key).upper(), f"{key} ", str(key) + "s"))] = value
    else:
        node.reverse()


def _add(random: Random, node: Any, key: Any) -> None:
    if isinstance(node, dict):
        node[random.choice(NAMES)] = anything(random)
    else:
        node.insert(key, anything(random))


def _alter(random: Random, node: Any, key: Any) -> None:
    """A value near the one that is there."""
    value = node[key]
    if isinstance(value, bool) or value is None:
        node[key] = random.choice((True, False, None, 0, 1))
    elif isinstance(value, int | float):
        node[key] = random.choice((value + 1, value - 1, -value, value * 1000, 0))
    elif isinstance(value, str):
        at = random.randint(0, len(value))
        node[key] = value[:at] + text(random) + value[at:]
    else:
        node[key] = anything(random)


def _swap(random: Random, node: Any, key: Any) -> None:
    other = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
    node[key], node[other] = node[other], node[key]


MUTATIONS: tuple[Callable[[Random, Any, Any], None], ...] = (
    *(_drop, _replace, _replace, _retype, _twice, _rename, _add, _alter, _alter, _swap),
)


def mutate(random: Random, root: Any, times: int) -> None:
    """In place."""
    for _ in range(times):
        found = place(random, root)
        if found is None:
            return
        random.choice(MUTATIONS)(random, *found)


def damage(random: Random, data: bytes) -> bytes:
    """Bytes with a few of them changed, removed, inserted or repeated."""
    damaged = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randint(0, len(damaged))
        kind = random.randrange(6)
        if kind == 0 and damaged:
            damaged[min(at, len(damaged) - 1)] = random.randrange(256)
        elif kind == 1:
            del damaged[at : at + random.choice((1, 2, 8, 50))]
        elif kind == 2:
            damaged[at:at] = random.randbytes(random.choice((1, 2, 8)))
        elif kind == 3:
            damaged[at:at] = damaged[at : at + random.randint(1, 30)]
        elif kind == 4:
            del damaged[at:]
        else:
            damaged[at:at] = random.choice(string.printable).encode() * random.choice((1, 2, 100))
    return bytes(damaged)


def encoded(body: Any) -> bytes:
    return msgspec.json.encode(body)


def copied(body: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(body))
