"""Chat templates of known families, their control tokens, and a conversation to render."""

from pathlib import Path

import msgspec

from dragoman.core.request import GenerationRequest, Message, Reasoning, Text, Tool, ToolCall, ToolResult
from dragoman.formats import FORMATS
from dragoman.prompt import ChatTemplate

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
