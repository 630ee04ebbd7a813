"""Who gets into real servers, with an API key and without: requests whose bodies are never sent, and session ids."""

import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from manthan.benchmarks.server import VllmServer
from manthan.manager.session.hints import LONGEST_NAME

KEY = "Authorization: Bearer sesame"
PIN = "/manthan/sessions/nobody/pin"
HUGE = f"Content-Length: {60 << 20}"
CHUNKED = "Transfer-Encoding: chunked"
LONG = "x" * (LONGEST_NAME + 1)
PATHS = ("/manthan", "/manthan/", "/manthan/page.js", "/manthan/sessions", "/manthan/config", "/manthan/none", PIN)


def status(server: VllmServer, method: str, path: str, *headers: str) -> int:
    """Status of the answer to a request of which no more than the headers is sent."""
    url = urlsplit(server.url)
    host = () if any(header.startswith("Host:") for header in headers) else ("Host: localhost",)
    with socket.create_connection((url.hostname, url.port), timeout=60) as connection:
        lines = [f"{method} {path} HTTP/1.1", *host, "Content-Type: application/json", *headers, "", ""]
        connection.sendall("\r\n".join(lines).encode())
        return int(connection.recv(64).split()[1])


@pytest.mark.parametrize("body", [HUGE, CHUNKED])
@pytest.mark.parametrize("key", [(), ("Authorization: Bearer open",)], ids=["none", "wrong"])
def test_without_the_key_no_body_is_waited_for(steered_server, key: tuple[str, ...], body: str) -> None:
    assert status(steered_server, "POST", PIN, body, *key) == 401
    assert status(steered_server, "POST", PIN, body, "Host: evil.example", *key) == 401


@pytest.mark.parametrize(("body", "answer"), [(HUGE, 413), (CHUNKED, 411)])
def test_nor_a_body_that_is_too_long_or_does_not_say_it(steered_server, manthan_server, body: str, answer: int) -> None:
    for path in PATHS:
        assert status(steered_server, "POST", path, body, KEY) == answer
        assert status(manthan_server, "POST", path, body) == answer
    assert status(manthan_server, "POST", PIN, body, "Host: evil.example") == 403


def test_the_page_is_sent_without_a_key_and_nothing_else_is(steered_server) -> None:
    """A browser has no key to send when it opens a page; the page asks for it, and has no data without."""
    for path in PATHS:
        is_page = path in ("/manthan/", "/manthan/page.js")
        assert status(steered_server, "GET", path) == (200 if is_page else 307 if path == "/manthan" else 401)
        assert status(steered_server, "POST", path) == 401
    assert status(steered_server, "GET", "/manthan/config", "Host: evil.example", KEY) == 200  # a key will do


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
def test_a_name_that_was_made_to_lead_here_gets_nothing(manthan_server, method: str) -> None:
    for path in PATHS:
        assert (
            status(manthan_server, method, path, "Host: evil.example:8000", "Origin: http://evil.example:8000") == 403
        )
        assert status(manthan_server, method, path) != 403
    assert status(manthan_server, "GET", "/health", "Host: evil.example") == 200  # vLLM's own are as they were


ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a" * 500, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a" * 500}], "max_tokens": 1},
    "/v1/responses": {"input": "a" * 500, "max_output_tokens": 16},
    "/inference/v1/generate": {"token_ids": [5] * 100, "sampling_params": {"max_tokens": 1}},
}
WAYS = [
    *[(path, way) for path in ("/v1/completions", "/v1/chat/completions") for way in ("body", "header", "xargs")],
    *[("/v1/responses", "body"), ("/v1/responses", "xargs"), ("/inference/v1/generate", "header")],
]
"""Ways of a session id into the engine. The last one's body has none."""


@pytest.mark.parametrize(("path", "way"), WAYS)
def test_a_session_id_that_nobody_could_be_shown_is_refused(manthan_server, path: str, way: str) -> None:
    before = manthan_server.metrics()["vllm:prompt_tokens_total"]
    for session_id in (LONG, "caf\xa0", *(("a\nb", "\x1b[2J") if way != "header" else ())):
        body = {"model": manthan_server.model, "stream": way == "body", **ASKED[path]}
        body |= {"body": {"session_id": session_id}, "xargs": {"vllm_xargs": {"session_id": session_id}}}.get(way, {})
        headers = {"X-Session-ID": session_id.encode("latin-1")} if way == "header" else {}
        reply = httpx.post(f"{manthan_server.url}{path}", json=body, headers=headers, timeout=60)
        assert reply.status_code == 400, reply.text
        told = reply.json()["error"]["message"]
        assert told.startswith(f"session_id must have at most {LONGEST_NAME} printable characters, not ")
        assert len(told) < 200
    assert manthan_server.metrics()["vllm:prompt_tokens_total"] == before
