"""Lossy restores are recomputed while a real server is idle; no user waits for this, and no session is made of it."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_client import ApiClient
from pydantic_core import to_json
from vllm_engine import BLOCK, MODEL, Table
from warm_server import RECHECKS, warm_server

from manthan.benchmarks.server import VllmServer
from manthan.vllm_hooks import rechecks
from manthan.vllm_hooks.rechecks import Rechecker, Rechecks, divergence

FLAGS = ["--served-model-name", "tiny", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager"]
FLAGS += ["--num-gpu-blocks-override", "131", "--manthan-policy", "lru", "--manthan-idle-after", "0.3"]
QUIET_S = 0.5
IDLE_S = 2.0
"""Seconds after which a restore would have been rechecked."""
DECIDES = ("cache_salt", "lora_request", "mm_features")
"""Fields of a request that decide the answer, besides tokens."""


def serve(tmp_path: Path, *flags: str) -> Iterator[ApiClient]:
    env = {"VLLM_SERVER_DEV_MODE": "1", RECHECKS: str(QUIET_S)}
    with warm_server(MODEL, [*FLAGS, *flags], tmp_path / "log", env) as server:
        server.wait_until_ready(300)
        yield ApiClient(server)
        server.kill()


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiClient]:
    yield from serve(tmp_path_factory.mktemp("lossy"))


def come_back(client: ApiClient, seed: int, **fields: Any) -> Any:
    """Have a session go cold and return. Return the answer."""
    name, prompt = f"chat {seed}", fields.pop("prompt", None) or Table(seed).question(1)[0]
    client.complete(name, prompt, model="tiny", temperature=0)
    client.wait_for_state(name, "cold")
    assert client.http.post("/reset_prefix_cache").json()["success"]
    return client.complete(name, prompt, model="tiny", temperature=0, **fields)


def count(server: VllmServer, name: str = "rechecks_total") -> float:
    return server.metrics()[f"vllm:manthan_{name}"]


def wait_for(client: ApiClient, rechecked: float) -> None:
    client.server.wait_for(lambda: count(client.server) == rechecked, 60, f"recheck {rechecked:g} restores")


def test_a_lossy_restore_is_rechecked_once_and_leaves_no_trace(lossy: ApiClient) -> None:
    server, before = lossy.server, count(lossy.server)
    assert come_back(lossy, 1)["kv_transfer_params"]["manthan"]["lossy_tokens"] > 500
    totals = lossy.get("/state")["totals"]
    wait_for(lossy, before + 1)
    assert lossy.get("/sessions")["total"] == 1
    assert lossy.get("/state")["totals"] | {"evictions": 0} == totals | {"evictions": 0}
    assert count(server, "recheck_divergence_count") == before + 1
    assert math.isfinite(found := count(server, "recheck_divergence_sum"))
    assert 0 < found < 1, "the codec changes something, and little"
    assert count(server, "recheck_same_token_total") <= before + 1
    again = lossy.complete("chat 1", Table(1).question(1)[0], model="tiny", temperature=0)
    assert again["kv_transfer_params"]["manthan"]["lossy_tokens"] > 500, "the session's own KV still serves it"
    time.sleep(IDLE_S)
    assert count(server) == before + 1, "it is no restore"


def test_what_a_recheck_computes_behind_decoded_kv_is_not_taken_for_exact(lossy: ApiClient) -> None:
    """vLLM computes the last token of a prompt, and thereby the last block of a prompt of whole blocks."""
    before, prompt = count(lossy.server), [100 + n % 97 for n in range(8 * BLOCK)]
    come_back(lossy, 5, prompt=prompt)
    wait_for(lossy, before + 1)
    again = lossy.complete("chat 5", [*prompt, 7, 8, 9], model="tiny")  # type: ignore[arg-type]
    assert again["kv_transfer_params"]["manthan"]["lossy_tokens"] == 8 * BLOCK


@pytest.mark.parametrize("asked", [{"cache_salt": "mine"}, {"kv_transfer_params": {"manthan": {"quality": "exact"}}}])
def test_no_salted_request_and_none_for_exact_kv_is_rechecked(lossy: ApiClient, asked: dict[str, Any]) -> None:
    """A restore after it is, so that the time was long enough."""
    before, seed = count(lossy.server), 10 + len(asked)
    come_back(lossy, seed, **asked)
    lossy.server.wait_for(lambda: lossy.get("/state")["sessions"]["active"] == 0, 60, "rest")
    come_back(lossy, seed + 1)
    wait_for(lossy, before + 1)


def test_users_are_answered_during_rechecks(lossy: ApiClient) -> None:
    before = count(lossy.server)
    for seed in range(20, 22):
        come_back(lossy, seed)
        for _ in range(4):
            answer = lossy.complete(f"short {seed}", "Who is there?", model="tiny", max_tokens=2)
            assert answer["usage"]["completion_tokens"] == 2
            lossy.server.wait_for(lambda: lossy.get("/state")["sessions"]["active"] == 0, 60, "rest")
    lossy.server.wait_for(lambda: count(lossy.server) > before, 60, "recheck the last restore")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["{sink_tokens: 100000}", "{guard: false}"])
def test_exact_restores_are_not_rechecked_nor_any_without_the_guard(tmp_path: Path, codec: str) -> None:
    (tmp_path / "manthan.yaml").write_text(f"codec: {codec}")
    for client in serve(tmp_path, "--manthan-config", str(tmp_path / "manthan.yaml")):
        for seed in range(2):
            come_back(client, seed)
            time.sleep(IDLE_S)
        assert count(client.server, "restores_total") == 2
        assert count(client.server) == 0


# -- the task ---------------------------------------------------------------------------------------------


class Client:
    """Engine client with a restore to recheck, and as slow as a test needs; no real one is."""

    def __init__(self, cached: int = 64) -> None:
        self.errored, self.engine_core, self.cached = False, self, cached
        self.told: list[dict[str, Any]] = []
        self.salts: list[str | None] = []
        self.ended, self.go = 0, asyncio.Event()

    async def call_utility_all_async(self, method: str, what: str, asked: dict[str, Any]) -> list[bytes]:
        if what == "rechecked":
            self.told.append(asked)
        return [to_json({"secret": "s", "prompt": [1] * 70, "least": 64, "top": 2} if what == "recheck" else None)]

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.salts.append(prompt.get("cache_salt"))
        try:
            await self.go.wait()
        finally:
            self.ended += 1
        of_token = {5: SimpleNamespace(logprob=-0.1), 6: SimpleNamespace(logprob=-3.0)}
        yield SimpleNamespace(num_cached_tokens=self.cached, outputs=[SimpleNamespace(logprobs=[of_token])])


async def until(done: Any) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.01)


def test_a_request_ends_a_running_recheck_and_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechecks, "ASK_S", 0.01)

    async def run() -> None:
        client, rechecker = Client(), Rechecker()
        rechecker.start(SimpleNamespace(engine_client=client))
        await until(lambda: client.salts)
        assert (client.ended, client.told) == (0, [])
        rechecker.make_way()
        await until(lambda: client.ended == 1 and len(client.salts) == 2)
        assert client.told == []
        client.go.set()
        await until(lambda: client.told)
        assert client.told[0] == {"bound": None, "secret": "s", "divergence": 0.0, "is_same": True}
        assert client.salts[1] is None
        assert client.salts[2], "a fresh salt, so that all is computed"

    asyncio.run(run())


def test_a_prompt_whose_kv_is_gone_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechecks, "ASK_S", 0.01)

    async def run() -> None:
        client, rechecker = Client(cached=32), Rechecker()
        client.go.set()
        rechecker.start(SimpleNamespace(engine_client=client))
        await until(lambda: len(client.salts) == 3)
        assert (client.told, any(client.salts)) == ([], False)

    asyncio.run(run())


class Aborted(Client):
    """As after a pause, which aborts requests."""

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        self.salts.append(prompt.get("cache_salt"))
        yield SimpleNamespace(num_cached_tokens=64, outputs=[SimpleNamespace(logprobs=[])])


def test_an_aborted_recheck_tells_nothing_and_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechecks, "ASK_S", 0.01)

    async def run() -> None:
        client, rechecker = Aborted(), Rechecker()
        rechecker.start(SimpleNamespace(engine_client=client))
        await until(lambda: len(client.salts) == 3)
        assert client.told == []

    asyncio.run(run())


# -- the divergence ---------------------------------------------------------------------------------------


def of(**tokens: float) -> dict[int, float]:
    return {ord(name): math.log(p) for name, p in tokens.items()}


def test_the_divergence_is_that_of_the_named_tokens_and_a_rest() -> None:
    assert divergence(of(a=0.5, b=0.3), of(a=0.5, b=0.3)) == 0
    wanted = 0.5 * math.log(0.5 / 0.4) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.4)
    assert divergence(of(a=0.5, b=0.3), of(a=0.4, b=0.2)) == pytest.approx(wanted)
    unnamed = 0.5 * math.log(0.5 / 0.1) + 0.3 * math.log(0.3 / 0.1) + 0.2 * math.log(0.2 / 0.8)
    assert divergence(of(a=0.5, b=0.3), of(c=0.4, d=0.1)) == pytest.approx(unnamed)


def test_certain_tokens_diverge_finitely() -> None:
    assert 1 < divergence({1: 0.0, 2: -math.inf}, {3: 0.0, 2: -math.inf}) < 100


# -- the engine core's side -------------------------------------------------------------------------------


def test_a_result_counts_once_and_not_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechecks, "EVERY", 1)
    model = SimpleNamespace(max_logprobs=5, logprobs_mode="raw_logprobs")
    core: Any = Rechecks(SimpleNamespace(model_config=model), True)  # type: ignore[arg-type]
    request = SimpleNamespace(prompt_token_ids=[1, 2], prompt_embeds=None, **dict.fromkeys(DECIDES))

    def take() -> dict[str, Any]:
        core.offer(request, ("", "a"), [b"1"], 1)
        taken: dict[str, Any] = core.take(core.due)
        return taken

    taken = take()
    assert (taken["prompt"], taken["top"], core.due) == ([1, 2], 5, None)
    assert not core.accept(""), "nor that of no recheck"
    assert core.accept(taken["secret"])
    assert not core.accept(taken["secret"])
    taken = take()
    core.forget()
    assert not core.accept(taken["secret"])
    late = f"{taken['secret']}-lossy"
    assert late in core
    assert core.asker(late) is None


@pytest.mark.parametrize("given", DECIDES)
def test_a_request_with_more_than_tokens_is_not_remembered(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechecks, "EVERY", 1)
    model = SimpleNamespace(max_logprobs=-1, logprobs_mode="raw_logprobs")
    core: Any = Rechecks(SimpleNamespace(model_config=model), True)  # type: ignore[arg-type]
    request = SimpleNamespace(prompt_token_ids=[1], prompt_embeds=None, **dict.fromkeys(DECIDES) | {given: "some"})
    core.offer(request, ("", "a"), [b"1"], 1)
    assert core.due is None
    core.offer(SimpleNamespace(**vars(request) | {given: None}), ("", "a"), [b"1"], 1)
    assert core.due is not None
    core.ended()
    assert core.due is None, "the engine was not idle for long enough"
