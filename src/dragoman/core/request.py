"""What is asked of a model: plain values, the same for every protocol and every engine.

    GenerationRequest
      messages: Message*            a chat, or
      prompts:  (text | token ids)* a completion
      Message  := role, Part*
      Part     := Text | Image | Reasoning | ToolCall | ToolResult

Rules
1. Values are frozen. A request that must differ is a copy (`msgspec.structs.replace`).
2. Nothing here knows a wire format. Each protocol decodes into these values and names what was asked for in
   `GenerationRequest.asked`, with the path of the field that asked for it.
3. A request that reaches an engine has one prompt and wants one choice; `generate` splits larger ones.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec


class Text(msgspec.Struct, frozen=True, tag="text"):
    text: str


class Image(msgspec.Struct, frozen=True, tag="image"):
    """Bytes with their media type, or an address that has not been fetched."""

    data: bytes | None = None
    media_type: str | None = None
    url: str | None = None


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """A thought in the history. A redacted one has no text, only the opaque signature it came with."""

    text: str
    signature: str | None = None


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call"):
    """`arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolResult(msgspec.Struct, frozen=True, tag="tool_result"):
    call_id: str
    content: tuple[Text | Image, ...]
    is_error: bool = False


Part = Text | Image | Reasoning | ToolCall | ToolResult
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(msgspec.Struct, frozen=True):
    role: Role
    parts: tuple[Part, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """The visible text: of text parts, and of tool results in a tool message."""
        return "".join([_visible_text(part) for part in self.parts])

    @property
    def images(self) -> list[Image]:
        """Its own, and those of tool results in it."""
        inner = [part for result in self.parts if isinstance(result, ToolResult) for part in result.content]
        return [part for part in (*self.parts, *inner) if isinstance(part, Image)]


def _visible_text(part: Part) -> str:
    if isinstance(part, Text):
        return part.text
    if isinstance(part, ToolResult):
        return "".join(inner.text for inner in part.content if isinstance(inner, Text))
    return ""


class Tool(msgspec.Struct, frozen=True):
    """A function the model may call; `parameters` is its JSON Schema, and `path` the field that it came in.

    Whether the caller wants the schema kept `strict`ly is for engines of one's own; llama keeps to it either way.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    path: str = "tools"


class ToolChoice(msgspec.Struct, frozen=True):
    """`named` requires the one tool called `name`; `required` any of them."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True


class JsonObject(msgspec.Struct, frozen=True, tag="json_object"):
    pass


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """`path` is the field that the schema came in. `name` and `strict` are for engines of one's own, as in `Tool`."""

    schema: Mapping[str, Any]
    name: str = "response"
    strict: bool = True
    path: str = "response_format"


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    pattern: str


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """A context-free grammar in Lark's notation."""

    text: str


class OneOf(msgspec.Struct, frozen=True, tag="one_of"):
    choices: tuple[str, ...]


Constraint = JsonObject | JsonSchema | Regex | Grammar | OneOf


class Thinking(msgspec.Struct, frozen=True):
    """How much the model may think; None leaves it to the model."""

    enabled: bool | None = None
    effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    budget_tokens: int | None = None

    @property
    def is_off(self) -> bool:
        return self.enabled is False or (self.enabled is None and self.effort == "none")


LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 10
"""With a smaller one the logits overflow."""
RepetitionPenalty = Annotated[float, msgspec.Meta(ge=LEAST_REPETITION_PENALTY, le=MOST_REPETITION_PENALTY)]


class Sampling(msgspec.Struct, frozen=True):
    """None means: not asked for, the model's own default applies. An explicit 0 is honoured."""

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
    """Ask for the log probability of each token and of its `top` likeliest rivals; `prompt` for the prompt's too."""

    top: int = 0
    prompt: bool = False


class Delivery(msgspec.Struct, frozen=True):
    """How the caller wants the reply handed over. An engine may begin anew what is not handed over as a `stream`."""

    stream: bool = False
    usage: bool = False
    token_ids: bool = False


class Asked(msgspec.Struct, frozen=True):
    """A feature that a request asks for, and the path of the wire field that asks."""

    feature: str
    param: str


class GenerationRequest(msgspec.Struct, frozen=True):
    id: str = ""
    model: str = ""
    principal: str = "anonymous"
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    suffix: str | None = None
    echo: bool = False
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    constraint: Constraint | None = None
    thinking: Thinking = Thinking()
    documents: tuple[Mapping[str, Any], ...] = ()
    """Texts to answer from, as the chat templates that know them want them: mostly `title` and `text`."""
    template_options: Mapping[str, Any] = {}
    """Variables for the chat template, which an operator must have allowed."""
    sampling: Sampling = Sampling()
    keep_seconds: float = 0
    """How long what was computed of the prompt is to be kept for others that begin alike, even if room is short."""
    keep_at: tuple[Literal["tools", "system", "messages"], ...] = ()
    """After which parts of the prompt the caller has marked that; nothing: it has not said."""
    labels: Mapping[str, Any] = {}
    """What asks nothing of the reply, and is of use to another server at most: `user`, `metadata`, `prompt_cache_key`,
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

    @property
    def prompt(self) -> str | tuple[int, ...] | None:
        """The prompt of a completion; None in a chat."""
        return self.prompts[0] if self.prompts else None

    @property
    def last_user_text(self) -> str:
        """The text a simple engine answers: of the last user or tool message, or of a completion's prompt."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        for message in reversed(self.messages):
            if message.role in ("user", "tool"):
                return message.text
        return ""
