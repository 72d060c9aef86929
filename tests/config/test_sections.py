"""The sections keys, telemetry, cors and tls of a file."""

from pathlib import Path

import pytest

from dragoman.config.loading import Flags, load_settings
from dragoman.core.errors import ConfigError
from tests.config.loading import load


def test_sections_with_relative_paths() -> None:
    Path("etc").mkdir()
    Path("etc/team.yaml").write_text(
        "models: {smollm2: smollm2}\n"
        "socket: run/dragoman.sock\n"
        "event_log: events.jsonl\n"
        "proxies: [10.0.0.0/8, unix]\n"
        "keys:\n"
        "  store: /var/lib/keys.db\n"
        "  limits: {concurrency: 2}\n"
        "  jwt: {algorithm: RS256, key_file: public.pem, routes: [chat]}\n"
        "tls: {certificate: server.pem, key: server.key}\n"
        "cors: {origins: ['https://app.example']}\n"
        "telemetry: {log_format: json, traces: {endpoint: 'http://127.0.0.1:4318/v1/traces'}}\n"
    )
    settings = load_settings("etc/team.yaml", Flags(anonymous=True), {})
    assert (settings.socket, settings.event_log) == ("etc/run/dragoman.sock", "etc/events.jsonl")
    assert settings.keys.store == "/var/lib/keys.db"
    assert settings.keys.anonymous
    assert settings.keys.jwt is not None
    assert settings.keys.jwt.key_file == "etc/public.pem"
    assert settings.tls is not None
    assert settings.tls.certificate == "etc/server.pem"
    flags = Flags(tls_certificate="a.pem", tls_key="a.key", socket="here.sock")
    assert load_settings("etc/team.yaml", flags, {}).socket == "here.sock"
    with pytest.raises(ConfigError, match="give both"):
        load_settings("etc/team.yaml", Flags(tls_key="a.key"), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys:\n  stroe: x\n", "2: keys.stroe: unknown key"),
        ("keys:\n  limits:\n    concurrency: 0\n", "3: keys.limits.concurrency: expected int >= 1"),
        ("keys: {jwt: {algorithm: none, key_file: x}}\n", "1: keys.jwt.algorithm: invalid enum value"),
        ("telemetry:\n  log_level: loud\n", "2: telemetry.log_level: invalid enum value"),
        ("tls: {certificate: x}\n", "1: tls: key is missing"),
        ("tls: yes\n", "1: tls: expected a mapping, got bool"),
        ("keys:\n  jwt:\n    algorithm: HS256\n", "2: keys.jwt: key_file is missing"),
        ("proxies:\n  - 10.0.0.0/8\n  - nowhere\n", "3: proxies[1]: 'nowhere': expected an address, a network"),
        ("socket: ''\n", "1: socket: expected str of length >= 1"),
        ("drain_seconds: -1\n", "1: drain_seconds: expected float >= 0.0"),
        ("cors:\n  origins: https://a.example\n", "2: cors.origins: expected array, got str"),
    ],
)
def test_errors_in_sections(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value).startswith(f"dragoman.yaml:{message}")


def test_errors_of_all_sections_are_reported() -> None:
    text = (
        "keys:\n"
        "  limits: {concurrency: 0, requests: 5}\n"
        "  jwt: {algorithm: none, limits: {tokens_per_minute: many}}\n"
        "telemetry: {metrics: maybe, traces: {service: x}}\n"
        "cors: {max_age_seconds: -1}\n"
        "proxies: [here]\n"
        "tls: {}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(text, Flags(tls_key="x"))
    assert [message.split(": ")[:2] for message in caught.value.messages] == [
        ["dragoman.yaml:2", "keys.limits.requests"],
        ["dragoman.yaml:2", "keys.limits.concurrency"],
        ["dragoman.yaml:3", "keys.jwt.algorithm"],
        ["dragoman.yaml:3", "keys.jwt"],
        ["dragoman.yaml:3", "keys.jwt.limits.tokens_per_minute"],
        ["dragoman.yaml:4", "telemetry.metrics"],
        ["dragoman.yaml:4", "telemetry.traces"],
        ["dragoman.yaml:5", "cors.max_age_seconds"],
        ["dragoman.yaml:6", "proxies[0]"],
        ["dragoman.yaml:7", "tls"],
        ["dragoman.yaml:7", "tls"],
        ["--tls-certificate and --tls-key belong together", "give both"],
    ]
