"""Parts shared by the OpenAI protocols: sampling fields, content parts, usage, log probabilities, framing."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.choices import list_choices
from dragoman.core.errors import BadRequest, DragomanError, quote
from dragoman.core.events import Event, Started, TextDelta, TokenLogprob, Usage, total_usage
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Delivery, GenerationRequest, Image, RepetitionPenalty, Sampling, Text
from dragoman.protocols.errors import encode_openai_error
from dragoman.protocols.json_body import encode_texts, missing_field, unknown_fields
from dragoman.protocols.reply_extras import RunningCounts

NO_LIMIT = -1
"""A `max_tokens` that means the same as none, as in llama.cpp's server."""
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
TokenIds = tuple[TokenId, ...]
ReplyLimit = Annotated[int, msgspec.Meta(ge=NO_LIMIT, le=2**31 - 1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Retention = Literal["in_memory", "in-memory", "24h"]

RETENTION_SECONDS: dict[str | None, float] = {"24h": 24 * 3600.0}
"""How long a prompt stays cached. Other values of `Retention` keep it only while there is room."""
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024
DONE = b"data: [DONE]\n\n"


def decode_limit(query: Mapping[str, str], default: int, most: int) -> int:
    """Return the page size that the query string of a list request asks for."""
    limit = query.get("limit", str(default))
    if limit.isascii() and limit.isdigit() and len(limit) <= len(str(most)) and 1 <= int(limit) <= most:
        return int(limit)
    raise BadRequest(f"limit: expected a number from 1 to {most}", param="limit")


class ChatStreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
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
    stream_options: ChatStreamOptions | None = None
    user: str | None = None


class TextFields(SamplingFields, frozen=True, kw_only=True):
    """The fields of chats and completions."""

    return_token_ids: bool | None = None
    timings_per_token: bool | None = None
    service_tier: str | None = None


FLEX = "flex"
SERVED_TIERS = ("auto", "default", FLEX)
"""Service tiers that every engine has. Other ones are passed on to an upstream server."""
LABELS = ("user", "metadata", "prompt_cache_key", "safety_identifier", "service_tier")
SAMPLING = tuple(name for name in Sampling.__struct_fields__ if name != "logit_bias")
_sampling_values = operator.attrgetter(*SAMPLING)
FEATURES = {name: Feature(name) for name in (*Sampling.__struct_fields__, "stop", "stop_token_ids", "ignore_eos")}
FEATURES["n"] = Feature.CHOICES
"""The features that fields request if they have a value."""
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), 0),
    **dict.fromkeys(("repetition_penalty", "top_p", "n"), 1),
    **dict.fromkeys(("ignore_eos", "logprobs", "return_token_ids", "store"), False),
    **{name: [] for name in ("stop", "stop_token_ids", "documents")},
    "logit_bias": {},
}
"""Values without effect, which every engine supports."""


class ImageAddress(msgspec.Struct, frozen=True):
    url: str


class ContentPart(msgspec.Struct, frozen=True):
    """A part of the content of a message; the fields depend on the type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageAddress | str | None = None
    file_id: str | None = None


Content = str | list[ContentPart] | None
CHAT_PARTS = {"text": "text", "refusal": "refusal", "image_url": "images", "input_audio": "audio", "file": "files"}
RESPONSE_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text", "summary_text", "reasoning_text"), "text"),
    "refusal": "refusal",
    "input_image": "images",
    "input_audio": "audio",
    "input_file": "files",
}
"""The types of content parts: the field of their text, or the feature that they request."""


def decode_content(
    content: Content, parts: Mapping[str, str], path: str, asked: list[Asked]
) -> tuple[Text | Image, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),)
    return tuple(_decode_part(part, parts, f"{path}[{at}]", asked) for at, part in enumerate(content))


def _decode_part(part: ContentPart, parts: Mapping[str, str], path: str, asked: list[Asked]) -> Text | Image:
    if part.type not in parts:
        raise BadRequest(
            f"{path}.type: unknown type {quote(part.type)}; expected {list_choices([*parts])}", param=f"{path}.type"
        )
    kind = parts[part.type]
    if kind in ("text", "refusal"):
        text = part.text if kind == "text" else part.refusal
        if text is None:
            raise missing_field(f"{path}.{kind}")
        return Text(text)
    if kind == "images" and part.file_id is None:
        if part.image_url is None:
            raise missing_field(f"{path}.image_url")
        asked.append(Asked(Feature.IMAGES, path))
        return Image(url=part.image_url if isinstance(part.image_url, str) else part.image_url.url)
    # There is no value for audio and files; the feature makes the server reject the request.
    asked.append(Asked(Feature.FILES if kind == "images" else Feature(kind), path))
    return Text("")


def decode_common(fields: SamplingFields) -> dict[str, Any]:
    """Decode the fields that all OpenAI protocols share, as arguments of a `GenerationRequest`."""
    stops = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    for stop in stops:
        check_stop(stop, "stop")
    labels = {}
    for name in LABELS:
        value = getattr(fields, name, None)
        if value and not (name == "service_tier" and value in ("auto", "default")):
            labels[name] = value
    sampling = dict(zip(SAMPLING, _sampling_values(fields), strict=True))
    if sampling["top_k"] == -1:
        sampling["top_k"] = 0  # Some clients send -1 for no limit.
    return {
        "model": fields.model or "",
        "priority": "batch" if labels.get("service_tier") == FLEX else "interactive",
        "sampling": Sampling(**sampling, logit_bias=_biases(fields.logit_bias) if fields.logit_bias else {}),
        "labels": labels,
        "keep_seconds": RETENTION_SECONDS.get(getattr(fields, "prompt_cache_retention", None), 0.0),
        "stop": stops,
        "stop_token_ids": tuple(fields.stop_token_ids or ()),
        "ignore_eos": bool(fields.ignore_eos),
    }


def decode_delivery(fields: TextFields) -> Delivery:
    options = fields.stream_options or ChatStreamOptions()
    return Delivery(
        stream=bool(fields.stream),
        usage=bool(options.include_usage),
        token_ids=bool(fields.return_token_ids),
        # As in vLLM, it has no effect without `include_usage`.
        running_usage=bool(options.include_usage and options.continuous_usage_stats),
        timings=bool(fields.timings_per_token),
        service_tier=fields.service_tier in SERVED_TIERS,
    )


def requested_features(
    fields: SamplingFields,
    parsed: dict[str, Any],
    others: Container[str] = frozenset(),
    features: Mapping[str, Feature] = FEATURES,
) -> list[Asked]:
    """Return the features that the fields request. Fields in neither `fields` nor `others` are unknown."""
    asked = []
    for name, feature in features.items():
        value = getattr(fields, name)
        if value is not None and value != NEUTRAL.get(name):
            asked.append(Asked(feature, name))
    tier = getattr(fields, "service_tier", None)
    if tier is not None and tier not in SERVED_TIERS:
        asked.append(Asked(Feature.SERVICE_TIER, "service_tier"))
    if unknown := unknown_fields(parsed, type(fields)):
        asked += [Asked(Feature.UNKNOWN, name) for name in unknown if name not in others]
    return asked


def decode_reply_limit(fields: SamplingFields, *names: str, least: int = 1) -> int | None:
    """Return the value of the first of the named fields that sets a limit."""
    for name in names:
        limit: int | None = getattr(fields, name)
        if limit is None or limit == NO_LIMIT:
            continue
        if limit < least:
            raise BadRequest(f"{name}: must be at least {least}, or {NO_LIMIT} for no limit", param=name)
        return limit
    return None


def _biases(wire: dict[str, float]) -> dict[int, float]:
    if len(wire) > MAX_BIASES:
        raise BadRequest(f"logit_bias: at most {MAX_BIASES} tokens can be biased", param="logit_bias")
    biases = {}
    for key, bias in wire.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequest(f"logit_bias: {quote(key)} is not a token id", param="logit_bias")
        biases[int(key)] = bias
    return biases


def check_stop(stop: str, path: str) -> None:
    if not stop:
        raise BadRequest(f"{path}: a stop string must not be empty", param=path)
    if len(stop) > MAX_STOP_LENGTH:
        raise BadRequest(f"{path}: a stop string must not exceed {MAX_STOP_LENGTH} characters", param=path)


def service_tier(request: GenerationRequest) -> str:
    """The service tier of the reply."""
    return FLEX if request.priority == "batch" else "default"


def tier_field(request: GenerationRequest) -> dict[str, str]:
    """The field of a chat or a completion that names its service tier, if it does."""
    is_named = request.delivery.service_tier or request.priority == "batch"
    return {"service_tier": service_tier(request)} if is_named else {}


def encode_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def encode_logprobs(entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    return [{**_logprob(entry), "top_logprobs": [_logprob(other) for other in entry.top]} for entry in entries]


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text.decode("utf-8", "replace"), "logprob": entry.logprob, "bytes": list(entry.text)}


def format_reset(seconds: float) -> str:
    """Return the time until a reset, such as 6m0s, 1.5s or 20ms."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


class StreamEncoder(ABC):
    """Encodes one frame per delta. Plain text, the common case, is inserted into a prepared frame."""

    def __init__(self, request: GenerationRequest, created: int, kind: str) -> None:
        self._header = {"id": request.id, "object": kind, "created": created, "model": request.model}
        self._header["system_fingerprint"] = request.fingerprint
        self._header |= tier_field(request)
        self._delivery = delivery = request.delivery
        self._with_usage = delivery.usage
        needs_counts = delivery.running_usage or delivery.timings
        self._counts = RunningCounts(request) if needs_counts else None
        self._plain = request.logprobs is None and not delivery.token_ids and not needs_counts
        self._extras: dict[str, Any] = {}
        """More fields of the next chunk."""
        self._timings: dict[str, Any] = {}
        """Those of the latest chunk; the usage chunk repeats them."""
        self._templates: dict[int, tuple[bytes, bytes, bytes]] = {}
        self._usages: list[Usage] = []

    @abstractmethod
    def _text(self, choice: int, text: str) -> dict[str, Any]:
        """Return the entry in `choices` for a piece of plain text."""

    @abstractmethod
    def _frame(self, choice: int, event: Event) -> bytes:
        """Encode an event other than plain text; return no bytes for an event that this API does not show."""

    def feed(self, choice: int, events: Sequence[Event]) -> bytes:
        frames: list[bytes] = []
        texts: list[str] = []
        for event in events:
            if self._plain and type(event) is TextDelta:
                if event.text:
                    texts.append(event.text)
                continue
            if texts:
                frames.append(self._text_frames(choice, texts))
                texts = []
            if self._counts is not None:
                self._note(self._counts, choice, event)
            frames.append(self._frame(choice, event))
        if texts:
            frames.append(self._text_frames(choice, texts))
        return b"".join(frames)

    def _note(self, counts: RunningCounts, choice: int, event: Event) -> None:
        counts.note(choice, event)
        if self._delivery.running_usage:
            self._extras["usage"] = encode_usage(counts.usage)
        if self._delivery.timings and not isinstance(event, Started):
            self._timings = self._extras["timings"] = counts.timings(choice, event)

    def _text_frames(self, choice: int, texts: list[str]) -> bytes:
        head, between, tail = self._templates.get(choice) or self._build_template(choice)
        return head + encode_texts(texts, between) + tail

    def _build_template(self, choice: int) -> tuple[bytes, bytes, bytes]:
        """Return the bytes before the first text, between two texts and after the last, including quotes."""
        placeholder = "\x00text\x00"
        head, tail = self._chunk([self._text(choice, placeholder)]).split(msgspec.json.encode(placeholder)[1:-1])
        self._templates[choice] = head, tail + head, tail
        return self._templates[choice]

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._header, "choices": choices}
        if self._with_usage:
            chunk["usage"] = usage
        if self._extras:
            chunk |= self._extras
            self._extras = {}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def end(self) -> bytes:
        self._extras = {"timings": self._timings} if self._timings else {}
        return (self._chunk([], encode_usage(total_usage(self._usages))) if self._with_usage else b"") + DONE

    def fail(self, error: DragomanError) -> bytes:
        return b"data: " + msgspec.json.encode(encode_openai_error(error)) + b"\n\n"
