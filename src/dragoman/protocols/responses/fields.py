"""The fields of a Responses request."""

from typing import Annotated, Any, Literal

import msgspec

from dragoman.protocols import openai


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None


class ReasoningSettings(msgspec.Struct, frozen=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class TextFormatField(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class TextField(msgspec.Struct, frozen=True):
    format: TextFormatField | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] | None = None


ToolChoiceField = Literal["none", "auto", "required"] | ResponseToolChoice | None


class ResponseFields(openai.SamplingFields, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: openai.Count | None = None
    max_output_tokens: openai.Count | None = None
    text: TextField | None = None
    reasoning: ReasoningSettings | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    metadata: Annotated[dict[str, Any], msgspec.Meta(max_length=16)] | None = None
    client_metadata: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: openai.Retention | None = None
    prompt_cache_options: Any = None
    safety_identifier: str | None = None
