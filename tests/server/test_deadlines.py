"""Deadlines of requests."""

import time

from tests.support.requests import CHAT, HELLO, ask, refused, talking
from tests.support.server_process import Running, server_fixture

ENDLESS = {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 4000}]}
MODELS = {"echo": {"engine": "scripted"}, "endless": ENDLESS, "single": ENDLESS | {"slots": 1}}


hasty = server_fixture({"models": MODELS, "limits": {"request_seconds": 1}})


def test_request_deadline(hasty: Running) -> None:
    with talking(hasty) as client:
        began = time.monotonic()
        refused(ask(client, CHAT, model="endless"), 504, code="deadline_exceeded")
        assert time.monotonic() - began > 0.9
        body = {"model": "endless", "messages": HELLO, "stream": True}
        text = client.post(CHAT, json=body).text
        assert "longer than 1 s" in text
        assert "[DONE]" not in text
        reply = client.post("/v1/messages", json={"model": "endless", "messages": HELLO, "max_tokens": 4000})
        assert reply.status_code == 504
        assert reply.json()["error"]["type"] == "timeout_error"


def test_client_shortens_deadline(hasty: Running) -> None:
    with talking(hasty, {"x-dragoman-timeout": "0.3"}) as client:
        assert "longer than 0.3 s" in refused(ask(client, CHAT, model="endless"), 504, code="deadline_exceeded")
    with talking(hasty, {"x-dragoman-timeout": "100"}) as client:
        refused(ask(client, CHAT, model="endless"), 504, code="deadline_exceeded")
    for wrong in ("soon", "0", "-1", "nan", "inf"):
        with talking(hasty, {"x-dragoman-timeout": wrong}) as client:
            refused(ask(client, CHAT), 400)


def test_deadline_includes_queue_time(hasty: Running) -> None:
    body = {"model": "single", "messages": HELLO, "stream": True}
    patience = {"x-dragoman-timeout": "0.4"}
    with talking(hasty) as one, talking(hasty, patience) as other, one.stream("POST", CHAT, json=body) as stream:
        assert next(stream.iter_lines())
        refused(ask(other, CHAT, model="single"), 504, code="deadline_exceeded")
