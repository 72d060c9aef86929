"""Chat templates of known families, their control tokens, and a conversation to render."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dragoman.core.request import GenerationRequest, Message, Reasoning, Text, Tool, ToolCall, ToolResult
from dragoman.formats import FORMATS
from dragoman.prompt import ChatTemplate, Prompt

FOLDER = Path(__file__).parent / "templates"


class Case(msgspec.Struct, frozen=True):
    """The format and the control tokens of a model."""

    format: str
    control: tuple[str, ...]
    bos: str = ""
    eos: str = ""


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CASES = {
    "chatml": Case("hermes", CHATML, eos="<|im_end|>"),
    "qwen": Case("hermes", CHATML, eos="<|im_end|>"),
    "qwen_xml": Case("qwen_xml", CHATML, eos="<|im_end|>"),
    "llama3": Case(
        "llama3",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "mistral": Case(
        "mistral_array",
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
        ),
        bos="<s>",
        eos="</s>",
    ),
    "gemma": Case(
        "gemma",
        (
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
            *("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>'),
        ),
        bos="<bos>",
        eos="<turn|>",
    ),
    "deepseek": Case(
        "deepseek",
        (
            *(
                "<｜begin▁of▁sentence｜>",
                "<｜end▁of▁sentence｜>",
                "<｜User｜>",
                "<｜Assistant｜>",
                "<think>",
                "</think>",
            ),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
    ),
    "harmony": Case(
        "harmony", ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"), eos="<|return|>"
    ),
    "glm": Case("glm", ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")),
}

WEATHER = Tool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
    },
)
CALL = ToolCall("call_wx12345678", "get_weather", '{"city": "Zürich", "days": 2}')
CONVERSATION = GenerationRequest(
    messages=(
        Message("system", (Text("You are terse."),)),
        Message("user", (Text("Will it rain in Zürich?"),)),
        Message("assistant", (Reasoning("They want a forecast."), CALL)),
        Message("tool", (ToolResult(CALL.id, (Text('{"rain": true}'),)),)),
        Message("assistant", (Reasoning("It says rain."), Text("Yes."))),
        Message("user", (Text("And in Bern?"),)),
    ),
    tools=(WEATHER,),
    template_options={"date_string": "15 Nov 2026"},
)
WORKING = msgspec.structs.replace(CONVERSATION, messages=CONVERSATION.messages[:4])


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text("utf-8")


def made(name: str) -> ChatTemplate:
    """A template with the format and control tokens of the model."""
    case = CASES[name]
    return ChatTemplate(
        source(name),
        bos=case.bos,
        eos=case.eos,
        control=case.control,
        format=FORMATS[case.format],
        allowed=("date_string",),
    )


def hostile_request(word: str) -> GenerationRequest:
    """Return a request with the word in every string."""
    arguments = msgspec.json.encode({word: word}).decode()
    return GenerationRequest(
        messages=(
            Message("system", (Text(word),)),
            Message("system", (Text(word[:-5]),)),
            Message("user", (Text(word),), name=word),
            Message("assistant", (Reasoning(word), Text(word), ToolCall(word, word, arguments))),
            Message("tool", (ToolResult(word, (Text(word),), is_error=True),), name=word),
            Message("assistant", (Text(word),)),
            Message("system", (Text(word),)),
            Message("user", (Text(word),)),
        ),
        tools=(Tool(word, word, {"type": "object", "properties": {word: {"type": "string", "description": word}}}),),
    )


def special_controls(prompt: Prompt, control: Iterable[str]) -> list[str]:
    """Return the control texts in the special segments of a prompt."""
    longest_first = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
    return [found for part in prompt.segments if part.special for found in re.findall(longest_first, part.text)]
