"""Client of a real `vllm serve` with Manthan: completions in sessions, and the HTTP API."""

from collections.abc import Callable
from typing import Any

import httpx

from manthan.benchmarks.server import VllmServer

WAIT_S = 120.0


class ApiClient:
    """Client that sends these headers."""

    def __init__(self, server: VllmServer, headers: dict[str, str] | None = None) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=120, headers=headers, trust_env=False)

    def get(self, path: str, **query: Any) -> Any:
        return self.http.get(f"/manthan{path}", params=query).raise_for_status().json()

    def post(self, path: str, **body: Any) -> Any:
        return self.http.post(f"/manthan{path}", json=body).raise_for_status().json()

    def complete(self, session: str, prompt: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """Return vLLM's answer to a request of a session."""
        body = {"model": self.server.model, "prompt": prompt, "max_tokens": 4, "session_id": session, **fields}
        return self.http.post("/v1/completions", json=body, headers=headers).raise_for_status().json()

    def wait(self, path: str, done: Callable[[Any], bool]) -> Any:
        """Wait until the API's answer is as it should be, and return it."""
        found = []

        def is_done() -> bool:
            found[:] = [self.get(path)]
            return done(found[0])

        self.server.wait_for(is_done, WAIT_S, f"have {path} as it should be")
        return found[0]

    def wait_for_state(self, session: str, state: str) -> Any:
        return self.wait(f"/sessions/{session}", lambda found: found["state"] == state)
