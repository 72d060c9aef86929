"""Defines the messages between the parent and a front end, beside those that they share with workers.

    parent -> front end   `Configure` | `Stop` | `Ping` | `MethodResult` | `Step`
    front end -> parent   `Listening`, `ConfigApplied` after every further `Configure`, `Pong` after every `Ping`
                          `RequestCall` | `Pause` | `ReleaseSlot` | `ReleaseLease` | `RequestEnded`

The end of the connection ends the front end. `id` is the id of a request, as in its record. The calls of a request:

    `Generate`   gets its events in `Step`s
    `Cancel`     ends one of its other calls
    `MethodCall` gets a `MethodResult`: methods of the engine, and those of `ARGUMENTS`

    enter_quota                                 counts the request against the quota of its key, which the parent holds
    acquire_lease, start_lease, load_model      as those of a `ModelLease`
    acquire_slot                                as that of its slots
    relay                                       the parent answers an unchanged request
    check_responses, keep_response, ...         as the methods of `StoredResponses`; these belong to no request
    start_background                            as `start` of the background responses
    add_file, find_file                         as those of the stored files
    add_batch, find_batch                       as those of the batches
"""

from typing import Any, Literal

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.reply import RateLimitState
from dragoman.ipc.messages import (
    Call,
    Cancel,
    EngineInfo,
    Failure,
    MethodCall,
    MethodResult,
    Ping,
    Pong,
    ProcessMessage,
    RawGenerate,
    Step,
)
from dragoman.protocols.batches import Api
from dragoman.server.background import BackgroundRequest
from dragoman.server.model_lease import LeaseInfo, LeaseRequest
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.storage.batches import NewBatch
from dragoman.storage.budgets import OwnedBudget
from dragoman.storage.files import NewFile
from dragoman.storage.response_values import EarlyEnd, EndedResponse, Recording, StoredResponse


class Configure(ProcessMessage, frozen=True):
    """The first settings start the front end. Of later ones, those that can change at run time are applied."""

    settings: Settings


class ConfigApplied(ProcessMessage, frozen=True):
    pass


class Stop(ProcessMessage, frozen=True):
    """`announced`: requests that are cancelled from now on get the stop as the reason. `graceful`: accept no new
    requests; running ones have the grace time. `forced`: cancel running requests now."""

    mode: Literal["announced", "graceful", "forced"]


class Listening(ProcessMessage, frozen=True):
    pass


class RequestMessage(ProcessMessage, frozen=True):
    id: str


class RequestCall(RequestMessage, frozen=True, tag="RequestCall"):
    """A call of a request. Its key is unique across all front ends."""

    call: Call


class RawRequestCall(RequestMessage, frozen=True, tag="RequestCall"):
    """A `RequestCall` as the parent reads it, with the request of a generation still encoded for the worker."""

    call: RawGenerate | Cancel | MethodCall


class Pause(RequestMessage, frozen=True):
    """Pause or resume the engine of a generation whose reader lags behind, if the engine can wait."""

    key: int
    is_paused: bool


class ReleaseSlot(RequestMessage, frozen=True):
    pass


class ReleaseLease(RequestMessage, frozen=True):
    """Release everything that the request holds of its model. A finished reply had `tokens` in `seconds`."""

    tokens: int = 0
    seconds: float = 0.0


class TokenGaps(msgspec.Struct, frozen=True, array_like=True):
    """Histogram of the times between tokens since the last report."""

    counts: tuple[int, ...]
    total: float


class RequestEnded(ProcessMessage, frozen=True):
    record: RequestRecord
    gaps: TokenGaps | None = None


class AcquireLease(msgspec.Struct, frozen=True, array_like=True):
    """`models`, `configured_models`, `key` and `budgets` are those of the caller (see `Caller` in
    `server.auth.callers`). `via` is the header that detects loops (see `loop_guard`)."""

    principal: str
    models: tuple[str, ...] | None
    lease_request: LeaseRequest
    configured_models: tuple[str, ...] | None
    via: bytes | None
    key: str = ""
    budgets: tuple[OwnedBudget, ...] = ()


class LeaseReply(msgspec.Struct, frozen=True, array_like=True):
    """The leases of a request. `engine` has what the pipeline needs; without it, the request has to wait for a slot."""

    rates: tuple[RateLimitState, ...] = ()
    failure: Failure | None = None
    label: str | None = None
    fallbacks: tuple[str, ...] = ()
    found: LeaseInfo | None = None
    engine: EngineInfo | None = None
    queue_us: int = 0
    budget_warning: str | None = None


class RelayReply(msgspec.Struct, frozen=True, array_like=True):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


ARGUMENTS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "enter_quota": msgspec.msgpack.Decoder(tuple[bytes, bytes]),
    "acquire_lease": msgspec.msgpack.Decoder(tuple[AcquireLease]),
    "start_lease": msgspec.msgpack.Decoder(tuple[()]),
    "load_model": msgspec.msgpack.Decoder(tuple[()]),
    "acquire_slot": msgspec.msgpack.Decoder(tuple[()]),
    "relay": msgspec.msgpack.Decoder(tuple[dict[str, Any], bytes]),
    "check_responses": msgspec.msgpack.Decoder(tuple[str]),
    "keep_response": msgspec.msgpack.Decoder(tuple[EndedResponse]),
    "record_response": msgspec.msgpack.Decoder(tuple[Recording]),
    "end_response_early": msgspec.msgpack.Decoder(tuple[str, EarlyEnd, str, str]),
    "find_response": msgspec.msgpack.Decoder(tuple[str, str]),
    "find_response_items": msgspec.msgpack.Decoder(tuple[str, str]),
    "find_items": msgspec.msgpack.Decoder(tuple[str, tuple[str, ...]]),
    "read_response_events": msgspec.msgpack.Decoder(tuple[str, str, int]),
    "conversation_items": msgspec.msgpack.Decoder(tuple[str, str]),
    "start_background": msgspec.msgpack.Decoder(tuple[StoredResponse, BackgroundRequest, bytes]),
    "add_file": msgspec.msgpack.Decoder(tuple[NewFile]),
    "find_file": msgspec.msgpack.Decoder(tuple[str, str]),
    "add_batch": msgspec.msgpack.Decoder(tuple[NewBatch]),
    "find_batch": msgspec.msgpack.Decoder(tuple[str, Api, str]),
}
"""The methods of the parent that a request can call, with the types of their arguments."""

Command = Configure | Stop
ToFrontEnd = Command | Ping | MethodResult | Step
ToParent = Listening | ConfigApplied | Pong | RawRequestCall | Pause | ReleaseSlot | ReleaseLease | RequestEnded

_to_frontend: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)
_to_parent: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
decode_to_frontend = _to_frontend.decode
decode_to_parent = _to_parent.decode
