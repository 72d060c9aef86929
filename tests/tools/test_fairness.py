"""The measurement of fairness. `make fairness` judges by it, on a quiet machine."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from tools.client import request_bytes, send
from tools.fairness import attacks
from tools.fairness.__main__ import ENGINES, Comparison, Measurement, Phase, join, run, unfair
from tools.server import run_server


def test_victim_is_measured_alone_and_beside_an_attack(capsys: pytest.CaptureFixture[str]) -> None:
    measurement = Measurement(ENGINES["scripted"], seconds=2, rounds=2, has_floor=True)
    problems = run(measurement, ["long_streams"])
    # How much longer it waits depends on what else the machine does.
    assert all("times as long" in problem for problem in problems)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:21].strip() for line in lines] == ["long_streams", "", ""]
    assert [" alone (" in lines[0], "the attacker alone" in lines[1], "under attack" in lines[2]] == [True, True, True]
    assert not any("failed" in line for line in lines)


BODIES = [
    *(attacks.unique_schema, attacks.expensive_schema, attacks.many_tools, attacks.long_prompt),
    *(attacks.too_long_prompt, attacks.many_messages, attacks.long_stream, attacks.many_choices),
]


def test_every_request_of_an_attack_is_answered_or_refused(tmp_path: Path) -> None:
    model = {"engine": "scripted", "context": 8192}
    with run_server(tmp_path, {"models": {attacks.MODEL: model}}, "--workers", "1") as server:
        for body in BODIES:
            result = asyncio.run(send(server.port, request_bytes(body())))
            assert result.ending == "answered" or (result.ending == "error" and result.status == 400), result


def test_wait_beyond_twice_the_quiet_one_is_unfair() -> None:
    quiet = Phase([0.1, 0.1, 0.2], Counter())

    def problems(name: str, first_tokens: list[float], failures: Counter[str]) -> list[str]:
        return unfair(Comparison(name, quiet, Phase(first_tokens, failures)))

    assert problems("mild", [0.1, 0.3, 0.4], Counter()) == []
    assert problems("hard", [0.1, 0.1, 0.5], Counter()) == [
        "hard: the victim waits 2.5 times as long; 2 times are allowed"
    ]
    assert problems("lost", [0.1, 0.2], Counter({"error 503: full": 2})) == ["lost: error 503: full (2 times)"]


def test_rounds_of_a_measurement_are_joined() -> None:
    whole = join([Phase([0.1, 0.5], Counter(a=1)), Phase([0.2, 0.3], Counter(a=1, b=1))])
    assert whole == Phase([0.1, 0.2, 0.3, 0.5], Counter(a=2, b=1))
