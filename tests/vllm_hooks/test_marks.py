"""Marks on real servers: decoded KV is encoded never again, and other sessions are served exact KV only."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from vllm_engine import BLOCK, MODEL, NAMES
from warm_server import warm_server

from manthan.benchmarks.server import VllmServer

HELD = np.fromfile(Path(MODEL) / "held_tokens.u16", np.uint16).tolist()
HEAD = HELD[: 15 * BLOCK]
"""As long as a prompt of the plain server may be, but for a question."""
OTHERS = 4
FLAGS = ["--block-size", str(BLOCK), "--enforce-eager", "--enable-prompt-tokens-details"]
FLAGS += ["--max-model-len", "3072", "--num-gpu-blocks-override", "100"]


@pytest.fixture(scope="module")
def server(unguarded_server: VllmServer) -> VllmServer:
    return unguarded_server


class Said(dict[str, Any]):
    """A completion's first token and its logprobs, cached tokens, and what the client was told besides."""


def ask(server: VllmServer, prompt: list[int] | str, session: str | None = None, **fields: Any) -> Said:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 5, **fields}
    if session is not None:
        body["session_id"] = session
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    said = reply.json()
    choice, details = said["choices"][0], said["usage"]["prompt_tokens_details"] or {}
    return Said(
        text=choice["text"],
        logprobs=choice["logprobs"]["top_logprobs"],
        cached=details.get("cached_tokens") or 0,
        told=(said["kv_transfer_params"] or {}).get("manthan"),
    )


def let_go_cold(server: VllmServer, *sessions: str) -> None:
    """What returns is restored."""

    def is_cold() -> bool:
        replies = [httpx.get(f"{server.url}/manthan/sessions/{session}") for session in sessions]
        return all(reply.status_code == 200 and reply.json()["state"] == "cold" for reply in replies)

    server.wait_for(is_cold, 60, f"let {sessions} go cold")
    assert httpx.post(f"{server.url}/reset_prefix_cache").json()["success"]


def bring_back(server: VllmServer, head: list[int], session: str) -> Said:
    ask(server, [*head, *HELD[5000:5024]], session)
    let_go_cold(server, session)
    return ask(server, [*head, *HELD[5100:5124]], session)


def test_strangers_are_served_exact_kv(server: VllmServer, plain_server: VllmServer) -> None:
    back = bring_back(server, HEAD, "alice")
    assert back["cached"] == len(HEAD)
    assert back["told"]["lossy_tokens"] == len(HEAD)
    tails = [HELD[30000 + 50 * n : 30024 + 50 * n] for n in range(OTHERS)]
    served = [ask(server, [*HEAD, *tail], f"bob{n}") for n, tail in enumerate(tails)]
    cached = [said["cached"] for said in served]
    assert cached == [0] + [len(HEAD)] * (OTHERS - 1)  # the first one's exact copy serves the others
    expected = [ask(plain_server, [*HEAD, *tail]) for tail in tails]
    assert [said["cached"] for said in expected] == cached
    assert [said["logprobs"] for said in served] == [said["logprobs"] for said in expected]
    assert not any(said["told"] for said in served)


def test_exact_kv_for_a_request_that_asks_for_it(server: VllmServer, plain_server: VllmServer) -> None:
    head = HELD[12000 : 12000 + 15 * BLOCK]
    bring_back(server, head, "dave")
    prompt = [*head, *HELD[5300:5324]]
    exact = ask(server, prompt, "dave", kv_transfer_params={"manthan": {"quality": "exact"}})
    assert exact["cached"] == 0
    assert exact["told"]["lossy_tokens"] == 0
    again = ask(server, [*head, *HELD[5400:5424]], "dave")  # the exact copy has taken the hash
    assert exact["logprobs"] == ask(plain_server, prompt)["logprobs"]
    assert again["cached"] == len(head)
    assert not again["told"]
    session = httpx.get(f"{server.url}/manthan/sessions/dave").json()
    assert session["lossy_tokens"] == 0


def test_what_is_computed_behind_decoded_kv_is_not_exact_either(server: VllmServer) -> None:
    head = HELD[16000 : 16000 + 20 * BLOCK]
    bring_back(server, head, "erin")
    prompt = [*head, *HELD[16640 : 16640 + 10 * BLOCK], 5]
    ask(server, prompt, "erin")  # ten blocks behind the twenty that were decoded
    assert ask(server, prompt, "frank")["cached"] == 0
    lossy = server.metrics()["vllm:manthan_lossy_tokens_total"]
    assert lossy >= 2 * len(head)


def test_a_head_that_sessions_share_is_stored_exact(server: VllmServer, plain_server: VllmServer) -> None:
    head = HELD[20000 : 20000 + 15 * BLOCK]
    for name in ("grace", "heidi"):
        ask(server, [*head, *HELD[21000:21024]], name)
    let_go_cold(server, "grace", "heidi")
    tail = HELD[21100:21124]
    other = ask(server, [*head, *tail], "ivan")
    assert other["cached"] == len(head)
    assert not other["told"]
    ask(plain_server, [*head, *HELD[21000:21024]])
    expected = ask(plain_server, [*head, *tail])
    assert expected["cached"] == len(head)
    assert other["logprobs"] == expected["logprobs"]


# -- two chats that take turns, and a cold store that holds 1.7 of them -------------------------------


class Chat:
    """A table of 64 lines `name = value`, then prose; it grows by a few lines."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.table = {name: chance.randrange(1000, 10000) for name in chance.sample(NAMES, 64)}
        self.head = "".join(f"{name} = {value}\n" for name, value in self.table.items())
        self.prose = HELD[seed * 7000 : seed * 7000 + 1380]
        self.said = ""


def take_turns(server: VllmServer, turns: int) -> tuple[list[bool], int]:
    """True for each turn with a right answer; and how many blocks vLLM has computed."""
    tokenize = lambda text: httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": text}).json()["tokens"]  # noqa: E731
    chance, right, computed = random.Random(7), [], 0
    chats = [("alice", Chat(0)), ("bob", Chat(1))]
    heads = {name: [*tokenize(chat.head), *chat.prose] for name, chat in chats}
    for turn in range(turns):
        name, chat = chats[turn % 2]
        key = chance.choice(list(chat.table))
        prompt = [*heads[name], *tokenize(f"{chat.said}\nassert {key} == ")[1:]]
        said = ask(server, prompt, name, max_tokens=100, ignore_eos=True)  # long enough for the other chat to go cold
        computed += -(-(len(prompt) + 100 - said["cached"]) // BLOCK)
        right.append(said["text"][:4] == str(chat.table[key]))
        if len(chat.said) < 600:
            chat.said += f"\nassert {key} == {chat.table[key]}"
        time.sleep(0.15)
    return right, computed


@pytest.fixture
def narrow(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    """The pool has room for one of them. The fixture's parameter is the size of the cold store."""
    codec = {"name": "wht-5x", "sink_tokens": 0, "guard": False}
    config = {"idle": 0.3, "codec": codec, "tiers": {"max_bytes": getattr(request, "param", "2600KiB")}}
    (tmp_path / "manthan.yaml").write_text(json.dumps(config))
    flags = [*FLAGS, "--manthan-config", str(tmp_path / "manthan.yaml")]
    with warm_server(MODEL, flags, tmp_path / "log") as server:
        server.wait_until_ready(300)
        yield server


def test_no_block_is_encoded_that_was_not_computed(narrow: VllmServer) -> None:
    _, computed = take_turns(narrow, 6)
    metrics = narrow.metrics()
    encoded, dropped = (metrics[f"vllm:manthan_{what}_blocks_total"] for what in ("encoded", "dropped"))
    assert 0 < encoded <= computed + dropped, "what was dropped while its computed block was resident is encoded again"
    samples = [(labels, value) for name, labels, value in narrow.samples() if name == "vllm:manthan_encodings_total"]
    by_mark = {labels["mark"]: value for labels, value in samples}
    assert by_mark["exact"] > 0
    assert by_mark["derived"] > 0
    assert by_mark["decoded"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("narrow", ["64MiB"], indirect=True)
def test_nor_is_one_encoded_twice_while_it_is_kept(narrow: VllmServer) -> None:
    _, computed = take_turns(narrow, 6)
    metrics = narrow.metrics()
    assert metrics["vllm:manthan_restored_blocks_total"] > 0
    assert 0 < metrics["vllm:manthan_encoded_blocks_total"] <= computed


@pytest.mark.slow
def test_answers_are_as_right_after_150_turns_as_in_the_first(narrow: VllmServer) -> None:
    right, _ = take_turns(narrow, 150)
    assert sum(right[-20:]) >= sum(right[:20]), (
        f"right by twenties: {[sum(right[n : n + 20]) for n in range(0, 150, 20)]}"
    )
