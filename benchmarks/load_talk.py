"""Concurrent chats with a server, a thread for each user, and a record of each request and its wait."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from manthan.benchmarks.endpoint import Endpoint, Reply, ServerError
from manthan.benchmarks.load_chats import Chat, Turn

SAMPLE_S = 2.0
INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as of a shell."""
WATCHED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:manthan_sessions",
    "vllm:manthan_cold_bytes",
)
COUNTED = (
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_cached_by_source_total",
    "vllm:external_prefix_cache",
    "vllm:manthan_",
)


@dataclass(frozen=True)
class Asked:
    """Sent request. chat: index of the user. session: name of the chat, or empty. turn: number in the chat, from 1 on.

    sent_s: seconds from the start of the load. ttft_s: seconds from sending to the first token. seconds: from sending
    to the answer's end. known_tokens: number of prompt tokens that earlier prompts or answers had. queue_ms: the
    server's time until it scheduled the request, any fetch of KV from outside the pool included. first_ms: the server's
    time from then to the first token. gaps_ms: times between pieces of the answer, at the client. right: None if not
    checked. error: empty for an answered request.
    """

    chat: int
    session: str
    turn: int
    sent_s: float
    known_tokens: int
    prompt_tokens: int
    ttft_s: float = 0.0
    seconds: float = 0.0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_ms: float | None = None
    first_ms: float | None = None
    gaps_ms: tuple[float, ...] = ()
    right: bool | None = None
    error: str = ""


@dataclass(frozen=True)
class Talk:
    """Record of a load. began: Unix time, as in a server's log. planned: number of turns without those of `then`.

    samples: metrics WATCHED, each SAMPLE_S seconds. counters: increase of the metrics COUNTED over the load.
    stopped_s: seconds after which Ctrl-C or a signal stopped the load; None if nothing did.
    """

    began: float
    wall_s: float
    planned: int
    asked: list[Asked]
    samples: list[dict[str, float]]
    counters: dict[str, float]
    stopped_s: float | None = None


class StoppedError(SystemExit):
    """Ctrl-C or a signal stopped a load. talk: record of the requests that were sent before."""

    def __init__(self, talk: Talk, code: Any) -> None:
        super().__init__(code)
        self.talk = talk


class Talker:
    """Sends the requests of chats to a server.

    Args:
        step: Called after each request.
        deadline_s: Seconds from the start after which no request is sent.
        ordered: True to send a priority with each request, so that the server takes later turns before first turns.
    """

    def __init__(self, endpoint: Endpoint, step: Callable[[], None], deadline_s: float, ordered: bool = False) -> None:
        self._endpoint, self._step, self._deadline_s, self._ordered = endpoint, step, deadline_s, ordered
        self._asked: list[Asked] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    def run(self, chats: Sequence[Chat]) -> Talk:
        """Run all chats concurrently, and return the record.

        Raises:
            ServerError: The metrics cannot be read.
            StoppedError: The load was stopped. Requests under way have been answered.
        """
        before = self._counters()
        began, self._zero = time.time(), time.perf_counter()
        stop: KeyboardInterrupt | SystemExit | None = None
        stopped_s: float | None = None
        with self._sampled() as samples, ThreadPoolExecutor(max(1, len(chats))) as pool:
            try:
                jobs = [pool.submit(self._user, index, chat) for index, chat in enumerate(chats)]
                for job in jobs:
                    job.result()
            except (KeyboardInterrupt, SystemExit) as error:
                stop, stopped_s = error, self._now()
            finally:
                self._over.set()
        wall_s = self._now()
        try:
            after = self._counters()
        except ServerError:
            if stop is None:
                raise
            after = {}  # the server may have been stopped too
        counters = {name: value - before.get(name, 0.0) for name, value in after.items()}
        planned, asked = sum(len(chat.turns) for chat in chats), sorted(self._asked, key=lambda one: one.sent_s)
        talk = Talk(began, wall_s, planned, asked, samples, counters, stopped_s)
        if stop is not None:
            raise StoppedError(talk, getattr(stop, "code", INTERRUPTED)) from stop
        return talk

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    # -- a chat -----------------------------------------------------------------------------------------

    def _user(self, index: int, chat: Chat | None) -> None:
        """Run the user's chat, and after it each next chat (`then`), until a chat fails or time is over."""
        due = chat.starts_s if chat else 0.0
        while chat is not None and self._chat(index, chat, due):
            chat, due = chat.then, self._now()

    def _chat(self, index: int, chat: Chat, due: float) -> bool:
        """Run a chat whose first pause begins at `due` (seconds). Return False if a request failed or time is over."""
        history: list[int] = []
        computed = 0
        for number, turn in enumerate(chat.turns):
            due += turn.pause_s
            self._over.wait(max(0.0, min(due, self._deadline_s) - self._now()))
            if self._over.is_set() or max(due, self._now()) > self._deadline_s:
                return False
            history = [*turn.said.tokens] if turn.is_whole else [*history, *turn.said.tokens]
            reply = self._ask(index, chat, chat.first + number, turn, history, max(computed, turn.known))
            if reply is None:
                return False
            due = self._now()
            computed = 0 if turn.is_whole else len(history) + reply.generated_tokens - 1
            history += reply.token_ids
        return True

    def _ask(self, index: int, chat: Chat, number: int, turn: Turn, prompt: list[int], known: int) -> Reply | None:
        named: dict[str, Any] = {"session_id": chat.name} if chat.name else {}
        if self._ordered:
            named["priority"] = int(number == 1)
        what = {"chat": index, "session": chat.name, "turn": number, "sent_s": self._now(), "known_tokens": known}
        try:
            reply: Reply | None = self._endpoint.complete(
                prompt,
                max_tokens=turn.answer_tokens,
                temperature=0,
                ignore_eos=True,
                return_token_ids=True,
                **named,
            )
            self._check(reply)
            asked = Asked(
                **what,
                prompt_tokens=reply.prompt_tokens,
                ttft_s=reply.ttft_s,
                seconds=reply.seconds,
                cached_tokens=reply.cached_tokens,
                generated_tokens=reply.generated_tokens,
                queue_ms=reply.timing.get("queue_time_ms"),
                first_ms=reply.timing.get("time_to_first_token_ms"),
                gaps_ms=tuple(round(gap * 1e3, 2) for gap in reply.gaps_s),
                right=None if turn.said.right is None else reply.text.startswith(turn.said.right),
            )
        except ServerError as error:
            asked = Asked(**what, prompt_tokens=len(prompt), error=str(error))
            reply = None
        with self._lock:
            self._asked.append(asked)
            self._step()
        return reply

    def _check(self, reply: Reply) -> None:
        """Raise ServerError if the answer lacks a needed field, because all answers of the server would lack it."""
        if not reply.reports_cached:
            raise self._endpoint.error(
                f"The server at {self._endpoint.url} does not say how much of a prompt it had cached: start it with "
                "--enable-prompt-tokens-details."
            )
        if len(reply.token_ids) != reply.generated_tokens:
            raise self._endpoint.error(
                f"The server at {self._endpoint.url} does not say the token ids of its answers (return_token_ids)."
            )

    # -- meanwhile --------------------------------------------------------------------------------------

    @contextmanager
    def _sampled(self) -> Iterator[list[dict[str, float]]]:
        """Yield a list, to which a thread adds the metrics WATCHED every SAMPLE_S seconds."""
        samples: list[dict[str, float]] = []

        def look() -> None:
            while not self._over.wait(SAMPLE_S):
                try:
                    found = self._endpoint.samples(*WATCHED)
                except ServerError:
                    continue  # requests fail too then, and are recorded as errors
                samples.append({"at_s": round(self._now(), 2)} | _by_name(found))

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield samples
        finally:
            self._over.set()
            watcher.join()

    def _counters(self) -> dict[str, float]:
        found = self._endpoint.samples(*COUNTED)
        return _by_name([one for one in found if one[0].endswith(("_total", "_sum", "_count"))])


def _by_name(samples: Sequence[tuple[str, dict[str, str], float]]) -> dict[str, float]:
    """Return sums of values by name. A name has no `vllm:`, and has the label state, cause, source or level, if any."""
    values: dict[str, float] = {}
    for name, labels, value in samples:
        label = next((labels[one] for one in ("state", "cause", "source", "level") if one in labels), "")
        key = name.removeprefix("vllm:") + (f"{{{label}}}" if label else "")
        values[key] = values.get(key, 0.0) + value
    return values
