"""Server side of completions: decodes requests and encodes replies and streams.

    stream := (text-chunk)* finish-chunk      for every choice, interleaved
              usage-chunk?  "[DONE]"

The choices of the first prompt come first. With `echo` a choice starts with the text and tokens of its prompt.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.events import Detokenizer, Event, Finished, Started, TextDelta, TokenLogprob, Usage
from dragoman.core.features import Feature
from dragoman.core.reply import Choice, Reply
from dragoman.core.request import Asked, GenerationRequest, Logprobs
from dragoman.protocols import json_body, openai, response_format
from dragoman.protocols.reply_extras import encode_timings

MAX_PROMPTS = 1024


class CompletionFields(openai.TextFields, frozen=True, kw_only=True):
    prompt: str | list[Any]
    max_tokens: openai.ReplyLimit | None = None
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    suffix: str | None = None
    best_of: openai.Count | None = None


def decode(body: bytes) -> GenerationRequest:
    parsed = json_body.parse(body)
    fields = json_body.convert(parsed, CompletionFields)
    prompts = _prompts(fields.prompt)
    _check(fields, prompts)
    echo = bool(fields.echo)
    asked = [*_asked(fields, prompts), *openai.requested_features(fields, parsed, response_format.FIELDS)]
    return GenerationRequest(
        **openai.decode_common(fields),
        prompts=prompts,
        suffix=fields.suffix or None,
        echo=echo,
        constraint=response_format.decode(parsed, asked),
        max_tokens=openai.decode_reply_limit(fields, "max_tokens", least=0),
        logprobs=None
        if fields.logprobs is None
        else Logprobs(fields.logprobs, prompt=fields.logprobs if echo else None),
        choices=fields.n or 1,
        best_of=fields.best_of or 1,
        delivery=openai.decode_delivery(fields),
        asked=tuple(asked),
        extra=json_body.extra_fields(parsed, asked),
    )


def _prompts(field: str | list[Any]) -> tuple[str | tuple[int, ...], ...]:
    """Decode a text, token ids, or a list of either."""
    if isinstance(field, str):
        return (field,)
    if not field:
        raise BadRequest("prompt: must not be empty", param="prompt")
    if isinstance(field[0], int):
        return (json_body.convert(field, openai.TokenIds, "prompt"),)
    if len(field) > MAX_PROMPTS:
        raise BadRequest(f"prompt: at most {MAX_PROMPTS} prompts in one request", param="prompt")
    return tuple(_one_prompt(entry, f"prompt[{at}]") for at, entry in enumerate(field))


def _one_prompt(entry: object, path: str) -> str | tuple[int, ...]:
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list) and entry:
        return json_body.convert(entry, openai.TokenIds, path)
    raise BadRequest(f"{path}: expected a string or a list of token ids", param=path)


def _check(fields: CompletionFields, prompts: Sequence[object]) -> None:
    if fields.max_tokens == 0 and not fields.echo:
        raise BadRequest("max_tokens: 0 requires echo", param="max_tokens")
    if fields.best_of is not None:
        if fields.best_of < (fields.n or 1):
            raise BadRequest("best_of: must not be smaller than n", param="best_of")
        if fields.stream and fields.best_of > (fields.n or 1):
            raise BadRequest(
                "best_of: must equal n in a stream; the best reply is known only at the end", param="best_of"
            )
        if fields.best_of > 1 and len(prompts) > 1:
            raise BadRequest("best_of: requires a single prompt", param="best_of")


def _asked(fields: CompletionFields, prompts: Sequence[object]) -> list[Asked]:
    kinds = {Feature.COMPLETION if isinstance(prompt, str) else Feature.TOKEN_PROMPT for prompt in prompts}
    asked = [Asked(kind, "prompt") for kind in sorted(kinds)]
    if fields.suffix:
        asked.append(Asked(Feature.INFILL, "suffix"))
    if fields.logprobs is not None:
        asked.append(Asked(Feature.PROMPT_LOGPROBS if fields.echo else Feature.LOGPROBS, "logprobs"))
    if fields.return_token_ids:
        asked.append(Asked(Feature.TOKEN_IDS, "return_token_ids"))
    if (fields.best_of or 1) > (fields.n or 1):
        asked += [Asked(Feature.BEST_OF, "best_of"), Asked(Feature.LOGPROBS, "best_of")]
    return asked


def _prompt_text(request: GenerationRequest, choice: int, started: Started) -> str:
    if started.prompt_text is not None:
        return started.prompt_text
    prompt = request.prompts[choice // request.choices]
    return prompt if isinstance(prompt, str) else ""


class LegacyLogprobs:
    """Encodes the four parallel lists of this API; offsets count characters from the start of the choice's text."""

    def __init__(self) -> None:
        self._offset = 0
        self._detokenizer = Detokenizer()

    def encode(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            # A character split over several tokens counts once.
            self._offset += len(self._detokenizer.feed(entry.text))
        return {
            "tokens": [_token(entry) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                None if entry.logprob is None else {_token(other): other.logprob for other in (entry, *entry.top)}
                for entry in entries
            ],
            "text_offset": offsets,
        }


def _token(entry: TokenLogprob) -> str:
    """Return the token's text, or its bytes if it is part of a character, so that names stay distinct."""
    try:
        return entry.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.text)


class CompletionEncoder(openai.StreamEncoder):
    def __init__(self, request: GenerationRequest, created: int) -> None:
        super().__init__(request, created, "text_completion")
        self._request = request
        self._logprobs: dict[int, LegacyLogprobs] = {}

    def _text(self, choice: int, text: str) -> dict[str, Any]:
        return {"text": text, "index": choice, "logprobs": None, "finish_reason": None}

    def _frame(self, choice: int, event: Event) -> bytes:
        entry = self._text(choice, "")
        if self._delivery.token_ids:
            entry |= _token_ids(getattr(event, "tokens", ()))
        if isinstance(event, TextDelta):
            if not event.text and not event.tokens:
                return b""
            entry |= {"text": event.text, "logprobs": self._encode_logprobs(choice, event.logprobs)}
        elif isinstance(event, Started) and (self._request.echo or self._delivery.token_ids):
            if self._request.echo:
                entry["text"] = _prompt_text(self._request, choice, event)
                entry["logprobs"] = self._encode_logprobs(choice, event.prompt_logprobs)
            if self._delivery.token_ids:
                entry["prompt_token_ids"] = event.prompt_ids
        elif isinstance(event, Finished):
            self._usages.append(event.usage or Usage())
            entry["finish_reason"] = event.unknown_reason or event.reason
        else:
            return b""
        return self._chunk([entry])

    def _encode_logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._logprobs.setdefault(choice, LegacyLogprobs()).encode(entries) if entries else None


def _token_ids(tokens: Sequence[int]) -> dict[str, Any]:
    return {"ids": tokens, "token_ids": tokens}


def encode_reply(request: GenerationRequest, created: int, reply: Reply) -> dict[str, Any]:
    choices = reply.best(request.choices * len(request.prompts)).choices
    return {
        "id": request.id,
        "object": "text_completion",
        "created": created,
        "model": request.model,
        "system_fingerprint": request.fingerprint,
        **openai.tier_field(request),
        "choices": [_choice(request, choice) for choice in choices],
        "usage": openai.encode_usage(reply.usage),
        **({"timings": encode_timings(choices[0])} if request.delivery.timings else {}),
    }


def _choice(request: GenerationRequest, choice: Choice) -> dict[str, Any]:
    text, entries = choice.text, choice.logprobs
    if request.echo:
        text = _prompt_text(request, choice.index, choice.started) + text
        entries = choice.started.prompt_logprobs + entries
    encoded = {
        "text": text,
        "index": choice.index,
        "logprobs": LegacyLogprobs().encode(entries) if entries else None,
        "finish_reason": choice.unknown_reason or choice.reason,
    }
    if request.delivery.token_ids:
        encoded |= {**_token_ids(choice.tokens), "prompt_token_ids": choice.started.prompt_ids}
    return encoded
