"""Two tenants of a real `vllm serve`: one sends what the other has sent, calls its sessions by their names, gives hints
about them, and takes all that it can get."""

import time
from typing import Any, NamedTuple

import httpx
import pytest

from manthan.benchmarks.server import VllmServer

LEFT, RIGHT = "left", "right"
ANYBODY_ELSE = [RIGHT, "", "left/", "Left", "%"]


@pytest.fixture(scope="module")
def server(unguarded_server: VllmServer) -> VllmServer:
    return unguarded_server


class Reply(NamedTuple):
    """told: what came of its hints. blocks: how many of its prompt's full blocks were not computed, of so many."""

    text: str
    told: dict[str, Any] | None
    blocks: int
    of: int


def ask(
    server: VllmServer, tenant: str, prompt: str, session: str | None = None, hints: Any = None, **fields: Any
) -> Reply:
    params = {"kv_transfer_params": {"manthan": hints}} if hints else {}
    body = {"model": server.model, "prompt": prompt, "temperature": 0, "max_tokens": 4, **params, **fields}
    headers = {"X-Tenant-ID": tenant} if tenant else {}
    if session is not None:
        body["session_id"] = session
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    said, usage = answer.json(), answer.json()["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    told = (said.get("kv_transfer_params") or {}).get("manthan")
    return Reply(said["choices"][0]["text"], told, cached // 32, (usage["prompt_tokens"] - 1) // 32)


def count(server: VllmServer, name: str, **labels: str) -> float:
    samples = server.samples()
    found = [(has, value) for full, has, value in samples if full == f"vllm:manthan_{name}"]
    return sum(value for has, value in found if labels.items() <= has.items())


def wait_until_saved(server: VllmServer) -> None:
    """Wait until nothing more is saved, and empty the pool. What has no room in its tenant's share is lost."""
    encoded = [-1.0, -1.0, -1.0]

    def rests() -> bool:
        encoded.append(count(server, "encoded_blocks_total"))
        time.sleep(0.3)
        return len(set(encoded[-4:])) == 1 and not count(server, "sessions", state="active")

    server.wait_for(rests, 120, "encode no more")
    assert httpx.post(f"{server.url}/reset_prefix_cache").json()["success"]


def is_told(reply: Reply, session: str, *, pinned: bool = False) -> bool:
    """What was restored of the session, which had gone cold, is lossy; nothing else is."""
    told = dict(reply.told or {})
    lossy = told.pop("lossy_tokens")
    return told == {"session_id": session, "pinned": pinned, "refused": None} and 0 <= lossy <= 32 * reply.blocks


def is_whole(reply: Reply) -> bool:
    return reply.blocks == reply.of > 0


def test_what_a_tenant_has_sent_nobody_else_finds(server, table) -> None:
    prompt, right = table(50).question(1)
    assert ask(server, LEFT, prompt)[:3] == (right, None, 0)
    assert is_whole(ask(server, LEFT, prompt))
    for tenant in ANYBODY_ELSE:
        assert ask(server, tenant, prompt)[:3] == (right, None, 0)
        assert is_whole(ask(server, tenant, prompt))


def test_nor_by_a_beam_search_which_hands_no_hints_on(server, table) -> None:
    prompt, right = table(66).question(1)
    assert ask(server, LEFT, prompt, use_beam_search=True, n=2).text == right
    assert ask(server, "", prompt).blocks == 0
    assert is_whole(ask(server, LEFT, prompt))


def test_nor_what_is_cold(server, table) -> None:
    prompt, right = table(52).question(1)
    ask(server, LEFT, prompt)
    wait_until_saved(server)
    before = count(server, "restored_blocks_total")
    for tenant in ANYBODY_ELSE:
        assert ask(server, tenant, prompt)[:3] == (right, None, 0)
    assert count(server, "restored_blocks_total") == before
    found = ask(server, LEFT, prompt)
    assert is_whole(found)
    assert found.text == right
    server.wait_for(lambda: count(server, "restored_blocks_total") == before + found.of, 60, "count the restore")


def test_a_name_is_one_s_own(server, table) -> None:
    prompts = {tenant: table(53 + n).question(1)[0] for n, tenant in enumerate((LEFT, *ANYBODY_ELSE))}
    for tenant, prompt in prompts.items():
        found = ask(server, tenant, prompt, "chat", {"priority": 1})
        assert found.blocks == 0
        assert is_told(found, "chat")
    wait_until_saved(server)
    for name in ("left/chat", "/left/chat", "chat"):
        told = ask(server, "", table(59).question(1)[0], name, {"release": True}).told
        assert told is not None
        assert told["session_id"].partition("~")[0] == name
    found = ask(server, LEFT, prompts[LEFT], "chat", {"priority": 1})
    assert is_whole(found)
    assert is_told(found, "chat")


def test_made_up_names_do_not_tell_how_many_others_have(server, table) -> None:
    for n, tenant in enumerate((LEFT, LEFT, "newcomer")):
        told = ask(server, tenant, table(60 + n).question(1)[0], None, {"priority": 0, "ttl_s": 600}).told
    assert told is not None
    assert told["session_id"] == "anonymous-1"


def test_hints_are_about_one_s_own_sessions(server, table) -> None:
    prompt = table(63).question(1)[0]
    short = prompt[:300]
    found = ask(server, LEFT, short, "kept", {"pin": True})
    assert found.blocks == 0
    assert is_told(found, "kept", pinned=True)
    ask(server, LEFT, prompt, "expected")
    for tenant in ANYBODY_ELSE[:3]:
        for name in ("kept", "left/kept", "expected"):
            for hints in ({"pin": False, "ttl_s": 0.1}, {"release": True}):
                assert ask(server, tenant, prompt if name == "expected" else short, name, hints).text
    wait_until_saved(server)
    before = count(server, "prefetches_total")
    for tenant in ANYBODY_ELSE:
        ask(server, tenant, table(64).question(1)[0], "asks", {"prefetch": ["expected", "left/expected", "kept"]})
    assert count(server, "prefetches_total") == before
    ask(server, LEFT, table(64).question(1)[0], "asks", {"prefetch": ["expected"]})
    server.wait_for(lambda: count(server, "prefetches_total") == before + 1, 60, "prefetch its own")
    assert is_whole(ask(server, LEFT, prompt, "expected"))
    found = ask(server, LEFT, short, "kept", {"priority": 1})
    assert is_whole(found)
    assert is_told(found, "kept", pinned=True)
    ask(server, LEFT, short, "kept", {"release": True})


@pytest.mark.slow
def test_who_takes_all_it_can_get_takes_nothing_of_others(server, table) -> None:
    prompts = [table(70 + n).question(1)[0] for n in range(8)]
    ask(server, LEFT, prompts[0], "left's")
    wait_until_saved(server)
    for n, prompt in enumerate(prompts):  # each is 17 blocks, and there is room for 50
        ask(server, RIGHT, prompt, f"right's {n}", {"priority": 10})
    wait_until_saved(server)
    assert is_whole(ask(server, LEFT, prompts[0], "left's"))
    found = [ask(server, RIGHT, prompt, f"right's {n}").blocks for n, prompt in reversed(list(enumerate(prompts)))]
    assert 0 < sum(found) < 80  # of 8 * 17; a profile that was made meanwhile makes blocks smaller
