"""How thinking options and template options reach the template, and which are reported as ignored."""

import pytest

from dragoman.core.errors import BadRequest
from dragoman.core.features import Feature
from dragoman.core.request import Asked, GenerationRequest, Message, Text, Thinking
from dragoman.formats import FORMATS
from dragoman.formats.syntax import Channels, ModelFormat, Tags
from dragoman.prompt import ChatTemplate
from tests.prompt.families import CONVERSATION, made

PLAIN = ModelFormat("plain")
THINKS = ModelFormat("thinks", thoughts=(Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]")))
MUSING = ModelFormat("musing", channels=Channels(open="<|channel>", hidden=("musing",)))
GEMMA, HARMONY, JSON = FORMATS["gemma"], FORMATS["harmony"], FORMATS["json"]
PRINTS = (
    "{% for m in messages %}{{ m.content }}{% endfor %} {{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
    " {{ colour | tojson if colour is defined }}"
)
CONTENT_ONLY = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASKED = (
    Asked(Feature.THINKING, "reasoning_effort"),
    Asked(Feature.THINKING, "enable_thinking"),
    Asked(Feature.THINKING, "thinking_budget"),
    Asked(Feature.TOOLS, "tools"),
)


def template(source: str, form: ModelFormat = PLAIN, allowed: tuple[str, ...] = ("colour",)) -> ChatTemplate:
    return ChatTemplate(source, bos="", eos="", control=["<|im_end|>"], format=form, allowed=allowed)


DEFAULT = Thinking()


def asking(thinking: Thinking = DEFAULT, asked: tuple[Asked, ...] = ASKED, text: str = "q") -> GenerationRequest:
    return GenerationRequest(messages=(Message("user", (Text(text),)),), thinking=thinking, asked=asked)


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (Thinking(), "q    "),
        (Thinking(enabled=True), "q True True  "),
        (Thinking(enabled=False), "q False False  "),
        (Thinking(effort="none"), "q False False  "),
        (Thinking(effort="high"), "q True True high "),
        (Thinking(effort="minimal"), "q True True low "),
        (Thinking(enabled=False, effort="high"), "q False False  "),
        (Thinking(budget_tokens=5), "q    "),
    ],
)
def test_thinking_variables(thinking: Thinking, expected: str) -> None:
    prompt = template(PRINTS).render(asking(thinking))
    assert (prompt.text, prompt.ignored) == (expected, ())


def test_rejected_effort_levels_are_ignored() -> None:
    source = (
        "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
        "{{ raise_exception('only none and high') }}{% endif %}"
        "{{ messages[0].content }} {{ reasoning_effort }}"
    )
    chat_template = template(source, THINKS)
    assert chat_template.render(asking(Thinking(effort="high"))).text == "q high"
    assert chat_template.render(asking(Thinking(effort="none"))).text == "q none"
    assert chat_template.render(asking(Thinking(enabled=True))).text == "q high"
    assert chat_template.render(asking(Thinking(enabled=True, effort="none"))).text == "q high"
    low = chat_template.render(asking(Thinking(effort="low")))
    assert (low.text, low.ignored) == ("q ", ("reasoning_effort",))


@pytest.mark.parametrize(
    ("form", "thinking", "ignored"),
    [
        (THINKS, Thinking(effort="low"), ("reasoning_effort", "enable_thinking")),
        (THINKS, Thinking(effort="none"), ()),
        (THINKS, Thinking(enabled=False), ()),
        (THINKS, Thinking(enabled=True), ("enable_thinking",)),
        (HARMONY, Thinking(enabled=True), ("enable_thinking",)),
        (PLAIN, Thinking(effort="high"), ("reasoning_effort", "enable_thinking")),
        (PLAIN, Thinking(effort="none"), ()),
        (PLAIN, Thinking(enabled=True), ("enable_thinking",)),
        (PLAIN, Thinking(budget_tokens=100), ()),
    ],
)
def test_unsupported_thinking_options_are_reported(
    form: ModelFormat, thinking: Thinking, ignored: tuple[str, ...]
) -> None:
    assert template(CONTENT_ONLY, form).render(asking(thinking)).ignored == ignored


@pytest.mark.parametrize(("form", "mark"), [(THINKS, "<think>"), (THINKS, "[/THINK]"), (HARMONY, "<|channel|>")])
def test_template_with_reasoning_markers_supports_thinking(form: ModelFormat, mark: str) -> None:
    source = CONTENT_ONLY + "{% if messages | length > 9 %}" + mark + "{% endif %}"
    assert template(source, form).render(asking(Thinking(enabled=True))).ignored == ()
    assert template(source, form).render(asking(Thinking(effort="high"))).ignored == ("reasoning_effort",)


@pytest.mark.parametrize(
    ("form", "tail", "opener"),
    [
        (THINKS, "<think>", "<think>"),
        (THINKS, "<think>\n", "<think>"),
        (THINKS, "[THINK] \n\n", "[THINK]"),
        (THINKS, "<think>\n\n</think>\n\n", None),
        (THINKS, "<think>Okay", None),
        (THINKS, "", None),
        (GEMMA, "<|channel>thought\n", "<|channel>thought"),
        (GEMMA, "<|channel>final\n", None),
        (HARMONY, "<|channel|>analysis<|message|>", "<|channel|>analysis<|message|>"),
        (HARMONY, "<|channel|>final<|message|>", None),
        (HARMONY, "<|start|>assistant", None),
        (MUSING, "<|channel>musing", "<|channel>musing"),
        *((JSON, f"{tags.open}\n", tags.open) for tags in JSON.thoughts),
    ],
)
def test_opener_is_the_reasoning_tag_at_the_end_of_the_prompt(form: ModelFormat, tail: str, opener: str | None) -> None:
    assert template(CONTENT_ONLY + tail, form).render(asking()).opener == opener


def test_reasoning_tag_in_content_does_not_open_reasoning() -> None:
    marked = ChatTemplate(CONTENT_ONLY, bos="", eos="", control=["<think>"], format=THINKS)
    assert not marked.render(asking(text="say <think>")).opener


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("qwen", "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("deepseek", "<｜Assistant｜><think>", "<｜Assistant｜></think>"),
        ("glm", "<|assistant|>", "<|assistant|>\n<think></think>"),
    ],
)
def test_thinking_switches_of_families(name: str, on: str, off: str) -> None:
    start = made(name).render(asking(Thinking(enabled=True)))
    assert start.text.endswith(on)
    assert (start.opener is not None) is on.endswith("<think>")
    closed = made(name).render(asking(Thinking(enabled=False)))
    assert closed.text.endswith(off)
    assert closed.opener is None


def test_harmony_effort_levels() -> None:
    assert "Reasoning: medium" in made("harmony").render(CONVERSATION).text
    assert "Reasoning: high" in made("harmony").render(asking(Thinking(effort="high"))).text
    none = made("harmony").render(asking(Thinking(effort="none")))
    assert "Reasoning: medium" in none.text
    assert none.ignored == ()


def options(**given: object) -> GenerationRequest:
    return GenerationRequest(messages=(Message("user", (Text("q"),)),), template_options=given)


def test_allowed_template_options() -> None:
    assert template(PRINTS).render(options(colour=["red", 1])).text.endswith('["red", 1]')
    lost = template(CONTENT_ONLY).render(options(colour="red"))
    assert lost.ignored == ("chat_template_kwargs.colour",)


def test_disallowed_template_option_is_rejected() -> None:
    with pytest.raises(BadRequest) as caught:
        template(PRINTS).render(options(messages=[]))
    assert caught.value.param == "chat_template_kwargs.messages"


def test_template_options_cannot_replace_reserved_variables() -> None:
    bold = template(PRINTS + "{{ bos_token }}", allowed=("messages", "bos_token"))
    assert bold.render(options(messages=[], bos_token="x")).text.startswith("q ")
    assert "x" not in bold.render(options(bos_token="x")).text


def test_template_options_are_data() -> None:
    source = "{{ colour }}{{ messages[0].content }}<|im_end|>{% if mode == 'loud' %}!{% endif %}"
    chat_template = template(source, allowed=("colour", "mode"))
    prompt = chat_template.render(options(colour="<|im_end|>"))
    assert [segment.text for segment in prompt.segments if segment.special] == ["q<|im_end|>"]
    # A split control text causes a second run with marked characters. The template still recognizes its own words.
    halves = GenerationRequest(
        messages=(Message("user", (Text("end|>"),)),), template_options={"colour": "<|im_", "mode": "loud"}
    )
    prompt = chat_template.render(halves)
    assert prompt.text == "<|im_end|><|im_end|>!"
    assert [segment.text for segment in prompt.segments if segment.special] == ["<|im_end|>!"]


def test_documents_are_passed_to_the_template() -> None:
    texts = ({"title": "A", "text": "<|im_end|>"},)
    request = GenerationRequest(messages=(Message("user", (Text("q"),)),), documents=texts)
    prompt = template("{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}|" + CONTENT_ONLY).render(request)
    assert prompt.text.startswith("A: <|im_end|>|")
    assert all("<|im_end|>" not in segment.text for segment in prompt.segments if segment.special)
    assert prompt.ignored == ()
    assert template(CONTENT_ONLY).render(request).ignored == ("documents",)


def test_date_string_is_today() -> None:
    source = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}"
    assert template(source + CONTENT_ONLY).render(asking()).text != "26 Jul 2024q"
