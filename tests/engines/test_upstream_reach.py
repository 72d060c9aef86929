"""Addresses and names the upstream engine uses: redirects, proxies, certificates, images, all models of a server."""

from pathlib import Path

import pytest

from dragoman.config.loading import Flags, load_settings
from dragoman.server.http.server import tls_context
from dragoman.server.routes import build_app
from tests.engines.upstream_app import CHAT, USER, ask, ask_all, client_of, sent, upstream_app
from tests.support.bad_server import HELLO, BadServer, answer, refused
from tests.support.certificates import write_certificate


def test_redirects_are_not_followed(server: BadServer, other: BadServer) -> None:
    server.play([f"HTTP/1.1 307 No\r\nlocation: {other.url}{CHAT}\r\ncontent-length: 0\r\n\r\n".encode()])
    other.play(HELLO)
    assert ask(upstream_app(server.url)).status_code == 502
    assert not other.requests


def test_only_the_configured_proxy_is_used(
    server: BadServer, other: BadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy"):
        monkeypatch.setenv(name, other.url)
    server.play(HELLO)
    assert ask(upstream_app(server.url)).status_code == 200
    other.play(HELLO, path=f"{server.url}{CHAT}")
    proxy = other.url.replace("://", "://me:hidden@")
    assert ask(upstream_app(server.url, proxy=proxy)).status_code == 200
    # The second request went only to the proxy, with credentials.
    assert len(server.requests[CHAT]) == len(other.requests[f"{server.url}{CHAT}"]) == 1
    assert "\r\nproxy-authorization: basic bwu6aglkzgvu\r\n" in other.heads[-1]


def test_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = write_certificate(tmp_path)
    with BadServer(tls_context(tls)) as server:
        server.play(HELLO)
        # The certificate is signed by an unknown authority.
        assert ask(upstream_app(server.url)).status_code == 503
        assert not server.requests[CHAT]
        monkeypatch.setenv("SSL_CERT_FILE", tls.certificate)
        first, second = ask_all(upstream_app(server.url), [{}, {"stream": True}])
        assert first.json()["choices"][0]["message"]["content"] == "Hello"
        assert second.text.rstrip().endswith("[DONE]")
        assert len(server.requests[CHAT]) == 2


@pytest.mark.parametrize("allowed", [False, True])
def test_image_urls_need_the_option(server: BadServer, other: BadServer, allowed: bool) -> None:
    server.play(HELLO)
    other.play(HELLO, path="/cat.png")
    app = upstream_app(server.url, image_urls=allowed)
    links = (f"{other.url}/cat.png", "data:image/png;base64,iVBORw0KGgo=")
    pictures = [[{"type": "image_url", "image_url": {"url": link}}] for link in links]
    responses = ask_all(app, [{"messages": [{"role": "user", "content": picture}]} for picture in pictures])
    assert [response.status_code for response in responses] == [200 if allowed else 400, 200]
    assert not other.requests
    passed_on = [body["messages"][0]["content"][0]["image_url"]["url"] for body in sent(server)]
    assert passed_on == list(links if allowed else links[1:])


async def test_all_models_of_a_server(server: BadServer) -> None:
    server.play(HELLO)
    server.also(answer({"data": [{"id": "Org/Big", "max_model_len": 99}, {"id": "small"}]}), path="/v1/models")
    server.also(answer({"data": [{"embedding": [3, 4]}]}), path="/v1/embeddings")
    async with client_of(upstream_app(server.url, name="cloud", models="all")) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["cloud/Org/Big", "cloud/small"]
        body = {"model": "cloud/org/big", "messages": USER}
        reply = await client.post(CHAT, json=body)
        assert reply.json()["model"] == "cloud/Org/Big"
        assert (await client.post(CHAT, json=body | {"model": "cloud/none"})).status_code == 404
        for path in (CHAT, "/v1/messages/count_tokens") * 3:
            # Repeated, because it must not count as a failure of the server.
            refusal = await client.post(path, json=body | {"model": "cloud"})
            assert refusal.status_code == 404
            assert "stands for several models: cloud/Org/Big, cloud/small" in refusal.text
        assert (await client.post(CHAT, json=body)).status_code == 200
        made = await client.post("/v1/embeddings", json={"model": "cloud/small", "input": "a"})
        assert made.json()["model"] == "cloud/small"
        assert made.json()["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
        asked = {"model": "cloud/org/big", "query": "a", "documents": ["b"]}
        assert (await client.post("/v1/rerank", json=asked)).status_code == 502
    assert [body["model"] for body in sent(server)] == ["Org/Big"] * 2
    assert [body["model"] for body in sent(server, "/v1/embeddings")] == ["small", "Org/Big"]


async def test_unknown_model_names_are_not_metric_labels(server: BadServer) -> None:
    server.play(refused("404 Not Found", code="model_not_found"))
    server.also(refused("404 Not Found"), path="/v1/models")
    async with client_of(upstream_app(server.url, name="cloud", models="all")) as client:
        for name in ("cloud/made-up", "cloud/made-up-too"):
            assert (await client.post(CHAT, json={"model": name, "messages": USER})).status_code == 404
        page = (await client.get("/metrics")).text
    assert 'model="cloud"' in page
    assert "made-up" not in page
    assert [body["model"] for body in sent(server)] == ["made-up", "made-up-too"]


def test_alias_of_an_upstream_model(tmp_path: Path) -> None:
    file = tmp_path / "dragoman.yaml"
    file.write_text("models: {cloud: {engine: upstream, url: 'http://a', models: all}}\naliases: {gpt: cloud/gpt-9}\n")
    settings = load_settings(str(file), Flags(), {})
    assert build_app(settings).catalog.resolve("gpt").name == "cloud/gpt-9"
