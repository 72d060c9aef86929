"""Makes a configuration of the scripted engine from a recording: served, it answers the same requests in the same way.

    match          the text of the last user or tool message
    conversation   if other conversations with this message had other replies, or if the message is long
    times          if the same conversation had several replies; they are played in the order of the recording

Rules
1. Each reply has the recorded text, reasoning, calls, number of tokens and finish reason, but not the recorded speed.
2. A model has the name that the requests have for it.
3. Left out are replies that failed or are incomplete, routes without generations, and conversations of which the
   beginning is not in the recording.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
import yaml

from dragoman.config.model_spec import MODEL_NAME
from dragoman.core.errors import DECODE_ERRORS, BadRequest, DragomanError
from dragoman.core.request import GenerationRequest, Reasoning, Text, ToolCall
from dragoman.engines.scripted_replies import conversation_digest, turn_texts
from dragoman.protocols.registry import PROTOCOLS
from dragoman.protocols.reply_fields import list_of, object_of, text_of
from dragoman.protocols.responses import items, tools
from dragoman.protocols.responses import server as responses
from dragoman.recordings.outcome import (
    CallOutcome,
    ChoiceOutcome,
    ReplayOutcome,
    count_choices,
    final_response,
    read_outcome,
    recorded_pieces,
)
from dragoman.recordings.recorded_exchange import RecordedExchange

MAX_MATCH = 200
"""Characters of a message in a pattern."""
SPECIAL = re.compile(r"([\\.^$*+?{}\[\]|()])")
UNUSUAL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
"""Characters that YAML keeps only between double quotes, where they are escaped."""
DECODERS: dict[str, Callable[[bytes], GenerationRequest]] = {
    path: protocol.decode for protocol in PROTOCOLS.values() for path in protocol.paths
}
Item = dict[str, Any]


class ScriptedExchange(msgspec.Struct, frozen=True):
    """A request for one choice, and its reply in the form of the configuration."""

    turn: Sequence[str]
    """The messages after the last reply, the last one first."""
    digest: str
    reply: dict[str, Any]


class ResponseHistory:
    """The responses of a recording, which later requests may continue."""

    def __init__(self) -> None:
        self._conversations: dict[str, list[Item]] = {}
        self._items: dict[str, Item] = {}

    def decode(self, body: bytes) -> tuple[GenerationRequest, list[Item], tools.ToolSet]:
        """Return the request, its whole conversation and its tools."""
        parsed = responses.parse(body)
        previous = parsed.fields.previous_response_id
        if parsed.conversation is not None or (previous is not None and previous not in self._conversations):
            raise BadRequest("the beginning of the conversation is not recorded")
        earlier = self._conversations[previous] if previous is not None else []
        referenced = {name: self._items[name] for name in parsed.references if name in self._items}
        decoded = responses.decode(parsed, earlier, referenced)
        conversation = [dict(item) for item in decoded.context.items]
        names = {tool: name for name, tool in decoded.context.client_tools.items()}
        return decoded.request, conversation, tools.ToolSet(decoded.request.tools, decoded.context.client_tools, names)

    def add(self, response: Mapping[str, Any], conversation: Sequence[Item]) -> None:
        output = [object_of(item) for item in list_of(response.get("output"))]
        self._conversations[text_of(response.get("id"))] = [*conversation, *output]
        self._items |= {text_of(item.get("id")): item for item in (*conversation, *output)}


class ScriptBuilder:
    """Collects the replies of the models. `skipped` counts the exchanges without a reply, by the reason."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        self._models: defaultdict[str, list[ScriptedExchange]] = defaultdict(list)
        self._spellings: dict[str, str] = {}
        self._default: str | None = None
        self._history = ResponseHistory()

    def add(self, exchange: RecordedExchange) -> None:
        reason = self._find_reason(exchange)
        if reason is None:
            try:
                self._add(exchange)
            except (DragomanError, *DECODE_ERRORS) as error:
                reason = error.message if isinstance(error, DragomanError) else "the reply cannot be read"
        if reason is not None:
            self.skipped[reason] += 1

    def _find_reason(self, exchange: RecordedExchange) -> str | None:
        if exchange.path != "/v1/responses" and exchange.path not in DECODERS:
            return f"{exchange.path} cannot be scripted"
        if exchange.disconnected:
            return "the client left"
        if exchange.cut:
            return "the recorded body is incomplete"
        return None if exchange.status == 200 else f"the reply is an error {exchange.status}"

    def _add(self, exchange: RecordedExchange) -> None:
        body, pieces = exchange.body, recorded_pieces(exchange)
        outcome = read_outcome(exchange.path, body, exchange.status, pieces, exchange.duration)
        if not outcome.is_complete:
            raise BadRequest(f"the reply is an error: {outcome.error}")
        if others := sorted({kind for choice in outcome.choices for kind in choice.others}):
            raise BadRequest(f"the reply has parts that a script cannot have: {', '.join(others)}")
        if exchange.path in DECODERS:
            request = DECODERS[exchange.path](bytes(exchange.request))
            choices: Sequence[ChoiceOutcome] = outcome.choices
        else:
            request, conversation, toolset = self._history.decode(bytes(exchange.request))
            response = final_response(b"".join(data for _, data in pieces))
            self._history.add(response, conversation)
            choices = [_read_response(response, toolset, outcome)]
        tokens = exchange.usage.completion_tokens if exchange.usage is not None and len(choices) == 1 else 0
        name = self._model_name(body, exchange.model)
        per_prompt = count_choices({"n": body.get("n")})
        for at, choice in enumerate(choices):
            prompts = request.prompts[at // per_prompt : at // per_prompt + 1]
            asked = msgspec.structs.replace(request, prompts=prompts)
            entry = ScriptedExchange(
                turn_texts(asked), conversation_digest(asked), _encode_reply(asked, choice, tokens)
            )
            self._models[name].append(entry)

    def _model_name(self, body: Mapping[str, Any], answered: str | None) -> str:
        named = text_of(body.get("model")).strip()
        name = named if MODEL_NAME.fullmatch(named) else answered or ""
        if not MODEL_NAME.fullmatch(name):
            raise BadRequest(f"{(named or name)!r} cannot be the name of a model")
        spelling = self._spellings.setdefault(name.lower(), name)
        if not named:
            self._default = spelling
        return spelling

    def config(self) -> dict[str, Any]:
        models = {
            name: {"engine": "scripted", "replies": _join(entries)} for name, entries in sorted(self._models.items())
        }
        return {"models": models} | ({} if self._default is None else {"default": self._default})


def _read_response(response: Mapping[str, Any], toolset: tools.ToolSet, outcome: ReplayOutcome) -> ChoiceOutcome:
    """The reply of a response, with its calls as the model writes them."""
    located = items.locate([object_of(item) for item in list_of(response.get("output"))], "output")
    parts = [part for message in items.decode(items.window(located), toolset, []) for part in message.parts]
    return msgspec.structs.replace(
        outcome.choices[0],
        text="".join(part.text for part in parts if isinstance(part, Text)),
        reasoning="\n\n".join(part.text for part in parts if isinstance(part, Reasoning)),
        calls=tuple(CallOutcome(part.name, part.arguments) for part in parts if isinstance(part, ToolCall)),
    )


def _encode_reply(request: GenerationRequest, choice: ChoiceOutcome, tokens: int) -> dict[str, Any]:
    text = choice.text
    if request.echo and isinstance(request.prompt, str):
        text = text.removeprefix(request.prompt)
    # The engine's output contains the stop string, and the server ends the reply there.
    text += choice.stop or ""
    calls = [{"name": call.name, "arguments": _arguments(call)} for call in choice.calls]
    reply = {"reasoning": choice.reasoning, "output": text, "calls": calls, "tokens": tokens}
    reply = {name: value for name, value in reply.items() if value} or {"output": ""}
    return reply | ({"finish": choice.finish} if choice.finish in ("length", "content_filter") else {})


def _arguments(call: CallOutcome) -> Any:
    """The arguments as a mapping, which is easier to read, or as they are."""
    return call.parsed if isinstance(call.parsed, dict) else call.arguments


def _join(entries: Sequence[ScriptedExchange]) -> list[dict[str, Any]]:
    """The replies of one model, with conditions that tell their requests apart."""
    by_text: defaultdict[str, list[ScriptedExchange]] = defaultdict(list)
    for entry in entries:
        by_text[entry.turn[0]].append(entry)
    earlier = {text for entry in entries for text in entry.turn[1:]}
    replies: list[dict[str, Any]] = []
    for text, alike in by_text.items():
        by_digest: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for entry in alike:
            by_digest[entry.digest].append(entry.reply)
        has_one_reply = all(entry.reply == alike[0].reply for entry in alike)
        is_clear = bool(text) and len(text) <= MAX_MATCH and text not in earlier
        is_enough = is_clear and (has_one_reply or len(by_digest) == 1)
        for digest, played in list(by_digest.items())[: 1 if is_enough and has_one_reply else None]:
            condition = _match(text) | ({} if is_enough else {"conversation": digest})
            replies += _in_turn(condition, played)
    return replies


def _match(text: str) -> dict[str, str]:
    literal = SPECIAL.sub(r"\\\1", text[:MAX_MATCH])
    end = r"\Z" if len(text) <= MAX_MATCH else ""
    return {"match": f"^{literal}{end}"} if text else {}


def _in_turn(condition: Mapping[str, str], played: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The replies of one conversation in their order. The last one is played from then on."""
    runs = [(reply, len(list(same))) for reply, same in groupby(played)]
    return [
        {**condition, **reply} | ({"times": count} if at < len(runs) - 1 else {})
        for at, (reply, count) in enumerate(runs)
    ]


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if UNUSUAL.search(text) else "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump_config(config: Mapping[str, Any]) -> str:
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
