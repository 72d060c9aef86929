"""What the response to a recorded request says: its texts, reasoning, calls, tokens and times.

A recorded response and a new one are read in the same way, with the readers of the client.

Rules
1. Each choice of a reply is read as a reply of its own.
2. The calls of Responses of any type (functions, custom tools, shells) are read as calls of functions.
3. The time to the first token is that of the first piece of a stream with text, reasoning or a call.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.client.call import ClientCall
from dragoman.core.errors import DECODE_ERRORS, DragomanError
from dragoman.core.events import Finished, Started, Usage
from dragoman.core.reply import ReplyBuilder
from dragoman.core.request import GenerationRequest, Part, Reasoning, Text, ToolCall
from dragoman.protocols.chat import client as chat_client
from dragoman.protocols.errors import error_from_response
from dragoman.protocols.messages import client as messages_client
from dragoman.protocols.reply_fields import list_of, object_of, text_of
from dragoman.protocols.reply_reader import ClientProtocol
from dragoman.protocols.responses import client as responses_client
from dragoman.protocols.responses.calls import CALLS, CallFields, decode_arguments
from dragoman.protocols.sse import SseDecoder
from dragoman.recordings.recorded_exchange import RecordedExchange, TokenCounts

CLIENTS: dict[str, ClientProtocol] = {
    "/v1/chat/completions": chat_client.PROTOCOL,
    "/v1/completions": chat_client.COMPLETIONS,
    "/v1/messages": messages_client.PROTOCOL,
    "/v1/responses": responses_client.PROTOCOL,
}
"""How the replies of the generation routes are read. Replies of other routes are compared as JSON."""
Pieces = Sequence[tuple[float, bytes]]
"""The body of a response in the pieces in which it arrived, with their times in seconds."""


class CallOutcome(msgspec.Struct, frozen=True):
    name: str
    arguments: str

    @property
    def parsed(self) -> Any:
        """The arguments as JSON, or as the text that they are."""
        try:
            return msgspec.json.decode(self.arguments or "{}")
        except DECODE_ERRORS:
            return self.arguments


class ChoiceOutcome(msgspec.Struct, frozen=True):
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallOutcome, ...] = ()
    finish: str | None = None
    """None if the reply is incomplete."""
    stop: str | None = None
    others: tuple[str, ...] = ()
    """The types of all other parts of the content, such as calls that the server ran."""


class ReplayOutcome(msgspec.Struct, frozen=True):
    """`error` is the code of an error, `message` its text. `body` is the reply of a route without generations."""

    status: int
    choices: tuple[ChoiceOutcome, ...] = ()
    error: str | None = None
    message: str | None = None
    usage: TokenCounts | None = None
    first_token: float | None = None
    total: float = 0.0
    body: Any = None

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and self.error is None


def recorded_pieces(exchange: RecordedExchange) -> Pieces:
    if exchange.stream:
        return [(at, text.encode()) for at, text in exchange.stream]
    return [(exchange.duration, bytes(exchange.reply))]


def read_outcome(path: str, request: Mapping[str, Any], status: int, pieces: Pieces, total: float) -> ReplayOutcome:
    body = b"".join(data for _, data in pieces)
    if status != 200:
        error = error_from_response(status, {}, body)
        return ReplayOutcome(status, error=_code(error), message=error.message, total=total)
    protocol = CLIENTS.get(path)
    if protocol is None:
        return ReplayOutcome(status, body=_parsed(body), total=total)
    count = count_choices(request)
    read = [_read_choice(protocol, pieces if count == 1 else _select_choice(pieces, at)) for at in range(count)]
    choices = [choice for choice, _, _, _ in read]
    if protocol is responses_client.PROTOCOL:
        calls = tuple(_response_calls(final_response(body)))
        choices = [msgspec.structs.replace(choices[0], calls=calls or choices[0].calls)]
    failure = next((error for _, _, _, error in read if error is not None), None)
    return ReplayOutcome(
        status,
        tuple(choices),
        error=None if failure is None else _code(failure),
        message=None if failure is None else failure.message,
        usage=read[-1][1],
        first_token=min((at for _, _, at, _ in read if at is not None), default=None),
        total=total,
    )


def count_choices(request: Mapping[str, Any]) -> int:
    """The number of choices that a request asks for."""
    prompts, count = request.get("prompt"), request.get("n")
    is_list = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
    return (count if type(count) is int and count > 0 else 1) * (len(list_of(prompts)) if is_list else 1)


def _read_choice(
    protocol: ClientProtocol, pieces: Pieces
) -> tuple[ChoiceOutcome, TokenCounts | None, float | None, DragomanError | None]:
    """Return the choice, the usage, the time of the first token, and the error that ended it."""
    client_call = ClientCall(protocol, GenerationRequest(), stream=True, check_calls=False)
    builder, first_token, finished = ReplyBuilder(), None, None
    try:
        for at, events in _iter_events(client_call, pieces):
            builder.add(0, events)
            if first_token is None and any(type(event) not in (Started, Finished) for event in events):
                first_token = at
            finished = events[-1] if type(events[-1]) is Finished else finished
    except DragomanError as error:
        return _choice(builder.arrived(), None), None, first_token, error
    assert finished is not None
    unknown = [text_of(object_of(part).get("type")) for part in client_call.describe(builder.reply()).unknown_parts]
    choice = _choice(builder.arrived(), finished, tuple(kind for kind in unknown if kind not in CALLS))
    usage = None if finished.usage is None else _counts(finished.usage)
    is_stream = client_call.streams_usage is not None
    return choice, usage, first_token if is_stream else None, None


def _iter_events(client_call: ClientCall, pieces: Pieces) -> Iterator[tuple[float, Sequence[Any]]]:
    at = 0.0
    for at, data in pieces:
        if events := client_call.feed(data):
            yield at, events
    for events in client_call.end():
        if events:
            yield at, events


def _choice(parts: Sequence[Part], finished: Finished | None, others: tuple[str, ...] = ()) -> ChoiceOutcome:
    return ChoiceOutcome(
        text="".join(part.text for part in parts if isinstance(part, Text)),
        reasoning="\n\n".join(part.text for part in parts if isinstance(part, Reasoning) and part.text),
        calls=tuple(CallOutcome(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)),
        finish=None if finished is None else finished.unknown_reason or finished.reason,
        stop=None if finished is None else finished.stop,
        others=others,
    )


def _counts(usage: Usage) -> TokenCounts:
    return TokenCounts(usage.prompt, usage.completion, usage.cached, usage.reasoning)


def _code(error: DragomanError) -> str:
    answered = error.answered
    return (answered and (answered.code or answered.type)) or error.code or "error"


def _parsed(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except DECODE_ERRORS:
        return body.decode("utf-8", "replace")


def _select_choice(pieces: Pieces, index: int) -> Pieces:
    """The response as if it had only this choice."""
    body = b"".join(data for _, data in pieces)
    if body.lstrip().startswith(b"{"):
        return [(pieces[-1][0], msgspec.json.encode(_keep_choice(object_of(_parsed(body)), index)))]
    decoder, selected = SseDecoder(), list[tuple[float, bytes]]()
    for at, data in pieces:
        for frame in decoder.feed(data):
            parsed = object_of(_parsed(frame.data.encode()))
            text = msgspec.json.encode(_keep_choice(parsed, index)).decode() if "choices" in parsed else frame.data
            selected.append((at, f"data: {text}\n\n".encode()))
    return selected


def _keep_choice(body: dict[str, Any], index: int) -> dict[str, Any]:
    kept = [choice for choice in list_of(body.get("choices")) if object_of(choice).get("index") == index]
    return {**body, "choices": [{**choice, "index": 0} for choice in kept]}


def final_response(body: bytes) -> dict[str, Any]:
    """The response of a reply in the Responses protocol, whole or streamed; empty if it is incomplete."""
    if body.lstrip().startswith(b"{"):
        return object_of(_parsed(body))
    decoder = SseDecoder()
    frames = [*decoder.feed(body), *decoder.end()]
    parsed = (object_of(_parsed(frame.data.encode())) for frame in reversed(frames) if '"response":' in frame.data)
    return next((object_of(frame["response"]) for frame in parsed if "response" in frame), {})


def _response_calls(response: Mapping[str, Any]) -> Iterator[CallOutcome]:
    for item in map(object_of, list_of(response.get("output"))):
        kind = CALLS.get(text_of(item.get("type")))
        if kind is not None:
            fields = msgspec.convert(item, CallFields)
            yield CallOutcome(fields.name or kind, decode_arguments(kind, fields))
