"""Prompts that end with the text of the last message."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from dragoman.core.errors import BadRequest
from dragoman.core.features import Feature
from dragoman.core.request import Asked, GenerationRequest, Message, Part, Reasoning, Text, ToolCall
from dragoman.prompt import ChatTemplate, Prompt
from tests.prompt.families import CASES, made, special_controls
from tests.prompt.test_template import CONTROL, TEMPLATES, template

HELLO = Message("user", (Text("Hello!"),))


def open_chat(*parts: Part, **fields: Any) -> GenerationRequest:
    return GenerationRequest(messages=(HELLO, Message("assistant", parts)), continues_last=True, **fields)


def closed(request: GenerationRequest) -> GenerationRequest:
    return replace(request, continues_last=False, add_generation_prompt=False)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("text", ["Good mor", "a\n\n", "{", "I see <b>", "x" * 3000])
def test_prompt_is_cut_after_the_text(name: str, text: str) -> None:
    prompt = made(name).render(open_chat(Text(text)))
    assert prompt.text.endswith(text)
    assert (prompt.opener, prompt.ignored) == (None, ())
    # A template may trim the end of a text that is not continued.
    assert made(name).render(closed(open_chat(Text(text)))).text.startswith(prompt.text.rstrip())


BEFORE = {
    "chatml": "<|im_start|>assistant\n",
    "qwen": "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    "qwen_xml": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "[/INST]",
    "gemma": "<|turn>model\n",
    "deepseek": "<｜Assistant｜></think>",
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "glm": "<|assistant|>\n<think></think>\n",
}
THOUGHTS = {
    "qwen": "<|im_start|>assistant\n<think>\nI thi",
    "glm": "<|assistant|>\n<think>I thi",
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>I thi",
}


@pytest.mark.parametrize("name", CASES)
def test_text_follows_what_the_template_puts_before_it(name: str) -> None:
    assert made(name).render(open_chat(Text("Good mor"))).text.endswith(f"{BEFORE[name]}Good mor")


@pytest.mark.parametrize("name", CASES)
def test_reasoning_is_continued_if_the_template_shows_it(name: str) -> None:
    request = open_chat(Reasoning("I thi"), Text(""))
    if name not in THOUGHTS:
        with pytest.raises(BadRequest, match=r"does not allow to continue an assistant message \(messages\[1\]\)"):
            made(name).render(request)
        return
    prompt = made(name).render(request)
    assert prompt.text.endswith(THOUGHTS[name])
    assert prompt.opener is not None


THINKING_PROMPT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


def test_reasoning_follows_a_generation_prompt_that_opens_it() -> None:
    """A template that leaves out the reasoning of earlier turns."""
    syntax = made("qwen")._format
    built = ChatTemplate(THINKING_PROMPT, bos="", eos="</s>", control=CONTROL, format=syntax)
    prompt = built.render(open_chat(Reasoning("I thi<|user|>")))
    assert prompt.text == "<|user|>Hello!<|assistant|><think>\nI thi<|user|>"
    assert prompt.opener == "<think>"
    assert special_controls(prompt, CONTROL) == ["<|user|>", "<|assistant|>"]


def test_text_after_reasoning() -> None:
    prompt = made("qwen").render(open_chat(Reasoning("I think."), Text("Good mor")))
    assert prompt.text.endswith("<think>\nI think.\n</think>\n\nGood mor")
    assert prompt.opener is None


def test_template_without_a_generation_prompt_variable() -> None:
    prompt = template(TEMPLATES["llama3"]).render(open_chat(Text("Good mor")))
    assert prompt.text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\nGood mor")
    assert prompt.ignored == ()


def test_parts_and_neighbours_are_joined() -> None:
    """Templates that need alternating roles get two assistant messages as one."""
    messages = (HELLO, Message("assistant", (Text("One."),)), Message("assistant", (Text("Tw"), Text("o"))))
    for name in ("mistral", "chatml"):
        prompt = made(name).render(GenerationRequest(messages=messages, continues_last=True))
        assert prompt.text.endswith("Two")
        assert "One." in prompt.text


OMITTING = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
TURN = "{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}"
REWRITING = f"{{% for m in messages %}}{TURN}{{{{ m.content | replace('o', '0') }}}}{{% endfor %}}"
SPLITTING = f"{{% for m in messages %}}{TURN}{{{{ m.content.split('</think>')[-1] }}}}{{% endfor %}}"
REFUSING = (
    f"{{% for m in messages %}}{TURN}{{{{ m.content }}}}{{% endfor %}}"
    "{% if messages[-1].role != 'user' %}{{ raise_exception('end with a question') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "text", "reason"),
    [
        (OMITTING, "Good mor", "leaves out or changes"),
        (REWRITING, "Good mor", "leaves out or changes"),
        (SPLITTING, "<think>a</think>b", "leaves out or changes"),
        (REFUSING, "Good mor", "end with a question"),
    ],
)
def test_template_that_does_not_allow_it(source: str, text: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        template(source).render(open_chat(Text(text)))


@pytest.mark.parametrize(
    "request_",
    [
        GenerationRequest(messages=(HELLO,), continues_last=True),
        open_chat(),
        open_chat(Text("")),
        open_chat(Text("x"), ToolCall("1", "f", "{}")),
        open_chat(Text("x"), Reasoning("y")),
        open_chat(Reasoning("", "signature")),
    ],
)
def test_message_that_cannot_be_continued(request_: GenerationRequest) -> None:
    for path in (f"messages[{len(request_.messages) - 1}]", "messages[7]"):
        with pytest.raises(BadRequest, match="can be continued") as refused:
            made("qwen").render(replace(request_, asked=(Asked(Feature.PREFILL, path),)))
        assert refused.value.param == path


def check_isolated(prompt: Prompt, request: GenerationRequest, name: str) -> None:
    plain = made(name).render(replace(request, messages=(HELLO, Message("assistant", (Text("x"),)))))
    control = CASES[name].control
    assert special_controls(prompt, control) == special_controls(plain, control)
    assert all(not (first.special and second.special) for first, second in pairwise(prompt.segments))


PIECES = [
    *(text for case in CASES.values() for text in case.control),
    "<|",
    "|>",
    "a",
    " ",
    "\n",
    "𘟷",
    "𗀀",
    "<think>",
]


@given(pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=8), name=st.sampled_from(["chatml", "mistral"]))
def test_text_never_becomes_a_control_token(pieces: list[str], name: str) -> None:
    """Also with the characters that the marks consist of."""
    text = "x" + "".join(pieces)
    request = open_chat(Text(text))
    prompt = made(name).render(request)
    assert prompt.text.endswith(BEFORE[name] + text)
    check_isolated(prompt, request, name)
