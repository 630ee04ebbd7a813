"""Hints on a real `vllm serve` that takes tenants from a header: what passes, what is refused, and what is told."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from manthan.benchmarks.server import VllmServer

MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
TEXT = "let us say hello " * 30
ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/completions": {"prompt": TEXT},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
}
OPENAI = ["/v1/chat/completions", "/v1/completions"]


@pytest.fixture(scope="module")
def server(manthan_server: VllmServer) -> VllmServer:
    return manthan_server


def post(
    server: VllmServer, path: str, hints: object = None, tenants: tuple[str, ...] = (), **fields: Any
) -> httpx.Response:
    limit = {"max_output_tokens": 16} if path == "/v1/responses" else {"max_tokens": 4}
    params = {"kv_transfer_params": {"manthan": hints}} if hints is not None else {}
    headers = [("X-Tenant-ID", tenant) for tenant in tenants]
    body = {"model": MODEL, **ENDPOINTS[path], **limit, **params, **fields}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def hint_counts(server: VllmServer) -> dict[str, float]:
    """vllm:manthan_hints_total by hint."""
    return {of["hint"]: value for name, of, value in server.samples() if name == "vllm:manthan_hints_total"}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_hints_that_cannot_be_used_are_answered_with_400(server, path: str) -> None:
    before = server.metrics()["vllm:prompt_tokens_total"]
    for hints, sentence in [
        ({"pinn": True}, "kv_transfer_params.manthan: unknown hint 'pinn' (did you mean 'pin'?)"),
        (
            {"ttl_s": "5m"},
            "kv_transfer_params.manthan.ttl_s must be a number of seconds above 0, and at most 2592000 (30 days), not "
            "'5m'",
        ),
        ({"release": True, "pin": True}, "kv_transfer_params.manthan: release drops the session when this request "),
    ]:
        reply = post(server, path, hints, stream=path in OPENAI)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["message"].startswith(sentence)
        assert error["type"] == "BadRequestError"
    assert server.metrics()["vllm:prompt_tokens_total"] == before  # none of it entered the engine


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", OPENAI)
def test_hints_pass_and_are_counted(server, path: str, stream: bool) -> None:
    before = hint_counts(server)
    hints = {"pin": False, "ttl_s": 60, "priority": -1, "expect_return_s": 5, "prefetch": "bob"}
    reply = post(server, path, hints, session_id="alice", stream=stream)
    assert reply.status_code == 200, reply.text
    if stream:
        chunks = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        assert chunks[-1] == "[DONE]"
        assert not [chunk for chunk in chunks[:-1] if "error" in json.loads(chunk)]
    server.wait_for(
        lambda: all(hint_counts(server).get(hint, 0) == before.get(hint, 0) + 1 for hint in hints), 120, "count them"
    )


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_client_is_told_what_came_of_its_hints(server, path: str) -> None:
    own = {"session_id": f"carol at {path}"} if path != "/v1/messages" else {}
    reply = post(server, path, {"priority": 1}, **own).json()
    told = reply["kv_transfer_params"]["manthan"]
    assert set(told) == {"session_id", "pinned", "refused", "lossy_tokens"}
    assert told["session_id"] == own.get("session_id", told["session_id"])
    assert (told["pinned"], told["refused"]) == (False, None)
    assert post(server, path, **own).json().get("kv_transfer_params") is None


def test_a_pin_is_told_and_so_is_its_refusal(server) -> None:
    def told(session: str, text: str, pin: bool) -> dict[str, Any]:
        reply = post(server, "/v1/completions", {"pin": pin}, session_id=session, prompt=f"{session} {text}")
        return reply.json()["kv_transfer_params"]["manthan"]

    def refusals() -> float:
        return server.metrics().get("vllm:manthan_pins_refused_total", 0)

    before = refusals()
    assert told("dave", TEXT, True) == {"session_id": "dave", "pinned": True, "refused": None, "lossy_tokens": 0}
    refusal = told("frank", 4 * TEXT, True)
    assert (refusal["session_id"], refusal["pinned"]) == ("frank", False)
    assert re.fullmatch(
        r"pin is refused: pinned sessions may take 671088 bytes of the cold store \(tiers.pinned_share is 0.01\), "
        r"[1-9]\d* are taken, and this session needs [1-9]\d*",
        refusal["refused"],
    )
    unpinned = {"session_id": "dave", "pinned": False, "refused": None, "lossy_tokens": 0}
    assert told("dave", TEXT, False) | {"lossy_tokens": 0} == unpinned
    server.wait_for(lambda: refusals() == before + 1, 60, "count the refusal")


@pytest.mark.parametrize("path", OPENAI)
def test_a_client_cannot_pass_for_another_tenant(server, path: str) -> None:
    refused = post(server, path, {"tenant": "beta"}, ("acme",))
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("kv_transfer_params.manthan.tenant is 'beta', but here the")
    assert post(server, path, {"tenant": "beta"}).status_code == 400
    assert post(server, path, {"tenant": "acme"}, ("acme",)).status_code == 200
    twice = post(server, path, None, ("acme", "beta"))
    assert twice.status_code == 400
    assert twice.json()["error"]["message"] == "the header X-Tenant-ID must be given once, not with 2 different values"
