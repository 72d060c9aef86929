"""vLLM's errors as an operator reads them. What is raised here has the form of pydantic's errors."""

from typing import Any

import pytest

from dragoman.engines.vllm.error_text import last_line, refusal
from dragoman.engines.vllm.options import VllmOptions, arguments


class Refused(ValueError):
    title = "SomeConfig"

    def __init__(self, *findings: tuple[tuple[str, ...], str, object]) -> None:
        super().__init__("3 validation errors\nFor further information visit https://errors.example")
        self.findings = findings

    def errors(self) -> list[dict[str, Any]]:
        return [{"loc": loc, "msg": msg, "input": given} for loc, msg, given in self.findings]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            Refused((("max_num_batched_tokens",), "Should be more", 0), (("max_num_seqs",), "Should be more", 0)),
            "args.max-num-seqs: Should be more, not 0; SomeConfig.max_num_batched_tokens: Should be more, not 0",
        ),
        (
            Refused((("dtype", "literal"), "Should be 'half'", "x"), (("dtype", "instance"), "Should be a dtype", "x")),
            "args.dtype: Should be 'half' or Should be a dtype, not 'x'",
        ),
        (Refused((("max_model_len",), "Should be less", 9)), "context: Should be less, not 9"),
        (Refused(((), "Value error, 9 heads cannot be shared by 4", object())), "9 heads cannot be shared by 4"),
        (ValueError("one\n  two"), "one two"),
        (TypeError(), "TypeError"),
    ],
)
def test_every_error_is_told_with_its_argument(error: Exception, words: str) -> None:
    options = VllmOptions("m", context=9, args={"max-num-seqs": 0, "dtype": "x"})
    assert refusal(error, options) == words


def test_arguments_may_be_written_as_on_a_command_line() -> None:
    assert arguments(VllmOptions("hf:a/b", args={"max-num-seqs": 4}))["max_num_seqs"] == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Call failed: Worker failed with error 'it's for others', please check the stack trace above",
            "it's for others",
        ),
        ("LoRA rank 600\nis greater", "is greater"),
        ("", "ValueError"),
    ],
)
def test_what_a_worker_says_is_told_without_what_is_around_it(text: str, words: str) -> None:
    assert last_line(ValueError(text)) == words
