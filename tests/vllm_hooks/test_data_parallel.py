"""Two data-parallel engines of one `vllm serve`, each with sessions of its own, behind two API servers."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_client import WAIT_S, ApiClient
from warm_server import warm_server

MODEL = str(Path(__file__).parents[1] / "data" / "tiny-llama")
POOL = 131
FLAGS = ["--block-size", "32", "--num-gpu-blocks-override", str(POOL), "--max-model-len", "2048", "--enforce-eager"]
MANTHAN = ["--manthan-policy", "lru", "--manthan-idle-after", "3600", "--manthan-cold-bytes", "64MiB"]
TEXT = " says hello to everybody" * 48
START_S = 600.0
SESSIONS = {"alice": 0, "bob": 1, "carol": 0, "dave": 1}
"""By the engine that has them."""


class Api(ApiClient):
    def status(self, path: str) -> int:
        return self.http.get(f"/manthan{path}").status_code

    def talk(self, name: str, engine: int) -> int:
        """Return the number of the prompt's tokens that were not computed."""
        headers = {"X-data-parallel-rank": str(engine)}  # as a router sends it that knows where a session is
        reply = self.complete(name, name + TEXT, headers, ignore_eos=True)
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    def engines(self, **query: Any) -> list[tuple[str, int]]:
        return [(session["id"], session["engine"]) for session in self.get("/sessions", **query)["sessions"]]

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        self.server.wait_for(done, WAIT_S, what)

    def metric(self, name: str, **labels: str) -> Counter[str]:
        """By engine."""
        found: Counter[str] = Counter()
        for said, has, value in self.server.samples():
            if said == f"vllm:manthan_{name}" and labels.items() <= has.items():
                found[has["engine"]] += int(value)
        return found


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Each session is in one of them, and erin in both, in the second one last."""
    log = tmp_path_factory.mktemp("data-parallel") / "log"
    flags = [*FLAGS, *MANTHAN, "--data-parallel-size", "2", "--enable-prompt-tokens-details"]
    with warm_server(MODEL, flags, log, {"VLLM_SERVER_DEV_MODE": "1"}) as server:
        server.wait_until_ready(START_S)
        found = Api(server)
        for name, engine in [*SESSIONS.items(), ("erin", 0), ("erin", 1)]:
            assert found.talk(name, engine) == 0
        found.wait_until(lambda: found.get("/state")["sessions"]["idle"] == 6, "have no request any more")
        yield found
        server.kill()


@pytest.mark.slow
def test_sessions_of_both_engines_are_seen_and_steered(api: Api) -> None:
    everybody = [*SESSIONS.items(), ("erin", 0), ("erin", 1)]
    assert sorted(api.engines()) == sorted(everybody)
    assert [name for name, _ in api.engines(sort="id")] == sorted(name for name, _ in everybody)
    pages = [api.engines(limit=1, offset=at) for at in range(7)]
    assert list(chain.from_iterable(pages)) == api.engines() == everybody[::-1]
    assert {api.get("/sessions", limit=2)["total"] for _ in range(4)} == {6}, "whichever API server answers"
    assert api.get("/sessions/erin")["engine"] == 1

    state = api.get("/state")
    assert state["pool"]["blocks"] == 2 * (POOL - 1)
    assert sorted(state["policy"]["order"]) == sorted(name for name, _ in everybody)

    api.post("/sessions/bob/evict")
    api.wait_until(lambda: api.get("/sessions/bob")["state"] == "cold", "evict bob")
    assert api.engines(state="cold") == api.engines(tier="host") == [("bob", 1)]
    api.post("/sessions/erin/evict")
    api.wait_until(lambda: len(api.engines(state="cold")) == 3, "evict erin of both engines")
    cold = api.get("/sessions", state="cold")["sessions"]
    state = api.get("/state")
    assert state["sessions"] == {"active": 0, "idle": 3, "cold": 3}
    assert state["totals"]["evictions"] == 3
    (tier,) = state["store"]["tiers"]
    assert tier == {
        "name": "host",
        "used_bytes": sum(session["cold_bytes"] for session in cold),
        "budget_bytes": 2 * (64 << 20),
    }
    assert sorted(state["policy"]["order"]) == sorted(name for name, _ in everybody)

    httpx.post(f"{api.server.url}/reset_prefix_cache").raise_for_status()  # only what is saved stays
    blocks = {(session["id"], session["engine"]): session["cold_blocks"] for session in cold}
    bob, erin = blocks["bob", 1], blocks["erin", 0]
    assert (api.talk("bob", 1), api.talk("erin", 0)) == (32 * bob, 32 * erin)
    api.wait_until(lambda: api.metric("restored_blocks_total") == {"0": erin, "1": bob}, "tell of both restores")
    assert api.get("/sessions/erin")["engine"] == 0
    api.wait_until(lambda: api.metric("sessions", state="cold") == {"0": 0, "1": 1}, "tell of the other engine's erin")
    assert api.metric("sessions", state="idle") == {"0": 1, "1": 1}

    assert api.post("/sessions/bob/release")["engine"] == 1
    assert (api.status("/sessions/bob"), api.status("/sessions/erin")) == (404, 200)
    assert sorted(api.engines()) == [("erin", 0), ("erin", 1)]
