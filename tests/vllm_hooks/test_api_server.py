"""Sessions over HTTP on a real `vllm serve`: seen and steered, by tenant, behind the API key; also by command."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_client import WAIT_S, ApiClient
from typer.testing import CliRunner

from manthan.benchmarks.server import VllmServer
from manthan.manager.cli import app

MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
KEY = "sesame"
ABSENT = (
    "No blocks of a session {!r} are kept: none ever were (sessions of fewer than 64 tokens are not: idle.min_tokens), "
    "or all were dropped."
)
TEXT = " says hello to everybody" * 24
TOKENS, BLOCKS = 192, 6
ACTIONS: dict[str, dict[str, Any]] = {name: {} for name in ("evict", "prefetch", "pin", "unpin", "release")}
ACTIONS["expect"] = {"seconds": 5}
"""Bodies of the actions on a session."""


class Api(ApiClient):
    """Client with the server's key, for a tenant if there is one."""

    def __init__(self, server: VllmServer, tenant: str | None = None, key: str = KEY) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        super().__init__(server, headers | ({} if tenant is None else {"X-Tenant-ID": tenant}))

    def refused(self, method: str, path: str, **request: Any) -> tuple[int, str]:
        """Status and sentence of an error, in the form of vLLM's."""
        reply = self.http.request(method, f"/manthan{path}", **request)
        assert reply.headers["content-type"] == "application/json"
        [error] = reply.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == reply.status_code
        assert "\n" not in error["message"]
        return reply.status_code, error["message"]

    def ids(self, **query: Any) -> list[str]:
        return [session["id"] for session in self.get("/sessions", **query)["sessions"]]

    def talk(self, name: str, text: str = TEXT, max_tokens: int = 4) -> int:
        """Return the number of the prompt's tokens."""
        reply = self.complete(name, name + text, max_tokens=max_tokens, ignore_eos=True)
        return int(reply["usage"]["prompt_tokens"])

    def empty_pool(self) -> None:
        """What is cold is restored when it returns."""
        assert self.http.post("/reset_prefix_cache").json()["success"]


@pytest.fixture
def api(steered_server: VllmServer) -> Api:
    """Client that sees all. No session is left, but their names are known again."""
    found = Api(steered_server)
    steered_server.wait_for(
        lambda: found.http.post("/reset_prefix_cache?reset_external=true").json()["success"], WAIT_S, "forget all KV"
    )
    assert found.ids() == []
    return found


# -- what is seen ---------------------------------------------------------------------------------------


def test_sessions_are_listed_filtered_sorted_and_paged(api) -> None:
    acme, beta = Api(api.server, "acme"), Api(api.server, "beta")
    api.talk("alice")
    acme.talk("bob", 2 * TEXT)
    beta.talk("carol")
    beta.post("/sessions/carol/evict")
    beta.wait_for_state("carol", "cold")
    assert api.ids() == ["beta/carol", "acme/bob", "alice"]
    assert api.ids(sort="tokens", limit=1) == ["acme/bob"]
    assert api.ids(sort="id", limit=1, offset=1) == ["alice"]
    assert api.ids(sort="id", order="desc") == ["beta/carol", "alice", "acme/bob"]
    assert api.ids(state="idle,active", sort="id") == ["acme/bob", "alice"]
    assert api.ids(tenant="acme") == api.ids(prefix="acme/") == ["acme/bob"]
    assert api.ids(tier="host") == api.ids(state="cold") == ["beta/carol"]
    assert api.ids(tier="disk") == api.ids(pinned="true") == []
    assert api.get("/sessions", limit=1)["total"] == 3
    [cold, _, idle] = api.get("/sessions")["sessions"]
    assert (idle["tokens"], idle["blocks"], idle["hot_blocks"], idle["cold_blocks"]) == (TOKENS, BLOCKS, BLOCKS, 0)
    assert (cold["tokens"], cold["hot_blocks"], cold["cold_blocks"]) == (TOKENS, BLOCKS, BLOCKS)
    assert (cold["hot_bytes"], idle["cold_bytes"], idle["tiers"]) == (idle["hot_bytes"], 0, {})
    assert cold["tiers"] == {
        "host": {"tokens": cold["tokens"], "blocks": cold["cold_blocks"], "bytes": cold["cold_bytes"]}
    }
    assert 4 < idle["hot_bytes"] / cold["cold_bytes"] < 6
    assert idle["created"] <= idle["last_used"] <= api.get("/sessions")["now"]
    api.empty_pool()
    [cold] = api.get("/sessions", state="cold")["sessions"]
    assert (cold["hot_blocks"], cold["hot_bytes"], cold["cold_blocks"]) == (0, 0, BLOCKS)


def test_the_state_of_the_whole(api) -> None:
    before = api.get("/state")
    first = api.talk("eve")  # no other test has a session of this name, which would be known again
    api.post("/sessions/eve/evict")
    api.wait_for_state("eve", "cold")
    api.empty_pool()
    prompts = first + Api(api.server, "acme").talk("tom") + api.talk("eve")
    state = api.wait("/state", lambda state: state["sessions"]["idle"] == 2)
    assert (state["model"], state["version"]) == (MODEL, version("manthan-kv"))
    assert (state["policy"]["name"], state["policy"]["options"]) == ("lru", {})
    assert state["policy"]["order"] == ["acme/tom", "eve"]
    [tier] = state["store"].pop("tiers")
    assert state["store"] == {
        **{"kind": "host", "up": True, "codec": "wht-5x", "verdict": "none", "measuring": None},
        "refinements": 0,
    }
    assert tier == {"name": "host", "used_bytes": tier["used_bytes"], "budget_bytes": 64 << 20}
    assert tier["used_bytes"] == api.get("/sessions/eve")["cold_bytes"] > 0
    pool = state["pool"]
    assert (pool["block_tokens"], pool["blocks"]) == (32, 130)
    assert pool["session_bytes"] * 130 == BLOCKS * pool["bytes"], "only those of tom are not saved"
    added = {name: state["totals"][name] - value for name, value in before["totals"].items()}
    took_ms = added.pop("restore_ms")
    assert added == {
        **{"evictions": 1, "restores": 1, "prefetches": 0, "failures": 0, "prompt_tokens": prompts},
        **{"computed_tokens": prompts - TOKENS, "restored_tokens": TOKENS, "lossy_tokens": TOKENS},
        **{"returns": 1, "return_resident_tokens": 0, "return_restored_tokens": TOKENS},
        **{"return_recomputed_tokens": first - TOKENS},
    }
    assert took_ms > 0
    assert state["token_s"] is None, "no step was full"


def test_the_configuration_as_it_was_resolved(api) -> None:
    found = api.get("/config")
    assert found["tiers.max_bytes"] == {"value": 64 << 20, "from": "flag"}
    assert found["idle.after_s"] == {"value": 3600, "from": "file"}
    assert found["tiers.redis.ttl_s"] == {"value": 86400, "from": "default"}
    assert KEY not in json.dumps(found)


# -- what is steered ------------------------------------------------------------------------------------


def test_a_sleeping_engine_is_looked_at_only(api) -> None:
    api.talk("alice")
    api.post("/sessions/alice/evict")
    api.server.wait_for(lambda: api.ids(state="cold") == ["alice"], 60, "let alice go cold")
    assert api.http.post("/sleep?level=1").status_code == 200
    try:
        for action in ACTIONS:
            status, sentence = api.refused("POST", f"/sessions/alice/{action}", json=ACTIONS[action])
            assert (status, sentence) == (503, "The engine sleeps.")
        assert api.ids(state="cold") == ["alice"]
    finally:
        assert api.http.post("/wake_up").status_code == 200
        api.talk("bob")


# -- who may ----------------------------------------------------------------------------------------------


def test_a_tenant_sees_and_steers_its_own_only(api) -> None:
    acme, beta, nobody = (Api(api.server, name) for name in ("acme", "beta", ""))
    for each in (acme, beta, nobody):
        each.talk("alice")
    acme.talk("bob")
    assert (acme.ids(sort="id"), beta.ids(), nobody.ids()) == (["alice", "bob"], ["alice"], ["alice"])
    assert acme.ids(tenant="beta") == []
    for action in ACTIONS:
        assert beta.refused("POST", f"/sessions/bob/{action}", json=ACTIONS[action]) == (
            404,
            ABSENT.format("bob"),
        )
        assert beta.refused("POST", f"/sessions/acme%2Fbob/{action}", json=ACTIONS[action])[0] == 404
    assert beta.refused("GET", "/sessions/bob") == (
        404,
        ABSENT.format("bob"),
    )
    assert nobody.refused("GET", "/sessions/acme%2Fbob")[0] == 404
    beta.post("/sessions/alice/release")
    assert (acme.ids(sort="id"), beta.ids(), nobody.ids()) == (["alice", "bob"], [], ["alice"])
    assert (acme.get("/state")["sessions"]["idle"], beta.get("/state")["sessions"]["idle"]) == (2, 0)
    assert acme.get("/state")["policy"]["order"] == ["alice", "bob"]
    assert acme.refused("GET", "/config") == (403, "The configuration is not shown to tenants.")
    twice = [("X-Tenant-ID", "acme"), ("X-Tenant-ID", "beta")]
    sentence = "the header X-Tenant-ID must be given once, not with 2 different values"
    assert Api(api.server).refused("GET", "/sessions", headers=twice) == (422, sentence)


# -- mistakes, and what the server says of itself -----------------------------------------------------------


SECONDS = "seconds must be a number of seconds above 0 and at most 2592000, or null, not"


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("state=warm", "state must be some of active, idle, cold, with commas between them, not 'warm'"),
        ("pinned=perhaps", "pinned must be true or false, not 'perhaps'"),
        ("sort=size", "sort must be one of last_used, tokens, cold_bytes, hot_bytes, id, state, expected, not 'size'"),
        ("order=up", "order must be asc or desc, not 'up'"),
        ("limit=0", "limit must be a whole number from 1 to 500, not '0'"),
        ("limit=501", "limit must be a whole number from 1 to 500, not '501'"),
        ("offset=-1", "offset must be a whole number from 0 to 1000000, not '-1'"),
        ({"json": {"seconds": -1}}, f"{SECONDS} -1"),
        ({"json": {"seconds": "soon"}}, f"{SECONDS} 'soon'"),
        ({"json": {"second": 1}}, "The body has an unknown field 'second'."),
        ({"json": [1]}, "The body must be a JSON object, not [1]."),
        ({"content": "{1", "headers": {"Content-Type": "application/json"}}, "The body is not valid JSON."),
    ],
)
def test_a_parameter_or_a_body_that_cannot_be_used(api, asked: str | dict[str, Any], sentence: str) -> None:
    method, path = ("GET", f"/sessions?{asked}") if isinstance(asked, str) else ("POST", "/sessions/alice/pin")
    api.talk("alice")
    assert api.refused(method, path, **({} if isinstance(asked, str) else asked)) == (422, sentence)
    assert not api.get("/sessions/alice")["pinned"]


def test_the_server_s_documents_have_the_routes(api) -> None:
    schema = httpx.get(f"{api.server.url}/openapi.json", timeout=60).json()
    paths = {path: set(methods) for path, methods in schema["paths"].items() if path.startswith("/manthan/s")}
    steered = {f"/manthan/sessions/{{id}}/{action}": {"post"} for action in ACTIONS}
    seen = {f"/manthan/{path}": {"get"} for path in ("sessions", "sessions/{id}", "state")}
    assert paths == seen | steered
    listed = schema["paths"]["/manthan/sessions"]["get"]
    assert listed["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Sessions")
    assert {"401", "403", "411", "413", "422", "503"} < set(listed["responses"])
    assert listed["security"] == [{"HTTPBearer": []}]
    assert all(parameter["description"] for parameter in listed["parameters"])


# -- the command --------------------------------------------------------------------------------------------


def sessions(api: Api, *words: str, key: str | None = KEY) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["sessions", *words, "--url", api.server.url], env={"VLLM_API_KEY": key})
    return done.exit_code, done.output


def test_the_command_sees_pins_and_releases(api) -> None:
    api.talk("alice")
    Api(api.server, "acme").talk("bob")
    status, table = sessions(api, "list")
    rows = [line.split() for line in table.splitlines()]
    assert (status, [row[0] for row in rows]) == (0, ["id", "acme/bob", "alice"])
    assert rows[1][1:4] == ["acme", "idle", str(TOKENS)]
    assert len(sessions(api, "list", "--tenant", "acme")[1].splitlines()) == 2
    assert sessions(api, "list", "--limit", "1")[1].endswith("1 of 2 sessions.\n")
    api.post("/sessions/acme%2Fbob/evict")
    api.wait_for_state("acme/bob", "cold")
    assert sessions(api, "list", "--state", "cold", "--sort", "id")[1].splitlines()[1].startswith(" acme/bob")
    status, shown = sessions(api, "show", "bob", "--tenant", "acme")
    assert (status, "went cold" in shown.lower(), "tokens" in shown) == (0, True, True)
    facts = dict(line.split() for line in shown.splitlines() if len(line.split()) == 2)
    assert (facts["exact"], facts["age"][:5]) == ("False", "0:00:")
    assert sessions(api, "pin", "alice", "--seconds", "60") == (0, "alice is pinned; it is idle.\n")
    assert sessions(api, "list")[1].splitlines()[2].split()[-1] == "True"
    assert sessions(api, "pin", "alice", "--off") == (0, "alice is not pinned; it is idle.\n")
    assert sessions(api, "release", "alice") == (0, "alice is forgotten.\n")
    assert sessions(api, "show", "alice") == (
        1,
        ABSENT.format("alice") + "\n",
    )


def test_the_command_says_what_is_wrong_in_a_sentence(api, plain_server) -> None:
    for key in (None, "open"):
        assert sessions(api, "list", key=key)[1].startswith("The API key is missing or wrong")
    assert sessions(api, "list", "--state", "warm")[1].startswith("state must be some of active, ")
    away = CliRunner().invoke(app, ["sessions", "list", "--url", "http://127.0.0.1:9"])
    assert away.exit_code == 1
    assert away.output.startswith("The server at http://127.0.0.1:9 cannot be reached: ")
    plain = CliRunner().invoke(app, ["sessions", "list", "--url", plain_server.url])
    assert plain.output.startswith(f"The server at {plain_server.url} has no /manthan: is Manthan on, with its API?")
    wrong = CliRunner().invoke(app, ["sessions", "list", "--url", "redis://127.0.0.1"])
    assert (wrong.exit_code, wrong.output.count("\n")) == (1, 1)
