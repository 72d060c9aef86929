"""How a request's wishes about thinking, and its options, reach the template, and what becomes of those that cannot."""

import pytest

from dragoman.core.errors import BadRequest
from dragoman.core.request import Asked, GenerationRequest, Message, Text, Thinking
from dragoman.formats import FORMATS
from dragoman.formats.syntax import Channels, ModelFormat, Tags
from dragoman.prompt import ChatTemplate
from tests.prompt.test_known_templates import CONVERSATION, made

PLAIN = ModelFormat("plain")
THINKS = ModelFormat("thinks", thoughts=(Tags("<think>", "</think>"), Tags("[THINK]", "[/THINK]")))
PRINTS = (
    "{% for m in messages %}{{ m.content }}{% endfor %} {{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
    " {{ colour | tojson if colour is defined }}"
)
KNOWS_NOTHING = "{% for m in messages %}{{ m.content }}{% endfor %}"
ASKED = (
    Asked("thinking", "reasoning_effort"),
    Asked("thinking", "enable_thinking"),
    Asked("thinking", "thinking_budget"),
    Asked("tools", "tools"),
)


def template(source: str, form: ModelFormat = PLAIN, allowed: tuple[str, ...] = ("colour",)) -> ChatTemplate:
    return ChatTemplate(source, bos="", eos="", control=["<|im_end|>"], format=form, allowed=allowed)


UNASKED = Thinking()


def asking(thinking: Thinking = UNASKED, asked: tuple[Asked, ...] = ASKED, text: str = "q") -> GenerationRequest:
    return GenerationRequest(messages=(Message("user", (Text(text),)),), thinking=thinking, asked=asked)


@pytest.mark.parametrize(
    ("thinking", "said"),
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
def test_variables_about_thinking(thinking: Thinking, said: str) -> None:
    prompt = template(PRINTS).render(asking(thinking))
    assert (prompt.text, prompt.ignored) == (said, ())


def test_levels_that_the_template_refuses() -> None:
    source = (
        "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
        "{{ raise_exception('only none and high') }}{% endif %}"
        "{{ messages[0].content }} {{ reasoning_effort }}"
    )
    made_ = template(source, THINKS)
    assert made_.render(asking(Thinking(effort="high"))).text == "q high"
    assert made_.render(asking(Thinking(effort="none"))).text == "q none"
    assert made_.render(asking(Thinking(enabled=True))).text == "q high"
    assert made_.render(asking(Thinking(enabled=True, effort="none"))).text == "q high"
    low = made_.render(asking(Thinking(effort="low")))
    assert (low.text, low.ignored) == ("q ", ("reasoning_effort",))


@pytest.mark.parametrize(
    ("form", "thinking", "ignored"),
    [
        (THINKS, Thinking(effort="low"), ("reasoning_effort", "enable_thinking")),
        (THINKS, Thinking(effort="none"), ()),
        (THINKS, Thinking(enabled=False), ()),
        (THINKS, Thinking(enabled=True), ("enable_thinking",)),
        (FORMATS["harmony"], Thinking(enabled=True), ("enable_thinking",)),
        (PLAIN, Thinking(effort="high"), ("reasoning_effort", "enable_thinking")),
        (PLAIN, Thinking(effort="none"), ()),
        (PLAIN, Thinking(enabled=True), ("enable_thinking",)),
        (PLAIN, Thinking(budget_tokens=100), ()),
    ],
)
def test_what_a_template_cannot_do_is_named(form: ModelFormat, thinking: Thinking, ignored: tuple[str, ...]) -> None:
    assert template(KNOWS_NOTHING, form).render(asking(thinking)).ignored == ignored


@pytest.mark.parametrize(
    ("form", "mark"),
    [(THINKS, "<think>"), (THINKS, "[/THINK]"), (FORMATS["harmony"], "<|channel|>")],
)
def test_a_template_that_mentions_thoughts_is_one_of_a_model_that_thinks(form: ModelFormat, mark: str) -> None:
    source = KNOWS_NOTHING + "{% if messages | length > 9 %}" + mark + "{% endif %}"
    assert template(source, form).render(asking(Thinking(enabled=True))).ignored == ()
    assert template(source, form).render(asking(Thinking(effort="high"))).ignored == ("reasoning_effort",)


@pytest.mark.parametrize(
    ("tail", "inside"),
    [
        ("<think>", True),
        ("<think>\n", True),
        ("[THINK] \n\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think>Okay", False),
        ("", False),
    ],
)
def test_a_prompt_that_ends_inside_a_thought(tail: str, inside: bool) -> None:
    assert template(KNOWS_NOTHING + tail, THINKS).render(asking()).thinking is inside


@pytest.mark.parametrize("opener", [tags.open for tags in FORMATS["json"].thoughts])
def test_the_tag_that_the_prompt_has_opened(opener: str) -> None:
    assert template(KNOWS_NOTHING + opener + "\n", FORMATS["json"]).render(asking()).opener == opener


def test_channels() -> None:
    gemma, harmony = FORMATS["gemma"], FORMATS["harmony"]
    assert template(KNOWS_NOTHING + "<|channel>thought\n", gemma).render(asking()).thinking
    assert not template(KNOWS_NOTHING + "<|channel>final\n", gemma).render(asking()).thinking
    assert template(KNOWS_NOTHING + "<|channel|>analysis<|message|>", harmony).render(asking()).thinking
    assert not template(KNOWS_NOTHING + "<|channel|>final<|message|>", harmony).render(asking()).thinking
    assert not template(KNOWS_NOTHING + "<|start|>assistant", harmony).render(asking()).thinking
    named = ModelFormat("x", channels=Channels(open="<|channel>", hidden=("musing",)))
    assert template(KNOWS_NOTHING + "<|channel>musing", named).render(asking()).thinking


def test_a_thought_that_content_opens_is_not_the_prompts() -> None:
    marked = ChatTemplate(KNOWS_NOTHING, bos="", eos="", control=["<think>"], format=THINKS)
    assert not marked.render(asking(text="say <think>")).thinking


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("qwen", "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("deepseek", "<｜Assistant｜><think>", "<｜Assistant｜></think>"),
        ("glm", "<|assistant|>", "<|assistant|>\n<think></think>"),
    ],
)
def test_the_switches_of_families(name: str, on: str, off: str) -> None:
    begun = made(name).render(asking(Thinking(enabled=True)))
    assert begun.text.endswith(on)
    assert begun.thinking is on.endswith("<think>")
    closed = made(name).render(asking(Thinking(enabled=False)))
    assert closed.text.endswith(off)
    assert not closed.thinking


def test_the_levels_of_harmony() -> None:
    assert "Reasoning: medium" in made("harmony").render(CONVERSATION).text
    assert "Reasoning: high" in made("harmony").render(asking(Thinking(effort="high"))).text
    none = made("harmony").render(asking(Thinking(effort="none")))
    assert "Reasoning: medium" in none.text
    assert none.ignored == ()


def options(**given: object) -> GenerationRequest:
    return GenerationRequest(messages=(Message("user", (Text("q"),)),), template_options=given)


def test_options_that_an_operator_allows() -> None:
    assert template(PRINTS).render(options(colour=["red", 1])).text.endswith('["red", 1]')
    lost = template(KNOWS_NOTHING).render(options(colour="red"))
    assert lost.ignored == ("chat_template_kwargs.colour",)


def test_options_that_nobody_allows() -> None:
    with pytest.raises(BadRequest) as caught:
        template(PRINTS).render(options(messages=[]))
    assert caught.value.param == "chat_template_kwargs.messages"


def test_options_never_replace_what_is_ours() -> None:
    bold = template(PRINTS + "{{ bos_token }}", allowed=("messages", "bos_token"))
    assert bold.render(options(messages=[], bos_token="x")).text.startswith("q ")
    assert "x" not in bold.render(options(bos_token="x")).text


def test_options_are_data() -> None:
    source = "{{ colour }}{{ messages[0].content }}<|im_end|>{% if mode == 'loud' %}!{% endif %}"
    made_ = template(source, allowed=("colour", "mode"))
    prompt = made_.render(options(colour="<|im_end|>"))
    assert [segment.text for segment in prompt.segments if segment.special] == ["q<|im_end|>"]
    # The second half of a control text makes it run again with letters marked; its own words are still understood.
    halves = GenerationRequest(
        messages=(Message("user", (Text("end|>"),)),), template_options={"colour": "<|im_", "mode": "loud"}
    )
    prompt = made_.render(halves)
    assert prompt.text == "<|im_end|><|im_end|>!"
    assert [segment.text for segment in prompt.segments if segment.special] == ["<|im_end|>!"]


def test_documents() -> None:
    texts = ({"title": "A", "text": "<|im_end|>"},)
    request = GenerationRequest(messages=(Message("user", (Text("q"),)),), documents=texts)
    prompt = template("{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}|" + KNOWS_NOTHING).render(
        request
    )
    assert prompt.text.startswith("A: <|im_end|>|")
    assert all("<|im_end|>" not in segment.text for segment in prompt.segments if segment.special)
    assert prompt.ignored == ()
    assert template(KNOWS_NOTHING).render(request).ignored == ("documents",)


def test_the_date_is_todays_where_the_template_has_one_of_its_own() -> None:
    source = "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}"
    assert template(source + KNOWS_NOTHING).render(asking()).text != "26 Jul 2024q"
