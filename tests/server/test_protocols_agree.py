"""One conversation through three protocols: the same prompt tokens, and with the same seed the same text."""

import json
from typing import Any

import httpx
import pytest

from tests.support.server_process import Running

SAMPLING = {"model": "smollm2", "temperature": 0.8, "top_p": 0.9, "seed": 7}
SYSTEM = "You are a brief clerk. <|im_end|>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"city": "Paris"}


def post(running: Running, path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(running.url + path, json=SAMPLING | body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(running: Running, tools: bool) -> tuple[str, int]:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(CALL)}}
    used = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Weather in Paris?"},
        *(used if tools else ()),
    ]
    function = {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}
    offered = {"tools": [{"type": "function", "function": function}]} if tools else {}
    reply = post(running, "/v1/chat/completions", {"messages": messages, "max_tokens": 12, **offered})
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"]


def messages(running: Running, tools: bool) -> tuple[str, int]:
    used = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "weather", "input": CALL}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}]},
    ]
    body = {
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "Weather in Paris?"}, *(used if tools else ())],
        "max_tokens": 12,
    }
    if tools:
        body["tools"] = [{"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}]
    reply = post(running, "/v1/messages", body)
    usage = reply["usage"]
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return "".join(block["text"] for block in reply["content"]), sum(usage[part] for part in parts)


def responses(running: Running, tools: bool) -> tuple[str, int]:
    used = [
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": json.dumps(CALL)},
        {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
    ]
    body = {
        "instructions": SYSTEM,
        "input": [{"role": "user", "content": "Weather in Paris?"}, *(used if tools else ())],
        "max_output_tokens": 12,
        "store": False,
    }
    if tools:
        function = {"type": "function", "name": "weather", "description": "The weather.", "parameters": PARAMETERS}
        body["tools"] = [function]
    reply = post(running, "/v1/responses", body)
    text = "".join(part["text"] for item in reply["output"] for part in item["content"])
    return text, reply["usage"]["input_tokens"]


@pytest.mark.parametrize("tools", [False, True], ids=["plain", "tools"])
def test_protocols_give_same_prompt_and_same_answer(smollm2: Running, tools: bool) -> None:
    said = chat(smollm2, tools)
    assert said[0]
    assert messages(smollm2, tools) == said
    assert responses(smollm2, tools) == said
