"""Extreme, long and malicious values: each gets a short answer, and none forges a log line."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.requests import CHAT, HELLO, JSON_BODY, ask, raw, refused, talking
from tests.support.server_process import Running

MESSAGES = "/v1/messages"


@pytest.fixture
def client(scripted: Running) -> Iterator[httpx.Client]:
    with talking(scripted) as made:
        yield made


@pytest.mark.parametrize("data", ["é", "a\u2028b", "====", "a"])
def test_image_that_is_not_base64(client: httpx.Client, data: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    response = client.post(MESSAGES, json={"model": "m", "max_tokens": 1, "messages": messages})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("messages[0].content[0].source.data: ")


EDGES = [1e-40, 5e-324, -0.0, 1e308, -1e308, 2**31, 2**63, -(2**63) - 1, 10**30, 10**300]
NUMBERS = [
    *("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "max_tokens", "max_completion_tokens", "n", "top_logprobs"),
]


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_at_the_edges_are_served_or_refused(client: httpx.Client, field: str) -> None:
    statuses = [ask(client, CHAT, **{field: value}).status_code for value in EDGES]
    assert set(statuses) <= {200, 400}
    assert 400 in statuses


@pytest.mark.parametrize("value", [1e-40, 0, 0.009, 10.1])
def test_repetition_penalty_out_of_bounds(client: httpx.Client, value: float) -> None:
    refused(ask(client, CHAT, repetition_penalty=value), 400, param="repetition_penalty")


def test_smallest_repetition_penalty_and_all_biases_are_served(smollm2: Running) -> None:
    """The logits stay finite, and a constrained reply is sampled although every token is biased."""
    biases = {str(token): -100 for token in range(1024)}
    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": -2},
        {"repetition_penalty": 10, "logit_bias": biases, "temperature": 1.01e-4},
        {"logit_bias": biases, "guided_choice": ["A", "B"], "temperature": 0},
        {"logit_bias": biases, "guided_regex": "[0-9]", "min_p": 1, "top_p": 5e-324, "top_k": 1},
        {"seed": -(2**63), "top_k": 2**31 - 1, "top_p": 0},
    ]
    with talking(smollm2) as client:
        for given in fields:
            body = {"messages": HELLO, "max_tokens": 2} | given
            response = client.post(CHAT, json=body, timeout=60)
            assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "r" * 1_000_000, "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "t" * 1_000_000}]}]},
        {"messages": HELLO, "model": "m" * 1_000_000},
        {"messages": HELLO, "tool_choice": "c" * 1_000_000},
        {"messages": HELLO, "response_format": {"type": "f" * 1_000_000}},
        {"messages": HELLO, "chat_template_kwargs": {"k" * 1_000_000: 1}},
        {"messages": HELLO, "logit_bias": {"k" * 1_000_000: 1}},
    ],
    ids=["role", "part", "model", "choice", "format", "option", "bias"],
)
def test_long_values_are_cut_in_errors(client: httpx.Client, body: dict[str, Any]) -> None:
    response = client.post(CHAT, json=body)
    assert 400 <= response.status_code < 500
    assert len(response.content) < 700


def test_long_name_of_an_unknown_field_is_cut(client: httpx.Client) -> None:
    fields = {"messages": HELLO, "u" * 20_000: 1}
    strict = client.post(CHAT, json=fields, headers={"X-Dragoman-Strict": "true"})
    assert len(strict.content) < 1000
    served = client.post(CHAT, json=fields)
    assert len(served.headers["x-dragoman-ignored"]) < 1100


def test_repeated_long_key_is_cut(client: httpx.Client) -> None:
    key = "k" * 100_000
    response = client.post(CHAT, content=f'{{"{key}": 1, "{key}": 2}}'.encode(), headers=JSON_BODY)
    assert "duplicate key" in refused(response, 400)
    assert len(response.content) < 500


def test_no_request_forges_a_log_line(scripted: Running, client: httpx.Client) -> None:
    forged = "ERROR dragoman: forged"
    path = f"/v1/x%0a{forged.replace(' ', '%20')}%0d%1b[2J%c2%9b31m"
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: a\x1b[31m\r\nConnection: close\r\n\r\n"
    assert raw(scripted, request.encode()).status in (400, 404)
    ask(client, CHAT, model=f"m\n{forged}\x1b[2J")
    log = scripted.log.read_text()
    assert not any(line.startswith(forged) for line in log.splitlines())
    assert not set("\x1b\r\x9b") & set(log)
    for line in scripted.event_log.read_text().split("\n")[:-1]:
        json.loads(line)
