"""A server's API with made-up sessions behind it: the real routes and the real page, and no engine."""

import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic_core import to_json
from redis_server import free_port

from manthan.manager.listing import Held, SessionInfo
from manthan.manager.session.table import SessionState
from manthan.vllm_hooks import kv_transfer_config
from manthan.vllm_hooks.http.middleware import add_api

STATES = list(SessionState)
MIB = 1 << 20


class Crowd:
    """Client of vLLM's whose engine has so many sessions: a tenth active, three tenths idle, the others cold."""

    errored = False

    def __init__(self, number: int) -> None:
        self.engine_core = self
        self.asked: list[str] = []
        self.sessions = {f"agent-{n:05}": self._make(n) for n in range(number)}

    def _make(self, n: int) -> SessionInfo:
        state = STATES[0] if n % 10 == 0 else STATES[1] if n % 10 < 4 else STATES[2]
        tokens, is_cold, then = 512 + 37 * n % 30_000, state is STATES[2], time.time() - n
        return SessionInfo(
            **{"id": f"agent-{n:05}", "tenant": "", "state": state, "tokens": tokens, "blocks": tokens // 16},
            **{"hot_blocks": 0 if is_cold else tokens // 16, "cold_blocks": tokens // 16 * is_cold},
            **{"hot_bytes": 0 if is_cold else tokens << 12, "cold_bytes": (tokens << 12) // 5 * is_cold},
            tiers={"host": Held(tokens, tokens // 16, (tokens << 12) // 5)} if is_cold else {},
            **{"created": then, "last_used": then, "requests": 1 + n % 7, "pinned": n % 50 == 0, "priority": 0},
            **{"expected_return": None, "tool": "", "parent": None, "lossy_tokens": 0},
        )

    def use(self, session_id: str) -> None:
        """Let a session have a request now."""
        self.sessions[session_id] = replace(self.sessions[session_id], state=STATES[0], last_used=time.time())

    async def call_utility_all_async(self, _: str, what: str, asked: dict[str, Any]) -> list[bytes]:
        self.asked.append(what)
        return [to_json(getattr(self, f"_{what}")(asked))]

    def _sessions(self, asked: dict[str, Any]) -> Any:
        chosen = [
            each
            for each in self.sessions.values()
            if each.id.startswith(asked["prefix"]) and (asked["states"] is None or each.state in asked["states"])
        ]
        chosen.sort(key=lambda each: getattr(each, asked["sort"]), reverse=asked["descending"])
        page = chosen[asked["offset"] : asked["offset"] + asked["limit"]]
        return {"total": len(chosen), "now": time.time(), "keys": [], "sessions": page}

    def _session(self, asked: dict[str, Any]) -> Any:
        return to_json_dict(self.sessions[asked["id"]]) | {"life": []}

    def _state(self, _: dict[str, Any]) -> Any:
        states = [each.state for each in self.sessions.values()]
        tiers = [
            {"name": "host", "used_bytes": 700 * MIB, "budget_bytes": 1000 * MIB},
            {"name": "redis", "used_bytes": 9700 * MIB, "budget_bytes": 20_000 * MIB},
        ]
        totals = {"evictions": 9000, "restores": 2000, "prefetches": 10, "failures": 0, "restore_ms": 40_000}
        totals |= {"prompt_tokens": 9_000_000, "restored_tokens": 6_000_000, "computed_tokens": 1_000_000}
        totals |= {"returns": 2500, "return_resident_tokens": 1_900_000}
        totals |= {"return_restored_tokens": 5_000_000, "return_recomputed_tokens": 300_000}
        return {
            "now": time.time(),
            "policy": {"name": "lru", "options": {}, "order": [*self.sessions][:50]},
            "store": {"kind": "redis", "up": True, "codec": "wht-5x", "verdict": "faithful", "tiers": tiers},
            "pool": {
                "block_tokens": 16,
                "blocks": 1000,
                "free_blocks": 400,
                "bytes": 9 << 30,
                "session_bytes": 2 << 30,
            },
            "sessions": {state: states.count(state) for state in STATES},
            "token_s": 35e-6,
            "totals": totals | {"lossy_tokens": 5_000_000},
        }


def to_json_dict(session: SessionInfo) -> dict[str, Any]:
    return {**vars(session), "tiers": {name: vars(held) for name, held in session.tiers.items()}}


def made_app(client: Any) -> FastAPI:
    """Application with the API for this client of vLLM's, without a key."""
    app = FastAPI()
    app.state.args = Namespace(kv_transfer_config=kv_transfer_config(policy="lru"), api_key=None, host=None)
    app.state.engine_client = client
    model = SimpleNamespace(served_model_name="Qwen/Qwen3-8B", model="")
    app.state.vllm_config = SimpleNamespace(model_config=model)
    add_api(app)
    return app


@contextmanager
def serving(crowd: Crowd) -> Iterator[str]:
    """Serve the API without a key, and yield its address."""
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(made_app(crowd), port=port, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()
