"""What chat completions and completions share: the sampling fields, usage, log probabilities, errors, framing."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, DragomanError, quote
from dragoman.core.events import Event, TextDelta, TokenLogprob, Usage, total_usage
from dragoman.core.request import Asked, GenerationRequest, RepetitionPenalty, Sampling
from dragoman.protocols.json_body import bad_field, between_texts, unknown_fields

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Retention = Literal["in_memory", "in-memory", "24h"]

KEPT_SECONDS = {"24h": 24 * 3600.0}
"""For what is otherwise kept in memory as long as there is room."""
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
DONE = b"data: [DONE]\n\n"


def token_ids(entries: list[Any], path: str) -> tuple[int, ...]:
    try:
        return msgspec.convert(entries, tuple[TokenId, ...])
    except msgspec.ValidationError as error:
        raise bad_field(error, path) from None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Share | None = None
    seed: Int64 | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields that are called the same on the wire, among the values and among an engine's features."""
SAMPLED = frozenset(SAMPLING)

LABELS = ("user", "metadata", "prompt_cache_key", "safety_identifier", "service_tier")

NEUTRAL: dict[str, object] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "top_p": 1,
    "min_p": 0,
}
"""Values that ask for nothing: any engine honours them."""


def keep_seconds(retention: Retention | None) -> float:
    """How long the prompt is to be kept even if room is short."""
    return KEPT_SECONDS.get(retention or "", 0.0)


def labels(fields: SamplingFields) -> dict[str, Any]:
    """What asks nothing of a reply, and may be of use to a server behind this one."""
    found = {name: getattr(fields, name, None) for name in LABELS}
    nothing: dict[str, tuple[object, ...]] = {"service_tier": ("auto", "default")}
    return {name: value for name, value in found.items() if value and value not in nothing.get(name, ())}


def asked_fields(fields: SamplingFields, parsed: dict[str, Any], others: Container[str] = frozenset()) -> list[Asked]:
    """What these fields ask of an engine; of a field that is neither one of them nor of the others, just that."""
    asked = []
    if not parsed.keys().isdisjoint(SAMPLED):
        told = [name for name in SAMPLING if name in parsed]
        asked += [Asked(name, name) for name in told if _says_something(name, getattr(fields, name))]
    if fields.logit_bias:
        asked.append(Asked("logit_bias", "logit_bias"))
    if fields.stop:
        asked.append(Asked("stop", "stop"))
    if fields.stop_token_ids:
        asked.append(Asked("stop_token_ids", "stop_token_ids"))
    if fields.ignore_eos:
        asked.append(Asked("ignore_eos", "ignore_eos"))
    if fields.n is not None and fields.n > 1:
        asked.append(Asked("choices", "n"))
    for name in unknown_fields(parsed, type(fields)):
        if name not in others and parsed[name] is not None:
            asked.append(Asked("unknown", name))
    return asked


def _says_something(name: str, value: object) -> bool:
    return value is not None and value != NEUTRAL.get(name)


def sampling(fields: SamplingFields) -> Sampling:
    return Sampling(
        temperature=fields.temperature,
        top_p=fields.top_p,
        # -1 is how some clients say: no limit.
        top_k=0 if fields.top_k == -1 else fields.top_k,
        min_p=fields.min_p,
        seed=fields.seed,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=_biases(fields.logit_bias or {}),
    )


def _biases(wire: dict[str, float]) -> dict[int, float]:
    if len(wire) > MAX_BIASES:
        raise BadRequest(f"logit_bias: at most {MAX_BIASES} tokens can be biased", param="logit_bias")
    biases = {}
    for key, bias in wire.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequest(f"logit_bias: {quote(key)} is not a token id", param="logit_bias")
        biases[int(key)] = bias
    return biases


def stops(wire: str | list[str] | None) -> tuple[str, ...]:
    found = () if wire is None else (wire,) if isinstance(wire, str) else tuple(wire)
    for stop in found:
        if not stop:
            raise BadRequest("stop: a stop string must not be empty", param="stop")
        if len(stop) > MAX_STOP_LENGTH:
            raise BadRequest(f"stop: a stop string has at most {MAX_STOP_LENGTH} characters", param="stop")
    return found


def encode_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def encode_error(error: DragomanError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def token_text(entry: TokenLogprob) -> str:
    return entry.text.decode("utf-8", "replace")


def encode_logprobs(entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [{**_logprob(entry), "top_logprobs": [_logprob(rival) for rival in entry.top]} for entry in entries]


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(entry), "logprob": entry.logprob, "bytes": list(entry.text)}


def frame(payload: object) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


class StreamEncoder(ABC):
    """A frame for every delta. Plain text, nearly all there is, goes between the ready-made halves of its frame."""

    def __init__(self, request: GenerationRequest, created: int, kind: str) -> None:
        self._stamp = {"id": request.id, "object": kind, "created": created, "model": request.model}
        self._with_usage = request.delivery.usage
        self._plain = request.logprobs is None and not request.delivery.token_ids
        self._halves: dict[int, tuple[bytes, bytes, bytes]] = {}
        self._usages: list[Usage] = []

    @abstractmethod
    def _text(self, choice: int, text: str) -> dict[str, Any]:
        """The entry in `choices` for a piece of plain text."""

    @abstractmethod
    def _frame(self, choice: int, event: Event) -> bytes:
        """The frame of an event; nothing for one that this API does not show."""

    def feed(self, choice: int, events: Sequence[Event]) -> bytes:
        if self._plain:
            if len(events) == 1 and type(events[0]) is TextDelta:
                return self._text_frames(choice, [events[0].text]) if events[0].text else b""
            texts = [event.text for event in events if type(event) is TextDelta and event.text]
            if len(texts) == len(events):
                return self._text_frames(choice, texts)
        return b"".join(self._frame(choice, event) for event in events)

    def _text_frames(self, choice: int, texts: list[str]) -> bytes:
        head, between, tail = self._halves.get(choice) or self._cut(choice)
        return head + between_texts(texts, between) + tail

    def _cut(self, choice: int) -> tuple[bytes, bytes, bytes]:
        """What stands before the first text, between two texts and after the last, quotes included."""
        hole = "\x00the text goes here\x00"
        head, tail = self._chunk(self._text(choice, hole)).split(msgspec.json.encode(hole)[1:-1])
        self._halves[choice] = head, tail + head, tail
        return head, tail + head, tail

    def _chunk(self, entry: dict[str, Any]) -> bytes:
        chunk = {**self._stamp, "choices": [entry]}
        return frame({**chunk, "usage": None} if self._with_usage else chunk)

    def end(self) -> bytes:
        if not self._with_usage:
            return DONE
        return frame({**self._stamp, "choices": [], "usage": encode_usage(total_usage(self._usages))}) + DONE

    def fail(self, error: DragomanError) -> bytes:
        return frame(encode_error(error))
