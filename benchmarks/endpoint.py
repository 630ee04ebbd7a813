"""Client of a vLLM server over HTTP: chats, completions, metrics. The server may run on any machine.

endpoint = Endpoint("http://127.0.0.1:8000")
reply = endpoint.complete([1, 2, 3], max_tokens=4)
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

POLL_S = 0.1
LAST_LINES = 25


class ServerError(RuntimeError):
    """Failure of a server, or an awaited state not reached. log_tail: last LAST_LINES lines of `log`, if any."""

    def __init__(self, what: str, log: Path | None = None) -> None:
        super().__init__(what)
        self.log = log
        lines = log.read_text(errors="replace").splitlines() if log and log.exists() else []
        self.log_tail = "\n".join(lines[-LAST_LINES:])


@dataclass(frozen=True)
class Reply:
    """Answer to a request. cached_tokens: prompt tokens without compute, whatever the source of their KV.

    ttft_s: seconds from sending the request to the first piece of the answer. seconds: from sending to the answer's
    end. reports_cached: True if the server reports cached tokens. generated_tokens: number of the answer's tokens; if
    the client left early, of received pieces. token_ids: of the answer, if requested (`return_token_ids`). gaps_s:
    seconds between pieces. timing: milliseconds by name, from a server with --enable-per-request-metrics.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    reports_cached: bool = True
    generated_tokens: int = 0
    seconds: float = 0.0
    token_ids: tuple[int, ...] = ()
    gaps_s: tuple[float, ...] = ()
    timing: dict[str, float] = field(default_factory=dict)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class Endpoint:
    """Client of the server at `url`. model: name in requests; empty for the first model that the server lists."""

    def __init__(self, url: str, model: str = "", timeout_s: float = 120) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._http = httpx.Client(
            base_url=self.url, timeout=timeout_s, trust_env=False, limits=httpx.Limits(max_connections=None)
        )

    @property
    def model(self) -> str:
        self._model = self._model or str(self.about()["id"])
        return self._model

    def close(self) -> None:
        self._http.close()

    def wait_for_answers(self, timeout_s: float) -> None:
        """Set the seconds without data from the server after which a request fails, for requests from now on."""
        self._http.timeout = httpx.Timeout(timeout_s)

    # -- facts of the server --------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Return the first model from /v1/models: id, root, max_model_len and more."""
        return dict(self.get("/v1/models")["data"][0])

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        """Return the JSON object at `path`."""
        with self._reachable():
            return dict(self._http.get(path, params=parameters).raise_for_status().json())

    def is_healthy(self) -> bool:
        try:
            return self._http.get("/health").is_success
        except httpx.TransportError:
            return False

    def samples(self, *names: str) -> list[tuple[str, dict[str, str], float]]:
        """Return name, labels and value of each series in /metrics. names: prefixes of names; none for all series."""
        with self._reachable():
            text = self._http.get("/metrics").text
        if names:  # reading all series takes long
            text = "".join(f"{line}\n" for line in text.splitlines() if line.startswith(names))
        return [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def metrics(self) -> dict[str, float]:
        """Return the values in /metrics by series name, each summed over all labels."""
        totals: dict[str, float] = {}
        for name, _, value in self.samples():
            totals[name] = totals.get(name, 0.0) + value
        return totals

    def reset_prefix_cache(self, external: bool = True) -> None:
        """Empty the prefix cache, and with `external` the KV connector's store too.

        The server must run with VLLM_SERVER_DEV_MODE=1. Raises ServerError while a request holds blocks.
        """
        with self._reachable():
            query = {"reset_external": str(external).lower()}
            answer = self._http.post("/reset_prefix_cache", params=query).raise_for_status().json()
        if not answer["success"]:
            raise self.error("The server would not reset its prefix cache: a request still holds blocks.")

    # -- requests -------------------------------------------------------------------------------------

    def chat(self, messages: Sequence[dict[str, Any]], leave_after: int = 0, **options: Any) -> Reply:
        """Return the reply to a chat, streamed to time the first token. options: further fields of the request.

        leave_after: number of pieces of text after which the connection is closed; 0 for never.
        """

        def text_of(choice: dict[str, Any]) -> str | None:
            return choice["delta"].get("content") or None  # the first piece names the role and is empty

        body = {"messages": list(messages), **options}
        return self._streamed("/v1/chat/completions", body, text_of, leave_after)

    def complete(self, prompt: Sequence[int] | str, leave_after: int = 0, **options: Any) -> Reply:
        """Return the reply to a prompt of token ids or text; see chat."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **options}
        return self._streamed("/v1/completions", body, lambda choice: choice["text"], leave_after)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return the JSON answer to a request without streaming. Raises ServerError for an error status."""
        with self._reachable():
            response = self._http.post(path, json={"model": self.model, **body})
        if response.is_error:
            raise self.error(f"The server answered {response.status_code}: {response.text[:500]}")
        return dict(response.json())

    def _streamed(
        self, path: str, body: dict[str, Any], text_of: Callable[[dict[str, Any]], str | None], leave_after: int
    ) -> Reply:
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        pieces: list[str] = []
        token_ids: list[int] = []
        last: dict[str, Any] = {}
        arrived: list[float] = []
        began = time.perf_counter()
        with self._reachable(), self._http.stream("POST", path, json=body) as response:
            if response.is_error:
                raise self.error(f"The server answered {response.status_code}: {response.read()[:500]!r}")
            for chunk in self._events(response):
                found = [piece for choice in chunk["choices"] if (piece := text_of(choice)) is not None]
                if found:
                    arrived.append(time.perf_counter() - began)
                pieces += found
                token_ids += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                last |= {name: chunk[name] for name in ("usage", "metrics") if chunk.get(name)}
                if leave_after and len(pieces) >= leave_after:
                    break
        return _reply("".join(pieces), token_ids, last, arrived, time.perf_counter() - began, len(pieces))

    def _events(self, response: httpx.Response) -> Iterator[dict[str, Any]]:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise self.error(f"The server broke off its answer: {event['error']}")
                yield event

    # -- errors ---------------------------------------------------------------------------------------

    def error(self, what: str) -> ServerError:
        """Return the exception to raise about the server. A subclass adds the server's log."""
        return ServerError(what)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPStatusError as error:
            raise self.error(f"The server answered {error.response.status_code} to {error.request.url}.") from error
        except httpx.TransportError as error:
            raise self.error(f"The server {self._what_happened()}: {error!r}") from error

    def _what_happened(self) -> str:
        return f"at {self.url} did not answer a request"


def _reply(
    text: str, token_ids: Sequence[int], last: dict[str, Any], arrived: Sequence[float], seconds: float, pieces: int
) -> Reply:
    """Return the reply. last: usage and metrics, if sent. arrived: seconds from sending to each chunk with text."""
    usage = last.get("usage", {})
    details = usage.get("prompt_tokens_details")
    return Reply(
        text,
        usage.get("prompt_tokens", 0),
        (details or {}).get("cached_tokens") or 0,
        arrived[0] if arrived else 0.0,
        details is not None,
        usage.get("completion_tokens", pieces),
        seconds,
        tuple(token_ids),
        tuple(after - before for before, after in pairwise(arrived)),
        {name: value for name, value in last.get("metrics", {}).items() if isinstance(value, float | int)},
    )
