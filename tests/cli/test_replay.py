"""`dragoman replay`, run as a command."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from dragoman.cli import main
from dragoman.recordings.recorded_exchange import RecordedExchange, read_recording
from tests.support.requests import CHAT, eventually, talking
from tests.support.server_process import Running, serving

SERVED = {
    "models": {
        "new": {
            "engine": "scripted",
            "replies": [
                {"match": "weather", "calls": [{"name": "get_weather", "arguments": {"city": "Bonn", "days": 1}}]},
                {"match": "fails", "error": {"status": 429, "message": "slow down"}},
                {"output": "It is sunny in Bonn, and warm."},
            ],
        },
        "old": {"engine": "scripted"},
    }
}
OLD_TEXT = "It is sunny in Paris, and warm."
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("replay"), SERVED) as running:
        yield running


def exchange(text: str = OLD_TEXT, calls: Sequence[Any] = (), said: str = "hello", **fields: Any) -> dict[str, Any]:
    """A recorded chat; `fields` are those of the request, besides some of the exchange."""
    message = {"role": "assistant", "content": text, "tool_calls": list(calls)}
    reply = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}]}
    own = {name: fields.pop(name) for name in RecordedExchange.__struct_fields__ if name in fields}
    request = {"model": "new", "messages": [{"role": "user", "content": said}], **fields}
    known = {"time": 1.0, "id": "chatcmpl-1", "method": "POST", "path": CHAT, "status": 200, "duration": 0.5}
    return {**known, "model": "old", "request": request, "reply": reply, **own}


def recording(folder: Path, *exchanges: dict[str, Any]) -> str:
    file = folder / "recording.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in exchanges))
    return str(file)


def report(file: str, server: Running, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Any]:
    code = main(["replay", file, "--url", server.url, "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


GREEDY: dict[str, Any] = {"temperature": 0}
SAME_CALL = {"calls": [call('{"days": 1, "city": "Bonn"}')], "text": "", "said": "weather", "tools": [TOOL]}
OTHER_CALL = SAME_CALL | {"calls": [call('{"days": 2, "city": "Bonn"}')]}
RESPONSE = {"id": "resp_2", "object": "response", "status": "completed", "output": []}
ERROR = {"error": {"message": "slow", "type": "requests", "code": "rate_limit_exceeded"}}
VERDICTS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "the same text": ({"text": "It is sunny in Bonn, and warm.", **GREEDY}, "same", []),
    "another sampled text": ({}, "similar", ["text"]),
    "another greedy text": (GREEDY, "differs", ["text"]),
    "another seeded text": ({"seed": 1}, "differs", ["text"]),
    "the same call": (SAME_CALL | GREEDY, "same", []),
    "other arguments": (OTHER_CALL | GREEDY, "differs", ["calls"]),
    "other sampled arguments": (OTHER_CALL, "similar", ["calls"]),
    "an error instead of a text": ({"said": "this fails"}, "failed", ["status"]),
    "the same error": ({"said": "this fails", "status": 429, "reply": ERROR}, "same", []),
    "a text instead of an error": ({"status": 429, "reply": ERROR}, "differs", ["status"]),
    "a sampled compaction": (
        {"path": "/v1/responses/compact", "request": {"model": "new", "input": "a"}, "reply": {"output": []}},
        "similar",
        ["body"],
    ),
    "the vectors of a model": (
        {"path": "/v1/embeddings", "request": {"model": "new", "input": "a"}, "reply": {"data": []}},
        "differs",
        ["body"],
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_verdict_and_differences_of_a_replayed_exchange(
    case: str, server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, verdict, differing = VERDICTS[case]
    code, shown = report(recording(tmp_path, exchange(**fields)), server, capsys)
    (entry,) = shown["exchanges"]
    comparison = entry["comparison"]
    assert (comparison["verdict"], [found["field"] for found in comparison["differences"]]) == (verdict, differing)
    assert code == (verdict in ("differs", "failed"))
    assert (comparison["similarity"] is not None) == (verdict == "similar")


def test_exact_comparison_of_sampled_replies(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = report(recording(tmp_path, exchange()), server, capsys, "--exact")
    assert (code, shown["summary"]) == (1, {"differs": 1, "skipped": 0})


def test_other_model_is_asked(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recording(tmp_path, exchange("hello", **GREEDY))
    assert report(file, server, capsys)[0] == 1
    code, shown = report(file, server, capsys, "--model", "old")
    assert (code, shown["exchanges"][0]["model"]) == (0, "old")


def test_differences_are_shown_side_by_side(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    long = "The weather report follows. " * 4
    file = recording(tmp_path, exchange(), exchange(long + OLD_TEXT, **GREEDY), exchange(disconnected=True))
    assert main(["replay", file, "--url", server.url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1  /v1/chat/completions  old  similar (0.857): text  0.500 s -> ")
    assert lines[1].split() == ["recorded", "now"]
    assert lines[2].split(maxsplit=1)[0] == "text"
    assert lines[2].index("It is sunny in Paris") < lines[2].index("It is sunny in Bonn")
    assert "2  /v1/chat/completions  old  differs: text" in "\n".join(lines)
    assert "3  /v1/chat/completions  old  skipped: its client left" in lines
    assert "3 requests: 1 similar, 1 differs, 1 skipped" in lines
    assert lines[-2].split()[:3] == ["whole", "reply,", "median"]


def test_times_of_streams_are_compared(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = (
        "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}) + "\n\n"
        for delta, reason in (({"content": "It is"}, None), ({}, "stop"))
    )
    pieces = [[0.1, ": keep-alive\n\n"], [0.25, first], [0.4, last + "data: [DONE]\n\n"]]
    entry = exchange(stream=pieces, request={"model": "new", "stream": True, "messages": []}, reply=None)
    entry["request"]["messages"] = [{"role": "user", "content": "hello"}]
    _, shown = report(recording(tmp_path, entry), server, capsys)
    recorded, now = shown["exchanges"][0]["recorded"], shown["exchanges"][0]["now"]
    assert (recorded["first_token"], recorded["total"]) == (0.25, 0.5)
    assert 0 < now["first_token"] <= now["total"]
    assert now["usage"] is None or now["usage"]["completion_tokens"] > 0


def test_lines_can_be_chosen(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recording(tmp_path, *[exchange(said=f"message {at}") for at in range(6)])
    for flags, numbers in (
        (["--only", "2,4-5"], [2, 4, 5]),
        (["--only", "2,4-5", "--limit", "2"], [2, 4]),
        (["--limit", "1"], [1]),
        (["--concurrency", "3"], [1, 2, 3, 4, 5, 6]),
    ):
        _, shown = report(file, server, capsys, *flags)
        assert [entry["number"] for entry in shown["exchanges"]] == numbers


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "http://127.0.0.1:1"], "no answer: [Errno 111] Connection refused"),
        (["--only", "x"], "--only x: expected numbers of lines such as 3,7-9"),
        (["--only", "9"], "has no exchanges to send"),
        (["--limit", "0"], "--limit 0: expected at least 1"),
        (["--concurrency", "0"], "--concurrency 0: expected 1 to 1000"),
        (["--to-script", "--only", "9"], "has no reply for a script"),
        (["--to-script", "/nowhere/x.yaml"], "cannot write /nowhere/x.yaml: No such file or directory"),
    ],
)
def test_user_errors(flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recording(tmp_path, exchange())
    server = [] if "--url" in flags or "--to-script" in flags else ["--url", "http://127.0.0.1:1"]
    assert main(["replay", file, *server, *flags]) == 2
    assert message in capsys.readouterr().err


def test_missing_recording(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "nowhere.jsonl"]) == 2
    assert "cannot read the recording nowhere.jsonl: No such file or directory" in capsys.readouterr().err


def talk(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/responses", json=fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_stored_conversation_is_continued_with_the_new_responses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second server knows the responses of the first one neither by their ids nor by their items."""
    file = tmp_path / "recording.jsonl"
    replies = [{"match": "^ok$", "output": "Done."}, {"match": "weather", "output": "Sunny."}]
    config = {"models": {"m": {"engine": "scripted", "replies": replies}}}
    with serving(tmp_path, config, "--record", str(file)) as first, talking(first) as client:
        one = talk(client, input="the weather?")
        two = talk(client, input="ok", previous_response_id=one["id"])
        item = {"type": "item_reference", "id": two["output"][0]["id"]}
        talk(client, input=[item, {"role": "user", "content": "ok"}], previous_response_id=two["id"])
        talk(client, input=[item, {"role": "user", "content": "weather"}])
        assert eventually(lambda: len(list(read_recording(str(file)))) == 4)
    script = tmp_path / "script.yaml"
    assert main(["replay", str(file), "--to-script", str(script)]) == 0
    (tmp_path / "second").mkdir()
    with serving(tmp_path / "second", yaml.safe_load(script.read_text())) as second:
        code, shown = report(str(file), second, capsys, "--exact", "--concurrency", "4")
    assert [entry["comparison"] for entry in shown["exchanges"] if entry["comparison"]["verdict"] != "same"] == []
    assert code == 0


def script_of(file: str, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    assert main(["replay", file, "--to-script"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# ")
    (model,) = yaml.safe_load(shown)["models"].values()
    replies: list[Any] = model["replies"]
    return replies


def test_script_tells_conversations_with_the_same_last_message_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def history(*texts: str) -> dict[str, Any]:
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        return {"request": {"model": "new", "messages": messages}}

    file = recording(
        tmp_path,
        exchange("One.", **history("a", "b", "go on")),
        exchange("Two.", **history("a", "c", "go on")),
        exchange("One.", **history("a", "b", "go on")),
        exchange("Other.", said="other"),
    )
    replies = script_of(file, capsys)
    assert [entry.get("output") for entry in replies] == ["One.", "Two.", "Other."]
    assert len({entry["conversation"] for entry in replies[:2]}) == 2
    assert replies[2] == {"match": r"^other\Z", "output": "Other."}


def test_script_tells_a_message_apart_from_one_that_others_follow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def turn(*texts: str) -> dict[str, Any]:
        return {"request": {"model": "new", "messages": [{"role": "user", "content": text} for text in texts]}}

    file = recording(tmp_path, exchange("One.", **turn("a")), exchange("Two.", **turn("a", "b")))
    replies = script_of(file, capsys)
    assert [(entry["output"], "conversation" in entry) for entry in replies] == [("One.", True), ("Two.", False)]


def test_script_plays_different_replies_of_one_conversation_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recording(tmp_path, *map(exchange, ["One.", "One.", "Two.", "Three.", "Three."]))
    played = [(entry["output"], entry.get("times")) for entry in script_of(file, capsys)]
    assert played == [("One.", 2), ("Two.", 1), ("Three.", None)]


def test_script_leaves_out_what_cannot_be_scripted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recording(
        tmp_path,
        exchange("One."),
        exchange(disconnected=True),
        exchange(status=429, reply=ERROR),
        exchange(path="/v1/embeddings"),
        exchange(path="/v1/responses", request={"input": "x", "previous_response_id": "resp_1"}, reply=RESPONSE),
        exchange(path="/v1/responses", request={"input": "x"}, reply=RESPONSE | {"output": [{"type": "mcp_call"}]}),
        exchange(cut=["reply"]),
        exchange(request={"model": "a name", "messages": [{"role": "user", "content": "x"}]}, model=None),
    )
    assert main(["replay", file, "--to-script"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"# 1 of 8 exchanges of {file}\n")
    assert sorted(captured.err.splitlines()) == [
        "left out 1: 'a name' cannot be the name of a model",
        "left out 1: /v1/embeddings cannot be scripted",
        "left out 1: the beginning of the conversation is not recorded",
        "left out 1: the client left",
        "left out 1: the recorded body is incomplete",
        "left out 1: the reply has parts that a script cannot have: mcp_call",
        "left out 1: the reply is an error 429",
    ]


def test_prompt_of_an_unnamed_model_becomes_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recording(tmp_path, exchange("One.", request={"messages": [{"role": "user", "content": "x"}]}))
    assert main(["replay", file, "--to-script"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["default"], list(config["models"])) == ("old", ["old"])


def test_names_are_grouped_without_regard_to_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def named(name: str) -> dict[str, Any]:
        return exchange(name, request={"model": name, "messages": [{"role": "user", "content": name}]})

    assert len(script_of(recording(tmp_path, named("GPT-5"), named("gpt-5")), capsys)) == 2
