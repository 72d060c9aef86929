"""Requests to a model: plain values, the same for every protocol and every engine.

    GenerationRequest
      messages: Message*            a chat, or
      prompts:  (text | token ids)* a completion
      Message  := role, Part*
      Part     := Text | Summary | Image | Reasoning | ToolCall | ToolResult

Rules
1. Values are frozen. To change a request, copy it with `msgspec.structs.replace`.
2. These values are independent of wire formats. Each protocol decodes into them and lists the requested features in
   `GenerationRequest.asked`, with the paths of their fields.
3. A request that reaches an engine has one prompt and one choice. `generate` splits larger requests.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.edits import ContextEdit
from dragoman.core.features import Feature
from dragoman.core.tool_servers import ToolServer
from dragoman.core.types import Priority


class Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class Summary(Text, frozen=True, tag="summary"):
    """The text that replaced the earlier part of the conversation (see `core.summary`)."""


class Image(msgspec.Struct, frozen=True, tag="image"):
    """Image data with its media type, or a URL that has not been fetched."""

    data: bytes | None = None
    media_type: str | None = None
    url: str | None = None


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """A reasoning block. A redacted block has no text, only its opaque signature."""

    text: str
    signature: str | None = None


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call"):
    """`arguments` is the JSON text as the model wrote it. `server`, `approval` and `needs_approval` are those of the
    event `ToolCallStart`."""

    id: str
    name: str
    arguments: str
    server: str | None = None
    approval: str | None = None
    needs_approval: bool = False

    @property
    def parsed_arguments(self) -> dict[str, Any]:
        """The arguments as a dict. Raises `msgspec.DecodeError` if they are not a JSON object."""
        return msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])


class ToolResult(msgspec.Struct, frozen=True, tag="tool_result"):
    call_id: str
    content: tuple[Text | Image, ...]
    is_error: bool = False
    code: int | None = None
    """That of the event `ToolOutput`."""


Part = Text | Summary | Image | Reasoning | ToolCall | ToolResult
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(msgspec.Struct, frozen=True):
    role: Role
    parts: tuple[Part, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """The text of text parts and of tool results."""
        return "".join([_visible_text(part) for part in self.parts])

    @property
    def reasoning(self) -> str:
        return "".join([part.text for part in self.parts if isinstance(part, Reasoning)])

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple([part for part in self.parts if isinstance(part, ToolCall)])

    @property
    def images(self) -> list[Image]:
        """The images of this message, including those in tool results."""
        inner = [part for result in self.parts if isinstance(result, ToolResult) for part in result.content]
        return [part for part in (*self.parts, *inner) if isinstance(part, Image)]


def _visible_text(part: Part) -> str:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, ToolResult):
        return "".join(inner.text for inner in part.content if isinstance(inner, Text))
    return ""


class Tool(msgspec.Struct, frozen=True):
    """A function the model may call; `parameters` is its JSON Schema, `path` its field in the request.

    `strict` is a hint for custom engines. The built-in engines always enforce the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    path: str = "tools"


class ToolChoice(msgspec.Struct, frozen=True):
    """`named` requires the tool `name`; `required` requires any tool."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True


class JsonObject(msgspec.Struct, frozen=True, tag="json_object"):
    pass


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """`path` is the field of the schema in the request. `name` and `strict` are for custom engines, as in `Tool`."""

    schema: Mapping[str, Any]
    name: str = "response"
    strict: bool = True
    path: str = "response_format"


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    pattern: str


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """A context-free grammar in Lark's notation, or in GBNF, that of llama.cpp."""

    text: str


class OneOf(msgspec.Struct, frozen=True, tag="one_of"):
    choices: tuple[str, ...]


Constraint = JsonObject | JsonSchema | Regex | Grammar | OneOf


class Thinking(msgspec.Struct, frozen=True):
    """How much the model may reason; None means the model's default."""

    enabled: bool | None = None
    effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    budget_tokens: int | None = None

    @property
    def is_off(self) -> bool:
        return self.enabled is False or (self.enabled is None and self.effort == "none")


MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10
"""Smaller values make the logits overflow."""
RepetitionPenalty = Annotated[float, msgspec.Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]


class Sampling(msgspec.Struct, frozen=True):
    """None means the model's default. An explicit 0 is honoured."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = {}


class Logprobs(msgspec.Struct, frozen=True):
    """Return the log probability of each token and of the most likely ones: of `top` for the tokens of the reply, of
    `prompt` for those of the prompt. None means no log probabilities."""

    top: int | None = 0
    prompt: int | None = None


class Delivery(msgspec.Struct, frozen=True):
    """How the reply is delivered. An engine may restart a reply that is not streamed.

    `token_ids`: with the tokens of prompt and reply. `running_usage`, `timings`: in every piece of a stream.
    """

    stream: bool = False
    usage: bool = False
    token_ids: bool = False
    running_usage: bool = False
    timings: bool = False
    reasoning_fields: tuple[str, ...] = ("reasoning_content", "reasoning")
    """The fields of a chat reply that contain its reasoning."""
    service_tier: bool = False
    """Whether an OpenAI reply names the service tier. That of a batch request always does."""


class Asked(msgspec.Struct, frozen=True):
    """A requested feature, and the path of its field in the request."""

    feature: Feature
    param: str


class GenerationRequest(msgspec.Struct, frozen=True):
    id: str = ""
    model: str = ""
    fingerprint: str = ""
    """Identifies what the reply depends on besides the request: the model's file, the engine, the version."""
    principal: str = "anonymous"
    priority: Priority = "interactive"
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    suffix: str | None = None
    echo: bool = False
    edits: tuple[ContextEdit, ...] = ()
    """What the server does with a long conversation before the model sees it. An engine gets none."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    tool_servers: tuple[ToolServer, ...] = ()
    """Servers with more tools, which Dragoman calls itself. A request that reaches an engine has none."""
    approved_calls: tuple[ToolCall, ...] = ()
    """Calls of an earlier response that the caller approved. Their results in `messages` are still empty."""
    max_tool_calls: int | None = None
    """How many calls of tool servers one response may make."""
    constraint: Constraint | None = None
    thinking: Thinking = Thinking()
    documents: tuple[Mapping[str, Any], ...] = ()
    """Source documents for chat templates that support them, usually with `title` and `text`."""
    template_options: Mapping[str, Any] = {}
    """Variables for the chat template. The operator must allow them."""
    add_generation_prompt: bool = True
    """Whether a rendered chat ends with what the template puts before a reply. A chat that is answered always does."""
    continues_last: bool = False
    """Whether the reply continues the last message, which is from the assistant and ends with text or reasoning."""
    sampling: Sampling = Sampling()
    keep_seconds: float = 0
    """How long the prompt stays in the prefix cache, even if space is short."""
    keep_at: tuple[Literal["tools", "system", "messages"], ...] = ()
    """The parts of the prompt after which the caller set a cache mark."""
    labels: Mapping[str, Any] = {}
    """Fields that do not affect the reply and are only forwarded: `user`, `metadata`, `prompt_cache_key`,
    `safety_identifier`, `service_tier`."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Logprobs | None = None
    choices: int = 1
    best_of: int = 1
    delivery: Delivery = Delivery()
    asked: tuple[Asked, ...] = ()
    extra: Mapping[str, Any] = {}
    """Fields of the body that the protocol does not have. An engine gets those in its `reads_fields`."""
    headers: Mapping[str, str] = {}
    """Headers of the HTTP request, in lower case: those in the engine's `reads_headers`."""

    @property
    def prompt(self) -> str | tuple[int, ...] | None:
        """The prompt of a completion; None in a chat."""
        return self.prompts[0] if self.prompts else None

    @property
    def prefill(self) -> Text | Reasoning | None:
        """The text or the reasoning that the reply continues."""
        if not self.continues_last or not self.messages:
            return None
        last = self.messages[-1]
        parts = [part for part in last.parts if isinstance(part, Text | Reasoning) and part.text]
        if not parts:
            return None
        return Text(last.text) if isinstance(parts[-1], Text) else Reasoning(last.reasoning)

    def with_reply(self, reply: Message) -> "GenerationRequest":
        """The request after a reply, which is a message of its own or the rest of the last one."""
        before = self.messages
        if self.continues_last:
            before, last = before[:-1], before[-1]
            reply = msgspec.structs.replace(last, parts=(*last.parts, *reply.parts))
        return msgspec.structs.replace(self, messages=(*before, reply), continues_last=False)

    @property
    def prefill_path(self) -> str:
        """The path of the message that the reply continues, in the request."""
        path = f"messages[{len(self.messages) - 1}]"
        params = (asked.param for asked in self.asked if asked.feature == Feature.PREFILL)
        return next((param for param in params if param.startswith("messages[")), path)

    @property
    def last_user_text(self) -> str:
        """The text of the last user or tool message, or the prompt of a completion."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        for message in reversed(self.messages):
            if message.role in ("user", "tool"):
                return message.text
        return ""
