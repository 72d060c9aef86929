"""The requests of the mixed soak test, and when a reply is complete.

A reply is one of
    answered   complete: every choice has a finish reason, and a reply with a schema fits it
    refused    a 4xx with a message, to a request that must be refused
    busy       a 429 or 503 with a message: the server has no room
    wrong      any other reply: another error, an answer to a bad request, JSON that does not fit its schema
    lost       a reply without its end
"""

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

MODEL = "smollm2"
TOPICS = ("rivers", "bread", "clocks", "the moon", "old maps", "bees", "a lighthouse", "chess", "winter", "salt")
RULES = [
    f"You work for the {place}. " + "Answer politely, briefly and only from what you know. " * 12
    for place in ("library", "harbour", "museum")
]
"""Prefixes that many prompts share."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LOOKUP = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 12}}, "required": ["word"]}

Body = dict[str, Any]
STREAM: Body = {"stream": True}


class Kind(NamedTuple):
    name: str
    path: str
    body: Callable[[Random], Body | bytes]
    refused: bool = False
    """Whether the request must be refused."""
    leaves: bool = False
    """Whether the client disconnects before the end."""


class Outcome(NamedTuple):
    name: str
    message: str = ""


def question(random: Random) -> str:
    return f"Say one sentence about {random.choice(TOPICS)}, number {random.randrange(10**6)}."


def chat(random: Random, text: str | None = None) -> Body:
    messages = [{"role": "user", "content": text or question(random)}]
    return {"model": MODEL, "messages": messages, "max_tokens": random.randint(4, 32)}


def long_chat(random: Random) -> Body:
    asked = chat(random)
    messages = [{"role": "system", "content": random.choice(RULES)}, *asked["messages"]]
    return asked | STREAM | {"messages": messages}


def sometimes(random: Random) -> Body:
    return STREAM if random.random() < 0.5 else {}


def shaped(random: Random) -> Body:
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    return chat(random, "Invent a person.") | sometimes(random) | {"response_format": shape, "max_tokens": 120}


def tools(random: Random) -> Body:
    function = {"name": "lookup", "description": "Look a word up.", "parameters": LOOKUP, "strict": True}
    offered = [{"type": "function", "function": function}]
    return chat(random) | sometimes(random) | {"tools": offered, "tool_choice": "required", "max_tokens": 120}


def message(random: Random) -> Body:
    return chat(random) | {"system": random.choice(RULES)}


def response(random: Random) -> Body:
    return {"model": MODEL, "input": question(random), "max_output_tokens": random.randint(16, 32)}


def vectors(random: Random) -> Body:
    return {"model": MODEL, "input": [question(random) for _ in range(random.randint(1, 3))]}


def mistaken(random: Random) -> Body | bytes:
    mistakes: list[Body | bytes] = [
        b'{"model": "smollm2", "messages": [',
        b"\xff\xfe",
        {"model": MODEL},
        chat(random) | {"model": "nobody"},
        chat(random) | {"temperature": "warm"},
        chat(random) | {"messages": [{"role": "stranger", "content": "hello"}]},
        chat(random, "word " * 3000),
        chat(random) | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
    ]
    return random.choice(mistakes)


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
MIX = (
    Kind("chat", CHAT, chat),
    Kind("chat, stream", CHAT, lambda random: chat(random) | STREAM),
    Kind("chat, long prompt", CHAT, long_chat),
    Kind("chat, n=2", CHAT, lambda random: chat(random) | sometimes(random) | {"n": 2}),
    Kind("chat, schema", CHAT, shaped),
    Kind("chat, tools", CHAT, tools),
    Kind("messages", MESSAGES, message),
    Kind("messages, stream", MESSAGES, lambda random: message(random) | STREAM),
    Kind("responses", RESPONSES, response),
    Kind("responses, stream", RESPONSES, lambda random: response(random) | STREAM),
    Kind("embeddings", "/v1/embeddings", vectors),
    Kind("bad request", CHAT, mistaken, refused=True),
    Kind("leaves a stream", CHAT, lambda random: long_chat(random) | {"max_tokens": 200}, leaves=True),
    Kind("leaves a reply", MESSAGES, lambda random: message(random) | {"max_tokens": 200}, leaves=True),
)


def outcome(kind: Kind, asked: Body | bytes, status: int, body: bytes) -> Outcome:
    try:
        if status != 200:
            return _error(kind, status, json.loads(body)["error"]["message"])
        if kind.refused or isinstance(asked, bytes):
            return Outcome("wrong", f"a bad request was answered: {asked!r:.200}")
        streamed = bool(asked.get("stream"))
        frames = _frames(body) if streamed else [json.loads(body)]
        failed = next((frame["error"] for frame in frames if frame.get("error")), None)
        if failed is not None:
            return Outcome("wrong", f"an error frame: {failed['message']}")
        return READERS[kind.path](asked, frames, body)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        return Outcome("lost", f"{status} with a body that cannot be read ({error!r}): {body[-200:]!r}")


def _error(kind: Kind, status: int, message: str) -> Outcome:
    if status in (429, 503):
        return Outcome("busy", message)
    if kind.refused and 400 <= status < 500:
        return Outcome("refused", message)
    return Outcome("wrong", f"{status} {message}")


def _frames(body: bytes) -> list[Any]:
    lines = (line[5:].strip() for line in body.split(b"\n") if line.startswith(b"data:"))
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def _chat(asked: Body, frames: Sequence[Any], body: bytes) -> Outcome:
    choices = [choice for frame in frames for choice in frame["choices"]]
    ended = {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    if len(ended) != asked.get("n", 1) or (asked.get("stream") and not body.endswith(b"data: [DONE]\n\n")):
        return Outcome("lost", f"a reply without its end: {body[-200:]!r}")
    said = [choice.get("delta") or choice.get("message") or {} for choice in choices]
    if "response_format" in asked and ended[0] == "stop":
        return _kept("".join(part.get("content") or "" for part in said), PERSON)
    if "tools" in asked and ended[0] == "tool_calls":
        return _calls([call for part in said for call in enumerate(part.get("tool_calls") or ())])
    return Outcome("answered")


def _calls(pieces: Sequence[tuple[int, Any]]) -> Outcome:
    """In a stream a piece has the index of its call; in a whole reply its position is the index."""
    arguments: dict[int, str] = {}
    for place, piece in pieces:
        at = piece.get("index", place)
        arguments[at] = arguments.get(at, "") + piece["function"].get("arguments", "")
    found = [_kept(text, LOOKUP) for text in arguments.values()]
    return next((each for each in found if each.name != "answered"), found[0])


def _kept(text: str, schema: Mapping[str, Any]) -> Outcome:
    """Check as much of the schema as shows that it was enforced."""
    try:
        found = json.loads(text)
    except ValueError:
        return Outcome("wrong", f"not JSON: {text!r:.200}")
    kept = isinstance(found, dict) and set(schema["required"]) <= set(found)
    return Outcome("answered") if kept else Outcome("wrong", f"not of its shape: {text!r:.200}")


def _message(asked: Body, frames: Sequence[Any], body: bytes) -> Outcome:
    whole = frames[-1]["type"] == "message_stop" if asked.get("stream") else bool(frames[0]["stop_reason"])
    return Outcome("answered") if whole else Outcome("lost", f"a message without its end: {body[-200:]!r}")


def _response(asked: Body, frames: Sequence[Any], body: bytes) -> Outcome:
    last = frames[-1]["response"] if asked.get("stream") else frames[0]
    whole = last["status"] in ("completed", "incomplete")
    return Outcome("answered") if whole else Outcome("lost", f"a response without its end: {body[-200:]!r}")


def _vectors(asked: Body, frames: Sequence[Any], body: bytes) -> Outcome:
    whole = len(frames[0]["data"]) == len(asked["input"]) and all(entry["embedding"] for entry in frames[0]["data"])
    return Outcome("answered") if whole else Outcome("lost", "vectors are missing")


READERS: Mapping[str, Callable[[Body, Sequence[Any], bytes], Outcome]] = {
    CHAT: _chat,
    MESSAGES: _message,
    RESPONSES: _response,
    "/v1/embeddings": _vectors,
}
