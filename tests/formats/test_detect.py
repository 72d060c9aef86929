"""Detection of the format from a chat template or a model name."""

import itertools

import pytest

from dragoman.core.errors import ConfigError
from dragoman.core.request import Tool
from dragoman.formats import FALLBACK, FORMATS, detect_format, get_format
from dragoman.pipeline.split import SplitStage
from dragoman.pipeline.text_buffer import Markers

TEMPLATES = [
    ("hermes", "{{ '<tools>' }} return a json object within <tool_call></tool_call> XML tags: {{ tools }}"),
    ("qwen_xml", "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1"),
    ("llama3", '{{- \'<|start_header_id|>assistant\' }} {"name": function name, "parameters": dictionary}'),
    ("llama3", "{{- '<|python_tag|>' + tool_call.name + '.call(' }}"),
    ("pythonic", "{{ '<|header_start|>' + role }} [func_name1(params_name1=params_value1)]"),
    ("pythonic", "{{ '<|tool_list_start|>' }}{{ '<|tool_call_start|>' }}"),
    ("pythonic", "<functions>{{ tools }}</functions> <function_calls>{{ calls }}</function_calls>"),
    ("mistral", "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"),
    ("mistral_array", "{{- '[TOOL_CALLS] [' + calls + ']' }}"),
    ("deepseek", "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments}}"),
    ("deepseek_v3", "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + name + '\\n```json\\n'}}"),
    ("deepseek_dsml", '<｜DSML｜function_calls><｜DSML｜invoke name="$NAME">'),
    ("harmony", "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}"),
    ("glm", "<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>"),
    ("kimi", "{{ '◁think▷' + thought + '◁/think▷' }}"),
    ("gemma", "{{ '<|tool_call>call:' + name }}<tool_call|> {{ '<|channel>thought' }}"),
    ("function_gemma", "{{ '<start_function_call>call:' + name }}"),
    ("channel", "{{ '<|channel>' + name }} and <tool_call>"),
    ("granite", "<|start_of_role|>assistant<|end_of_role|><|tool_call|>{{ calls }}"),
    ("granite", "<|start_of_role|>system<|end_of_role|>Write \\'Here is my thought process:\\' first"),
    ("phi", "{{ '<|tool|>' + tools + '<|/tool|>' }}"),
    ("phi", "prefix it with functools and a list"),
    ("cohere", "<|START_ACTION|>[{{ calls }}]<|END_ACTION|>"),
    ("minimax", '<minimax:tool_call><invoke name="tool"><parameter name="p">v</parameter></invoke>'),
    ("internlm", "<|action_start|><|plugin|>{{ call }}<|action_end|>"),
    ("hunyuan", "<tool_calls>{{ calls }}</tool_calls>"),
    ("ernie", "<think>{{ t }}</think><response>{{ r }}</response><tool_call>{{ c }}</tool_call>"),
]


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_format_is_detected_from_template(name: str, template: str) -> None:
    assert detect_format(template) == name


def test_every_detectable_format_has_a_test_template() -> None:
    assert {name for name, syntax in FORMATS.items() if syntax.template_markers} == {name for name, _ in TEMPLATES}


@pytest.mark.parametrize("template", [None, "", "{{ messages }}", "<|im_start|>{{ role }}\\n{{ content }}<|im_end|>"])
def test_unknown_template_falls_back_to_json(template: str | None) -> None:
    assert detect_format(template) == FALLBACK == "json"


def test_format_is_detected_from_model_name() -> None:
    assert detect_format("<|im_start|>", "SmolLM2-135M-Instruct") == "hermes"
    # A directory may have any name.
    assert (
        detect_format("<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>", "mine") == "hermes"
    )
    # The template has priority.
    assert detect_format("[TOOL_CALLS][ARGS]", "SmolLM2") == "mistral"


def test_format_is_found_by_its_name() -> None:
    assert [get_format(name).name for name in FORMATS] == list(FORMATS)


def test_unknown_format_is_rejected() -> None:
    with pytest.raises(ConfigError, match="hermes, hunyuan"):
        get_format("hermes2")


def searched(name: str) -> list[Markers]:
    syntax, split = FORMATS[name], SplitStage(FORMATS[name], [Tool("f", "", None)])
    channels = syntax.channels
    if channels is None:
        return [split._inside, split._outside, split._closers]
    headers = [channels.open, channels.start, channels.message, *channels.ends]
    return [Markers(*headers, *syntax.frame_markers, *(section.open for section in syntax.calls))]


@pytest.mark.parametrize("name", FORMATS)
def test_no_marker_is_a_prefix_of_another(name: str) -> None:
    """Otherwise the result would depend on how the text is cut."""
    for markers in searched(name):
        for one, other in itertools.permutations(markers.all, 2):
            assert not other.startswith(one)
