"""Hints and tenants on their way from a request to the scheduler, without an engine."""

import argparse
import asyncio
import contextvars
import gc
import weakref
from typing import Any

import pytest
from logged import warnings
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.exceptions import VLLMClientError
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from manthan.manager.config.model import ManthanConfig
from manthan.manager.session.hints import NO_HINTS, HintError, Hints, parse_hints
from manthan.manager.session.manager import Outcome
from manthan.vllm_hooks.http import hints
from manthan.vllm_hooks.http.hints import answer_to, checked_params, hints_of, keep, tenant_of
from manthan.vllm_hooks.http.middleware import HeldAnswer, Message
from manthan.vllm_hooks.plugin import MIDDLEWARE, read_flags

HEADER = "X-Tenant-ID"


def request_with(params: object, cache_salt: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request("r", [1, 2, 3], sampling, None, cache_salt=cache_salt)


def checked_behind_a_gateway(params: object, *values: str | bytes) -> Any:
    """Return the kv_transfer_params of a request whose header has these values, as they are checked."""
    headers = [(b"host", b"here"), *((b"x-tenant-id", v.encode() if isinstance(v, str) else v) for v in values)]

    def check() -> object:
        keep(headers)
        return checked_params(params, HEADER)

    return contextvars.copy_context().run(check)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"manthan": {"pinn": True}}, "kv_transfer_params.manthan: unknown hint 'pinn' (did you mean 'pin'?)"),
        ({"manthan": [1]}, "kv_transfer_params.manthan must be a mapping of hints to values, not [1]"),
        ([1], "kv_transfer_params must be a mapping, not [1]"),
        ({"pin": True}, "kv_transfer_params.pin is not read: write kv_transfer_params.manthan.pin"),
        ({"Mantan": {}}, "kv_transfer_params: unknown key 'Mantan' (did you mean 'manthan'?)"),
    ],
)
def test_what_is_refused_is_both_the_clients_fault_and_a_value_error(
    params: object, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "is_on", lambda config: True)
    monkeypatch.setattr(hints, "from_vllm_config", lambda config: ManthanConfig())
    no_config: Any = None
    with pytest.raises(hints.RequestHintError) as error:
        hints.checked(no_config, params, None)
    assert str(error.value) == sentence
    assert isinstance(error.value, VLLMClientError)  # status 400
    assert isinstance(error.value, ValueError)


def test_the_header_says_who_the_tenant_is_and_the_client_does_not() -> None:
    params = {"manthan": {"pin": True}, "other": 1}
    assert checked_behind_a_gateway(params, "acme") == {"manthan": {"pin": True, "tenant": "acme"}, "other": 1}
    assert params == {"manthan": {"pin": True}, "other": 1}
    for nothing in (None, {}, {"manthan": None}, {"manthan": {"tenant": None}}, {"manthan": {"tenant": ""}}):
        assert checked_behind_a_gateway(nothing, "acme") == {"manthan": {"tenant": "acme"}}
        assert checked_behind_a_gateway(nothing) == {"manthan": {"tenant": ""}}
    assert checked_behind_a_gateway({"manthan": {"tenant": "acme"}}, "acme", "acme") == {"manthan": {"tenant": "acme"}}
    assert checked_behind_a_gateway(None, "Zürich") == {"manthan": {"tenant": "Zürich"}}


@pytest.mark.parametrize("values", [[], ["acme"]])
def test_a_client_that_names_another_tenant_is_refused(values: list[str]) -> None:
    with pytest.raises(HintError, match="tenant is 'beta', but here the header X-Tenant-ID alone says"):
        checked_behind_a_gateway({"manthan": {"tenant": "beta"}}, *values)
    with pytest.raises(HintError, match="leave the hint out"):  # outside of the server there is no header
        checked_params({"manthan": {"tenant": "beta"}}, HEADER)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (["acme", "beta"], "the header X-Tenant-ID must be given once, not with 2 different values"),
        ([b"\xff"], "the header X-Tenant-ID must be a name of at most 256 printable characters, not '\\udcff'"),
        (["a\tb"], "the header X-Tenant-ID must be a name of at most 256 printable characters, not 'a\\tb'"),
    ],
)
def test_headers_that_name_nobody_are_refused(values: list[str | bytes], sentence: str) -> None:
    with pytest.raises(HintError) as error:
        checked_behind_a_gateway(None, *values)
    assert str(error.value) == sentence


def test_hints_of_a_request() -> None:
    assert hints_of(request_with(None)) is hints_of(request_with({})) is NO_HINTS
    assert hints_of(Request("r", [1], SamplingParams(max_tokens=1), None)) is NO_HINTS
    assert hints_of(request_with({"manthan": {"pin": True, "prefetch": "b"}})) == Hints(pin=True, prefetch=("b",))
    for unchecked in ([1], {"manthan": 3}, {"manthan": {"tenant": 7}}, {"manthan": {"pinn": 1}}):
        assert hints_of(request_with(unchecked)) is NO_HINTS
        assert tenant_of(request_with(unchecked)) == ""


def enveloped(*payloads: object, params: object = None, version: str = "1.0", salt: str | None = None) -> Request:
    """A request with an action for each payload, between others that are not for Manthan."""
    ours = [KvHintAction(str(n), "manthan.hints", version, payload) for n, payload in enumerate(payloads)]
    others = [KvHintAction("x", "kv.fetch", "1.0", {"pin": True, "hashes": [1]})]
    request = request_with(params, salt)
    request.kv_hints = KvHintsEnvelope("0.1", "message", [*others, *ours, *others])
    return request


def test_what_the_client_leaves_open_an_orchestrator_may_say() -> None:
    assert hints_of(enveloped()) == NO_HINTS
    assert hints_of(enveloped({"pin": True, "priority": 3})) == Hints(pin=True, priority=3)
    own = {"manthan": {"priority": -2, "pin": False, "release": False}}
    asked = enveloped({"priority": 3, "pin": True, "ttl_s": 7, "prefetch": "b"}, {"release": True}, params=own)
    assert hints_of(asked) == Hints(priority=-2, pin=False, ttl_s=7, prefetch=("b",))


def test_an_orchestrator_adds_to_ranges_and_a_parent() -> None:
    own = {"keep": [{"from": 0, "to": 64, "seconds": 5}]}
    merged = hints_of(enveloped({"parent_session_id": "planner", "keep": []}, params={"manthan": own}))
    assert merged == parse_hints(own | {"parent_session_id": "planner"})
    assert hints_of(enveloped(own)) == parse_hints(own)


def test_what_contradicts_the_client_is_left_out() -> None:
    assert hints_of(enveloped({"release": True, "ttl_s": 3}, params={"manthan": {"pin": True}})) == Hints(
        pin=True, ttl_s=3
    )
    over = hints_of(enveloped({"expect_return_s": 3, "priority": 1}, params={"manthan": {"release": True}}))
    assert over == Hints(release=True, priority=1)


@pytest.mark.parametrize(
    ("payload", "version", "sentence"),
    [
        ({"pinn": True}, "1.0", "manthan.hints.payload: unknown hint 'pinn' (did you mean 'pin'?)"),
        (
            {"ttl_s": -1},
            "1.0",
            "manthan.hints.payload.ttl_s must be a number of seconds above 0, and at most 2592000 (30 days), not -1",
        ),
        ([1], "1.0", "manthan.hints.payload must be a mapping of hints to values, not [1]"),
        ({"pin": True}, "7", "manthan.hints has version '7', and must have 1.0"),
    ],
)
def test_an_action_that_cannot_be_used_is_told_of_once_and_refuses_nobody(
    payload: object, version: str, sentence: str
) -> None:
    request = enveloped(payload, params={"manthan": {"priority": 1}}, version=version)
    with warnings() as said:
        for _ in range(2):
            assert hints_of(request) == Hints(priority=1)
    assert said == [f"Manthan: an action of kv_hints is ignored: {sentence}."]


def test_who_pays() -> None:
    acme = {"manthan": {"tenant": "acme"}}
    assert tenant_of(request_with(None)) == ""
    assert tenant_of(request_with(acme, "salt")) == "acme"
    assert tenant_of(request_with(checked_behind_a_gateway(None, "acme"), "salt")) == "acme"
    assert tenant_of(request_with(checked_behind_a_gateway(None), "salt")) == ""  # or clients could make up tenants
    # An orchestrator names a tenant where neither client nor gateway does.
    assert tenant_of(enveloped({"tenant": "acme"}, salt="salt")) == "acme"
    assert tenant_of(enveloped({"tenant": "beta"}, params=acme)) == "acme"
    assert tenant_of(enveloped({"tenant": "acme"}, params=checked_behind_a_gateway(None))) == ""


def test_a_salt_makes_a_tenant_whose_name_does_not_tell_it() -> None:
    first, again, other = (tenant_of(request_with(None, salt)) for salt in ("one", "one", "other"))
    assert first == again != other
    assert first.startswith("salt-")
    assert len(first) == len("salt-") + 16
    assert "one" not in first
    assert tenant_of(request_with({"manthan": {"pin": True, "tenant": None}}, "one")) == first


def test_only_who_gave_hints_is_answered() -> None:
    pinned = Outcome("alice", True, "")
    assert answer_to(NO_HINTS, pinned) is None
    assert answer_to(Hints(tenant="acme"), pinned) is None
    assert answer_to(Hints(pin=True), None) is None
    assert answer_to(Hints(pin=True, tenant="acme"), pinned) == {
        "manthan": {"session_id": "alice", "pinned": True, "refused": None, "lossy_tokens": 0}
    }
    assert answer_to(Hints(pin=True), Outcome("alice", False, "no room"))["manthan"]["refused"] == "no room"


def by_hand(**manthan: Any) -> argparse.Namespace:
    """Flags with Manthan's connector as somebody wrote it into --kv-transfer-config."""
    transfer = KVTransferConfig(
        kv_connector="ManthanConnector", kv_role="kv_both", kv_connector_extra_config={"manthan": manthan}
    )
    return argparse.Namespace(middleware=["theirs"], kv_transfer_config=transfer)


def test_a_connector_that_was_written_by_hand_is_read_like_a_file(caplog: pytest.LogCaptureFixture) -> None:
    flags = by_hand(tenants={"header": HEADER}, idle=37)
    for _ in range(2):  # vLLM may read its flags twice
        read_flags(flags)
        assert flags.middleware == ["theirs", MIDDLEWARE]
    assert ["idle.after_s is 37:" in text for text in caplog.messages] == [True]
    with pytest.raises(SystemExit, match=r"^vllm: error: argument: unknown key 'polcy' \(did you mean 'policy'\?\)$"):
        read_flags(by_hand(polcy="lru"))


def test_an_answered_stream_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the timer that would end the holding back, nor a cycle of references, keeps the request in memory."""
    monkeypatch.setattr(hints, "is_on", lambda config: False)
    answers: list[weakref.ref[HeldAnswer]] = []
    no_config: Any = None

    async def answered() -> None:
        sent: list[str] = []

        async def send(message: Message) -> None:
            sent.append(message["type"])

        answer = HeldAnswer(keep([]), {}, None, send)
        answers.append(weakref.ref(answer))
        await answer.send({"type": "http.response.start", "headers": [(b"content-type", b"text/event-stream")]})
        assert not sent, "held back"
        hints.checked(no_config, None, None)
        await asyncio.sleep(0.01)
        await answer.send({"type": "http.response.body", "more_body": False})
        assert sent == ["http.response.start", "http.response.body"]

    async def main() -> None:
        await asyncio.create_task(answered())
        await asyncio.sleep(0)
        assert answers[0]() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
