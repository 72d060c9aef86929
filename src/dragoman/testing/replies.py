"""The replies of a script for tests.

    reply("It is sunny.")
    reply(reasoning="I need the tool.", calls=[call("get_weather", city="Paris")])
    reply(json={"city": "Paris"})                 structured output
    error(429, retry_after=1)                     the protocol's own error
    reply("It is sunny.", cut_after=2)            the connection breaks after two tokens

Each reply is played once, in order. With `match` it waits for a request with a match of this regular expression in a
user or tool message after the last reply, with `seen` in any message; `times` is how often it is played, None: always.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.core.events import FinishReason
from dragoman.engines.scripted_replies import ScriptedCall, ScriptedError, ScriptedReply


class PlannedReply(msgspec.Struct, frozen=True):
    """A scripted reply. With `is_checked` it must fit the request; with `is_cut` its error is a broken connection."""

    scripted: ScriptedReply
    is_checked: bool = True
    is_cut: bool = False


def reply(
    text: str | None = None,
    *,
    reasoning: str = "",
    calls: Sequence[ScriptedCall] = (),
    json: Any = msgspec.UNSET,
    match: str | None = None,
    seen: str | None = None,
    times: int | None = 1,
    delay: float = 0,
    finish: FinishReason | None = None,
    cut_after: int | None = None,
    check: bool = True,
) -> PlannedReply:
    """A reply of text, reasoning and tool calls, after `delay` seconds.

    `json` is the text as a value. With `check=False` the reply need not fit the schema and the tools of the request.
    After `cut_after` tokens of four characters, the connection is closed.
    """
    if json is not msgspec.UNSET:
        if text is not None:
            raise ConfigError("give either text or json")
        text = msgspec.json.encode(json).decode()
    if text is None and not (reasoning or calls):
        text = ""
    cut = None if cut_after is None else ScriptedError(status=500, after=cut_after)
    scripted = _build(
        output=text,
        reasoning=reasoning,
        calls=tuple(calls),
        match=match,
        seen=seen,
        times=times,
        delay=delay,
        finish=finish,
        error=cut,
    )
    return PlannedReply(scripted, is_checked=check, is_cut=cut is not None)


def error(
    status: int | str,
    message: str = "scripted error",
    *,
    retry_after: float | None = None,
    text: str | None = None,
    after: int = 0,
    match: str | None = None,
    seen: str | None = None,
    times: int | None = 1,
    delay: float = 0,
) -> PlannedReply:
    """An error with this status, or with this code as a text. With `after`, that many tokens of `text` come first."""
    kind = {"code": status} if isinstance(status, str) else {"status": status}
    try:
        scripted_error = ScriptedError(**kind, message=message, retry_after=retry_after, after=after)
    except ValueError as mistake:
        raise ConfigError(str(mistake)) from mistake
    return PlannedReply(_build(output=text, error=scripted_error, match=match, seen=seen, times=times, delay=delay))


def call(name: str, arguments: Mapping[str, Any] | str | None = None, /, **fields: Any) -> ScriptedCall:
    """A call of a tool. Arguments that are a text are sent as they are."""
    if arguments is not None and fields:
        raise ConfigError("give the arguments either as one value or as keywords")
    return ScriptedCall(name, arguments if isinstance(arguments, str) else {**(arguments or {}), **fields})


def to_planned(entry: PlannedReply | str) -> PlannedReply:
    return reply(entry) if isinstance(entry, str) else entry


def _build(**fields: Any) -> ScriptedReply:
    """Check what only a configuration checks otherwise."""
    try:
        return msgspec.convert(msgspec.structs.asdict(ScriptedReply(**fields)), ScriptedReply)
    except ValueError as mistake:
        raise ConfigError(str(mistake)) from mistake
