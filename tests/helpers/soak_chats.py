"""Sessions of the soak: they arrive at random, whatever the server does, each with some turns and time to think between
them, and look entries of their tables up.

Before the server stands a router, as far as clients see it: a request that nobody takes, or whose connection breaks as
the server is killed, is sent again when the server is there again. What it waited for counts from its first sending.
"""

import asyncio
import json
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

NAMES = [a + b + c for a in "bcdfghjklmnprstvz" for b in "aeiou" for c in "bcdfghjklmnprstvz"]
ENTRIES, TIMES = 4, 2
"""A table has so many lines, and is said so many times: about 80 tokens."""
DIGITS = 4
LEFT_TOKENS, LEFT_AFTER = 24, 2
"""Of an answer that is not waited for: what it would have, and after how many pieces the client goes."""
TURNS = (1, 1, 1, 2, 2, 2, 3, 4)
TENANTS = ("left", "right")
HEADER = "X-Tenant-ID"
THINK_S, FAR_S, FAR_SHARE = (2.0, 8.0), (15.0, 60.0), 0.2
"""Pauses between turns, and those of a share of them."""
BLOCK = 32
ANSWER = {"temperature": 0, "ignore_eos": True}
TOGETHER = 128
"""Requests that the router passes on at a time."""
TIMEOUT_S = 60.0
"""From then on."""
AGAIN_S = 5.0
"""When the server is there again, requests that it had begun come again within so many seconds."""
KEPT_ERRORS = 20
SURE_NATS = 2.0
"""So much likelier than the next best an answer's tokens are, each of them, if a codec's loss is not to change it."""
SLICE_S = 10.0
RESTART = "restart"
CALM = "calm"


class BrokenError(Exception):
    """The connection was refused, or ended before the answer did."""


class Table:
    """Lines `name = 4821`."""

    def __init__(self, chance: random.Random) -> None:
        self._values = {name: str(chance.randrange(1000, 10000)) for name in chance.sample(NAMES, ENTRIES)}
        self.lines = "".join(f"{name} = {value}\n" for name, value in self._values.items())

    def lookup(self, chance: random.Random) -> tuple[str, str]:
        """A question, and its answer."""
        name = chance.choice(list(self._values))
        return f"assert {name} == ", self._values[name]


@dataclass
class Chat:
    """One session. name: empty for one without. text: all that was said. known: tokens that the server had computed
    when it last answered, 0 if it did not say; in `life` it did."""

    chance: random.Random
    name: str
    tenant: str
    turns: int
    is_chat: bool
    table: Table
    messages: list[dict[str, str]] = field(default_factory=list)
    known: int = 0
    life: int = 0

    @classmethod
    def new(cls, number: int, seed: int) -> "Chat":
        chance = random.Random(f"{seed}-{number}")
        name = f"session-{number}" if chance.random() < 0.6 else ""
        return cls(chance, name, chance.choice(TENANTS), chance.choice(TURNS), chance.random() < 0.3, Table(chance))

    def says(self) -> str:
        """Its next message; returns the right answer."""
        question, right = self.table.lookup(self.chance)
        said = "\n" + self.table.lines if self.messages else TIMES * self.table.lines
        self.messages.append({"role": "user", "content": said + question})
        return right

    def hears(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def pause_s(self) -> float:
        return self.chance.uniform(*(FAR_S if self.chance.random() < FAR_SHARE else THINK_S))

    def path_and_prompt(self) -> tuple[str, dict[str, Any]]:
        if self.is_chat:
            return "/v1/chat/completions", {"messages": self.messages}
        return "/v1/completions", {"prompt": "".join(message["content"] for message in self.messages)}


class Answer(NamedTuple):
    """usage: empty where the client has left. first_s: None of what is not streamed. margin: by how much each token was
    likelier than the next best, at least, in nats; 0 where nobody asked for it."""

    text: str
    usage: dict[str, Any]
    first_s: float | None
    margin: float = 0.0


@dataclass
class Asked:
    """A request: what the disk was doing when it was first sent, when that was, how it is sent, and how often again."""

    phase: str
    sent: float
    kind: str
    retries: int = 0

    def seconds(self) -> float:
        return time.monotonic() - self.sent


@dataclass
class Counts:
    """What came of the requests that were sent in a phase. first_s: of streamed ones."""

    number: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Traffic:
    """rate: sessions a second. phase: what the server's disk is doing, set from outside. All else belongs to the loop
    that runs it."""

    def __init__(self, model: str, rate: float, seed: int) -> None:
        self._model, self._rate, self._seed = model, rate, seed
        self.phase = RESTART
        self.counts: dict[str, Counts] = {}
        self.errors: list[str] = []
        self.returns: dict[int, Counter[str]] = {}
        self.returns_of_before: dict[int, Counter[str]] = {}
        """By the server's life; `of_before`: those that an earlier life had computed."""
        self.slices: dict[int, Counter[str]] = {}
        """All returns, per SLICE_S."""
        self.sessions = self.open_sessions = 0
        self._url, self._life = "", 0
        self._is_up, self._over = asyncio.Event(), asyncio.Event()
        self._places = asyncio.Semaphore(TOGETHER)
        self._names: deque[tuple[str, str]] = deque(maxlen=200)
        """Sessions that think, with their tenants."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._began = 0.0

    # -- from outside, on its loop ------------------------------------------------------------------------

    async def goes_up(self, url: str) -> None:
        self._url, self._life = url, self._life + 1
        self._is_up.set()

    async def goes_down(self) -> None:
        """From now on connections may break."""
        self._is_up.clear()

    async def ends(self) -> None:
        """No session begins or goes on; requests that were sent are answered."""
        self._over.set()

    async def run(self) -> None:
        """Until `ends`."""
        self._began = time.monotonic()
        # uvicorn closes a connection that nobody uses after 5 s, and if it is late, one that was just sent a request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            self._http = http
            await self._arrive()
            while self._tasks:
                await asyncio.wait(self._tasks)

    # -- sessions -----------------------------------------------------------------------------------------

    async def _arrive(self) -> None:
        chance, due = random.Random(self._seed), time.monotonic()
        while True:
            due += chance.expovariate(self._rate)
            if await self._is_over_within(due - time.monotonic()):
                return
            self.sessions += 1
            task = asyncio.create_task(self._talk(Chat.new(self.sessions, self._seed)))
            self._tasks.add(task)
            task.add_done_callback(self._is_done)

    def _is_done(self, task: asyncio.Task[None]) -> None:
        """What nobody has thought of is an error too."""
        self._tasks.discard(task)
        if (error := task.exception()) is not None:
            self.counts.setdefault(self.phase, Counts()).number["errors"] += 1
            self._note(f"{self.phase}: {error!r}")

    async def _is_over_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._over.wait(), max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    async def _talk(self, chat: Chat) -> None:
        """A session one of whose requests fails ends there."""
        self.open_sessions += 1
        try:
            for turn in range(chat.turns):
                pause_s = chat.pause_s() if turn else 0.0
                if turn and await self._is_over_within(pause_s):
                    return
                if not await self._turn(chat, is_last=turn == chat.turns - 1):
                    return
        finally:
            self.open_sessions -= 1

    async def _turn(self, chat: Chat, *, is_last: bool) -> bool:
        right, kind = chat.says(), chat.chance.choices(("posted", "streamed", "left"), (5, 4, 1))[0]
        hints = self._hints(chat, is_last)
        asked = Asked(self.phase, time.monotonic(), kind)
        number = Counter({"requests": 1, kind: 1, "named": bool(chat.name), "hinted": bool(hints)})
        answer = None
        try:
            answer = await self._answered(chat, self._options(chat, hints, kind), asked)
            is_right = bool(answer.text) and answer.text[:DIGITS] == right[: len(answer.text)]
            number.update(checked=1, wrong=not is_right)
            if not is_right and (anew := await self._anew(chat)).text == right:
                number["misled" if anew.margin >= SURE_NATS else "doubtful"] += 1
                if anew.margin >= SURE_NATS:
                    told = f"{answer.text!r} instead of {right!r}, sure by {anew.margin:.1f}, {answer.usage}"
                    self._note(f"{asked.phase}: misled: {told}")
        except (BrokenError, TimeoutError, aiohttp.ClientError, ValueError, KeyError) as error:
            number["errors"] += 1
            self._note(f"{asked.phase}: {kind}: {type(error).__name__}: {error} after {asked.seconds():.1f} s")
        number["retried"] += asked.retries
        counts = self.counts.setdefault(RESTART if asked.retries else asked.phase, Counts())
        counts.number.update(number)
        if answer is None:
            return False
        if answer.first_s is not None:
            counts.first_s.append(answer.first_s)
        counts.seconds.append(asked.seconds())
        self._count_return(chat, answer)
        chat.hears(answer.text)
        if chat.name and not is_last:
            self._names.append((chat.name, chat.tenant))
        return True

    def _note(self, error: str) -> None:
        if len(self.errors) < KEPT_ERRORS:
            self.errors.append(error)

    def _count_return(self, chat: Chat, answer: Answer) -> None:
        """full: tokens of blocks that the server had computed for this session; cached: those of them that it did not
        compute again. came_back: sessions of another life for which it had some."""
        usage = answer.usage
        if chat.known and usage:
            full = min(chat.known, usage["prompt_tokens"] - 1) // BLOCK * BLOCK
            cached = min(full, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
            found = Counter(returns=1, full=full, cached=cached, came_back=int(cached > 0))
            where = self.returns if chat.life == self._life else self.returns_of_before
            where.setdefault(self._life, Counter()).update(found)
            at = int((time.monotonic() - self._began) / SLICE_S)
            self.slices.setdefault(at, Counter()).update(found)
        chat.known = usage["prompt_tokens"] + usage["completion_tokens"] - 1 if usage else 0
        chat.life = self._life

    # -- a request ----------------------------------------------------------------------------------------

    def _hints(self, chat: Chat, is_last: bool) -> dict[str, Any]:
        """Half of the sessions give some."""
        if chat.chance.random() < 0.5:
            return {}
        if is_last:
            return {"release": True}
        kind = chat.chance.randrange(5)
        if kind == 4 and self._names:
            name, tenant = self._names[chat.chance.randrange(len(self._names))]
            return {"prefetch": [name]} if tenant == chat.tenant else {"priority": -1}
        return ({"pin": True}, {"ttl_s": 120.0}, {"expect_return_s": 5.0}, {"priority": 3}, {"pin": False})[kind]

    def _options(self, chat: Chat, hints: dict[str, Any], kind: str) -> dict[str, Any]:
        more: dict[str, Any] = {"session_id": chat.name} if chat.name else {}
        if hints:
            more["kv_transfer_params"] = {"manthan": hints}
        if kind != "posted":
            more |= {"stream": True, "stream_options": {"include_usage": True}}
        return ANSWER | {"max_tokens": LEFT_TOKENS if kind == "left" else DIGITS} | more

    async def _anew(self, chat: Chat) -> Answer:
        """To the same prompt when nothing is found in any cache, with its margin."""
        likeliest = {"logprobs": True, "top_logprobs": 2} if chat.is_chat else {"logprobs": 2}
        options = ANSWER | {"max_tokens": DIGITS, "cache_salt": secrets.token_hex()} | likeliest
        return await self._answered(chat, options, Asked(self.phase, time.monotonic(), "posted"))

    async def _answered(self, chat: Chat, options: dict[str, Any], asked: Asked) -> Answer:
        """Sent again after the server was down."""
        while True:
            await self._is_up.wait()
            if asked.retries:
                await asyncio.sleep(random.uniform(0, AGAIN_S))
            life = self._life
            try:
                async with self._places, asyncio.timeout(TIMEOUT_S):
                    return await self._ask(chat, options, asked)
            except (BrokenError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                if self._is_up.is_set() and life == self._life:
                    raise  # nobody has killed it
                asked.retries += 1

    async def _ask(self, chat: Chat, options: dict[str, Any], asked: Asked) -> Answer:
        path, prompt = chat.path_and_prompt()
        headers, body = {HEADER: chat.tenant}, {"model": self._model, **prompt, **options}
        async with self._http.post(self._url + path, json=body, headers=headers) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:300]}")
            if asked.kind == "posted":
                found = await response.json()
                choice = found["choices"][0]
                return Answer(_text(choice), found["usage"], None, _margin(choice))
            pieces, usage, first_s = [], {}, None
            async for chunk in _events(response):
                text = _text(chunk["choices"][0]) if chunk["choices"] else ""
                if text:
                    pieces.append(text)
                    first_s = asked.seconds() if first_s is None else first_s
                usage = chunk.get("usage") or usage
                if asked.kind == "left" and len(pieces) >= LEFT_AFTER:
                    response.close()
                    return Answer("".join(pieces), {}, first_s)
            return Answer("".join(pieces), usage, first_s)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Raises BrokenError if the stream has no end, ValueError for an error in it."""
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return
        found = json.loads(line[6:])
        if "error" in found:
            raise ValueError(f"in the stream: {found['error']}")
        yield found
    raise BrokenError("the stream has no end")


def _text(choice: dict[str, Any]) -> str:
    """Of a completion or a chat completion, streamed or not."""
    said = choice.get("delta") or choice.get("message")
    return str((said.get("content") if said else choice.get("text")) or "")


def _margin(choice: dict[str, Any]) -> float:
    """Of a completion or a chat completion that was asked for two log-probabilities of each token, the least."""
    told = choice.get("logprobs") or {}
    tokens = [list(token.values()) for token in told.get("top_logprobs") or ()]
    tokens += [[one["logprob"] for one in token["top_logprobs"]] for token in told.get("content") or ()]
    ranked = [sorted(token, reverse=True) for token in tokens]
    return min((first - second for first, second, *_ in ranked), default=0.0)
