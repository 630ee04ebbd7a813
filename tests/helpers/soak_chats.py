"""Sessions of the soak: agents and short chats on two servers, each answer compared with a plain server's.

An agent replays a session of tests/data/agents.jsonl: its pauses, prompt lengths and answer lengths. Its texts are
tables of numbers and questions for one entry. Short chats arrive at random.

A router stands before the servers. It sends a request to its session's home, or to the other server while that is down.
It sends a request again if its connection breaks because a server is killed. Times count from the first sending.
"""

import asyncio
import itertools
import json
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

AGENTS = Path(__file__).parents[1] / "data" / "agents.jsonl"
NAMES = [a + b + c for a in "bcdfghjklmnprstvz" for b in "aeiou" for c in "bcdfghjklmnprstvz"]
HEAD_NAMES, TABLE_NAMES = NAMES[::5], [name for at, name in enumerate(NAMES) if at % 5]
"""Names of system prompts are in no session's table."""
ENTRIES, TIMES = 4, 2
"""Entries of a table, and the times that a session's first message has it."""
DIGITS = 4
HEADS, HEAD_ENTRIES = 4, 16
"""Number of system prompts that agents share, and lines of each."""
LINE_TOKENS, QUESTION_TOKENS = 9, 10
SCALE = 64
"""Tokens of the trace for one of here."""
FIRST_TOKENS, MOST_ANSWER, LONGEST = 256, 32, 1024
MOST_PAUSE_S, STAGGER_S = 300.0, 30.0
LEFT_TOKENS, LEFT_AFTER = 24, 2
"""Length of an answer that its client leaves, and number of pieces after which it leaves."""
TURNS = (1, 1, 1, 2, 2, 2, 3, 4)
TENANTS = ("left", "right")
HEADER = "X-Tenant-ID"
THINK_S, FAR_S, FAR_SHARE = (2.0, 8.0), (15.0, 60.0), 0.2
"""Pauses between a short chat's turns, and those of a share of them."""
EXACT_SHARE, MOVE_SHARE = 0.25, 0.15
"""Share of sessions that ask for exact KV, and of turns before which a session moves to the other server."""
BLOCK = 32
ANSWER = {"temperature": 0, "ignore_eos": True}
TOGETHER, TIMEOUT_S = 64, 120.0
"""Requests that the router passes on to a server at a time, and the time for an answer after that."""
AGAIN_S, POLL_S = 5.0, 0.2
KEPT_ERRORS = 20
SURE_NATS, EXACT_NATS = 2.0, 0.25
"""Margins, in nats, of a token over the next best that a codec's loss, and bf16's rounding, cannot turn around."""


class BrokenError(Exception):
    """The connection was refused, or ended before the answer did."""


class Turn(NamedTuple):
    """One request of a session. tokens: new ones of its prompt."""

    pause_s: float
    tokens: int
    answer_tokens: int


def agents(speed: float) -> list[list[Turn]]:
    """Return the trace's sessions, `speed` times as fast, each as long as a prompt can be."""
    sessions = []
    for line in AGENTS.read_text().splitlines():
        turns, total = list[Turn](), (HEAD_ENTRIES + TIMES * ENTRIES) * LINE_TOKENS
        for milliseconds, tokens, answer in json.loads(line):
            pause_s = min(MOST_PAUSE_S, milliseconds / 1000 / speed)
            turn = Turn(pause_s, min(tokens // SCALE, FIRST_TOKENS), max(DIGITS, min(MOST_ANSWER, answer // SCALE)))
            total += turn.tokens + QUESTION_TOKENS + max(turn.answer_tokens, LEFT_TOKENS)
            if total > LONGEST:
                break
            turns.append(turn)
        sessions.append(turns)
    return sessions


def short(chance: random.Random) -> list[Turn]:
    """Return the turns of a short chat."""
    turns = [Turn(0.0, 0, DIGITS)]
    for _ in range(chance.choice(TURNS) - 1):
        pause_s = chance.uniform(*(FAR_S if chance.random() < FAR_SHARE else THINK_S))
        turns.append(Turn(pause_s, ENTRIES * LINE_TOKENS, DIGITS))
    return turns


class Table:
    """Lines `name = 4821`."""

    def __init__(self, chance: random.Random, names: Sequence[str], entries: int) -> None:
        self._values = {name: "".join(chance.sample("123456789", DIGITS)) for name in chance.sample(names, entries)}
        self._next = itertools.cycle(self._values.items())

    def lines(self, count: int) -> str:
        """Return the next lines, over and over."""
        return "".join(f"{name} = {value}\n" for name, value in itertools.islice(self._next, count))

    def lookup(self, chance: random.Random) -> tuple[str, str]:
        """Return a question and its answer."""
        name = chance.choice(list(self._values))
        return f"assert {name} == ", self._values[name]


class Seen(NamedTuple):
    """Server that answered a session last. known: tokens that it had computed; 0 if it did not say."""

    known: int = 0
    server: int = -1
    life: int = 0
    epoch: int = 0


class Chat:
    """One session. name: its id; empty for none. home: number of the server that the router prefers."""

    def __init__(self, number: int, seed: int, agent: list[Turn] | None = None) -> None:
        """Begin a short chat, or a session of an agent."""
        self.chance = chance = random.Random(f"{seed}-{number}")
        self.name = f"session-{number}" if chance.random() < 0.6 else ""
        self.tenant, self.turns, self.is_agent = chance.choice(TENANTS), agent or short(chance), agent is not None
        self.is_exact, self.home = chance.random() < EXACT_SHARE, chance.randrange(2)
        self.messages, self.seen = list[dict[str, Any]](), Seen()
        self._table = Table(chance, TABLE_NAMES, ENTRIES)
        if agent:
            head = Table(random.Random(f"head-{chance.randrange(HEADS)}"), HEAD_NAMES, HEAD_ENTRIES)
            self.messages.append({"role": "system", "content": head.lines(HEAD_ENTRIES)})

    def says(self, turn: Turn) -> str:
        """Add the next message, and return the right answer."""
        is_first = not any(message["role"] == "assistant" for message in self.messages)
        lines = self._table.lines(max(TIMES * ENTRIES if is_first else 0, turn.tokens // LINE_TOKENS))
        question, right = self._table.lookup(self.chance)
        said = {"role": "user", "content": ("" if is_first else "\n") + lines + question}
        if self.is_agent and not is_first:
            said |= {"role": "tool", "tool_call_id": f"call-{len(self.messages)}"}
        self.messages.append(said)
        return right


class Answer(NamedTuple):
    """An answer.

    Attributes:
        usage: As the server has it; empty if the client has left.
        lossy: Cached tokens that were not exact, if the server said so.
        tokens: Text of each token, and its margin in nats; empty where nobody asked for them.
    """

    text: str
    usage: dict[str, Any]
    lossy: int = 0
    tokens: Sequence[tuple[str, float]] = ()

    def margin_at(self, place: int) -> float:
        """Return the margin of the token that has the character at `place`; 0 behind the end."""
        for text, margin in self.tokens:
            if place < len(text):
                return margin
            place -= len(text)
        return 0.0


@dataclass
class Backend:
    """A server as the router has it.

    Attributes:
        life: Number of its life among those of all servers.
        epoch: Number of resets in this life that drop all.
        reset_at: When the last of these was over.
    """

    number: int
    url: str = ""
    is_up: bool = False
    life: int = 0
    epoch: int = 0
    reset_at: float = 0.0
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TOGETHER))


class Traffic:
    """All sessions.

    Args:
        model: Name of the model.
        rate: New short chats a second.
        trace: Sessions that agents replay.
        agents: Number of agents at a time.
        seed: Seed of all texts and choices.
        plain_url: Server that answers are compared with.

    `phase` is set from outside: it is in the messages of what went wrong. `goes_up`, `goes_down` and `was_reset` are
    called on any thread, and all else on that of the loop.
    """

    def __init__(
        self, model: str, rate: float, trace: list[list[Turn]], agents: int, seed: int, plain_url: str = ""
    ) -> None:
        self._model, self._rate, self._trace, self._agents, self._seed = model, rate, trace, agents, seed
        self.plain_url, self.phase, self.sessions = plain_url, "start", 0
        self.counts = Counter[str]()
        self.errors: list[str] = []
        self.waits: list[tuple[float, float]] = []
        """When each answered request was sent, on the monotonic clock, and seconds until its answer was whole."""
        self.returns: dict[str, Counter[str]] = {}
        """Returns by server's life and by who had computed the session: "3 same", "3 before" (an earlier life of that
        server) or "3 other" (the other server)."""
        self._backends = [Backend(0), Backend(1)]
        self._over = asyncio.Event()
        self._names: deque[tuple[str, str]] = deque(maxlen=200)
        """Sessions that think, with their tenants."""
        self._tasks: set[asyncio.Task[None]] = set()

    def goes_up(self, number: int, url: str, life: int) -> None:
        """Say that a server answers, in which life."""
        backend = self._backends[number]
        backend.url, backend.life, backend.epoch, backend.is_up = url, life, 0, True

    def goes_down(self, number: int) -> None:
        """Say that connections to a server may break from now on."""
        self._backends[number].is_up = False

    def was_reset(self, number: int) -> None:
        """Say that a server has dropped all that was before."""
        backend = self._backends[number]
        backend.epoch, backend.reset_at = backend.epoch + 1, time.monotonic()

    def ends(self) -> None:
        """Begin no session or turn any more; requests that were sent are answered."""
        self._over.set()

    async def run(self) -> None:
        """Run until `ends`."""
        # uvicorn closes a connection that nobody uses after 5 s, and if it is late, one that was just sent a request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
            self._http = http
            for number in range(self._agents):
                self._start(self._work(random.Random(f"{self._seed}-agent-{number}")))
            chance, due = random.Random(self._seed), time.monotonic()
            while not await self._is_over_within((due := due + chance.expovariate(self._rate)) - time.monotonic()):
                self._start(self._talk())
            while self._tasks:
                await asyncio.wait(self._tasks)

    # -- sessions -----------------------------------------------------------------------------------------

    async def _work(self, chance: random.Random) -> None:
        """Replay one session after the other, the first from a random turn on."""
        turns = chance.choice(self._trace)
        turns = turns[chance.randrange(len(turns)) :]
        pause_s = chance.uniform(0, STAGGER_S)
        while not await self._is_over_within(pause_s):
            await self._talk(turns)
            turns, pause_s = chance.choice(self._trace), chance.uniform(*THINK_S)

    def _start(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._is_done)

    def _is_done(self, task: asyncio.Task[None]) -> None:
        """Count an exception that nobody has thought of."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts["errors"] += 1
            self._note(repr(error))

    async def _is_over_within(self, seconds: float) -> bool:
        if self._over.is_set():  # wait_for does not look if no time is left
            return True
        try:
            await asyncio.wait_for(self._over.wait(), max(0.0, seconds))
        except TimeoutError:
            return False
        return True

    async def _talk(self, agent: list[Turn] | None = None) -> None:
        """Play a session. It ends with its first failed request."""
        self.sessions += 1
        chat = Chat(self.sessions, self._seed, agent)
        for number, turn in enumerate(chat.turns):
            if number and await self._is_over_within(turn.pause_s):
                return
            if number and chat.chance.random() < MOVE_SHARE:
                chat.home = 1 - chat.home
            if not await self._turn(chat, turn, is_last=number == len(chat.turns) - 1):
                return

    async def _turn(self, chat: Chat, turn: Turn, *, is_last: bool) -> bool:
        right, kind = chat.says(turn), chat.chance.choices(("posted", "streamed", "left"), (5, 4, 1))[0]
        hints = self._hints(chat, is_last) | ({"quality": "exact"} if chat.is_exact else {})
        tokens = LEFT_TOKENS if kind == "left" else turn.answer_tokens
        options = ANSWER | {"max_tokens": tokens} | ({"session_id": chat.name} if chat.name else {})
        options |= {"kv_transfer_params": {"manthan": hints}} if hints else {}
        options |= {"stream": True, "stream_options": {"include_usage": True}} if kind != "posted" else {}
        number = Counter({"requests": 1, kind: 1, "named": bool(chat.name), "hinted": bool(hints)})
        number.update(agents=chat.is_agent, exact=chat.is_exact)
        sent = time.monotonic()
        try:
            answer, backend, retries = await self._answered(chat, options, kind)
            self.waits.append((sent, time.monotonic() - sent))
            number["retried"] += retries
            number.update(self._count_return(chat, answer, backend, 0.0 if retries else sent))
            number.update(await self._judged(chat, answer, tokens, right, kind))
        except (BrokenError, TimeoutError, aiohttp.ClientError, ValueError, KeyError) as error:
            number["errors"] += 1
            self._note(f"{kind}: {type(error).__name__}: {error} after {time.monotonic() - sent:.1f} s")
        self.counts.update(number)
        if number["errors"]:
            return False
        chat.messages.append({"role": "assistant", "content": answer.text})
        if chat.name and not is_last:
            self._names.append((chat.name, chat.tenant))
        return True

    def _note(self, error: str) -> None:
        if len(self.errors) < KEPT_ERRORS:
            self.errors.append(f"{self.phase}: {error}")

    def _hints(self, chat: Chat, is_last: bool) -> dict[str, Any]:
        """Return hints for half of the requests."""
        if chat.chance.random() < 0.5:
            return {}
        if is_last:
            return {"release": True}
        kind = chat.chance.randrange(5)
        if kind == 4 and self._names:
            name, tenant = self._names[chat.chance.randrange(len(self._names))]
            return {"prefetch": [name]} if tenant == chat.tenant else {"priority": -1}
        return ({"pin": True}, {"ttl_s": 120.0}, {"expect_return_s": 5.0}, {"priority": 3}, {"pin": False})[kind]

    # -- judging ------------------------------------------------------------------------------------------

    async def _judged(self, chat: Chat, answer: Answer, tokens: int, right: str, kind: str) -> Counter[str]:
        """Compare with the plain server's answer: the number looked up, or all of it if the session wants exact KV.

        A difference is `misled` if the plain server was sure of the token there, else `doubtful`.
        """
        options = ANSWER | {"max_tokens": tokens if chat.is_exact else DIGITS, "logprobs": True, "top_logprobs": 2}
        async with asyncio.timeout(2 * TIMEOUT_S):
            plain = await self._ask(self.plain_url, chat, options, "posted")
        length = min(len(answer.text), len(plain.text)) if kind == "left" else len(plain.text)
        length = length if chat.is_exact else min(length, DIGITS)
        told, wanted = answer.text[:length], plain.text[:length]
        number = Counter(checked=1, errs=wanted[:DIGITS] != right[: len(wanted)])
        if chat.is_exact and answer.lossy:
            number["misled"] += 1
            self._note(f"{answer.lossy} lossy tokens for who asked for exact ones, {answer.usage}")
        if told == wanted and told:
            return number
        place = next((at for at, (one, other) in enumerate(zip(told, wanted, strict=False)) if one != other), len(told))
        margin = plain.margin_at(place)
        is_sure = not told or margin >= (EXACT_NATS if chat.is_exact else SURE_NATS)
        number.update(wrong=1, **{"misled" if is_sure else "doubtful": 1})
        if is_sure:
            exact = ", exact" if chat.is_exact else ""
            self._note(f"misled: {told!r} instead of {wanted!r}{exact}, sure by {margin:.1f}, {answer.usage}")
        return number

    def _count_return(self, chat: Chat, answer: Answer, backend: Backend, sent: float) -> Counter[str]:
        """Count what a returning session found, and return `stale` if that is of before a reset.

        full: tokens of blocks that a server had computed for this session. cached: those that were not computed again.
        came_back: sessions for which there were some.
        """
        usage, number, seen = answer.usage, Counter[str](), chat.seen
        if seen.known and usage:
            full = min(seen.known, usage["prompt_tokens"] - 1) // BLOCK * BLOCK
            cached = min(full, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
            who = "other" if seen.server != backend.number else "same" if seen.life == backend.life else "before"
            is_before = seen.epoch != backend.epoch and sent > backend.reset_at
            if who == "same" and is_before and cached > HEAD_ENTRIES * LINE_TOKENS + BLOCK:
                number["stale"] = 1
                self._note(f"{cached} tokens of before a reset that drops all")
            found = Counter(returns=1, full=full, cached=cached, came_back=int(cached > 0))
            self.returns.setdefault(f"{backend.life} {who}", Counter()).update(found)
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1 if usage else 0
        chat.seen = Seen(known, backend.number, backend.life, backend.epoch)
        return number

    # -- a request ----------------------------------------------------------------------------------------

    async def _answered(self, chat: Chat, options: dict[str, Any], kind: str) -> tuple[Answer, Backend, int]:
        """Send a request until a server that is not killed meanwhile answers it. The last value counts retries."""
        for retries in itertools.count():
            both = self._backends[chat.home], self._backends[1 - chat.home]
            while not any(one.is_up for one in both):
                await asyncio.sleep(POLL_S)
            backend = next(one for one in both if one.is_up)
            life = backend.life
            try:
                async with backend.places, asyncio.timeout(TIMEOUT_S):
                    return await self._ask(backend.url, chat, options, kind), backend, retries
            except (BrokenError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                if backend.is_up and life == backend.life:
                    raise  # nobody has killed it
                await asyncio.sleep(random.uniform(0, AGAIN_S))
        raise AssertionError

    async def _ask(self, url: str, chat: Chat, options: dict[str, Any], kind: str) -> Answer:
        """Return an answer. Raises ValueError if the server gave it up, BrokenError if the stream has no end."""
        body = {"model": self._model, "messages": chat.messages, **options}
        async with self._http.post(f"{url}/v1/chat/completions", json=body, headers={HEADER: chat.tenant}) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:300]}")
            if kind == "posted":
                found = await response.json()
                choice, told = found["choices"][0], (found.get("kv_transfer_params") or {}).get("manthan") or {}
                _check_end(choice)
                text = choice["message"]["content"] or ""
                return Answer(text, found["usage"], told.get("lossy_tokens") or 0, _margins(choice))
            pieces, usage = [], {}
            async for chunk in _events(response):
                for choice in chunk["choices"]:
                    _check_end(choice)
                    pieces += [text] if (text := choice["delta"].get("content")) else []
                usage = chunk.get("usage") or usage
                if kind == "left" and len(pieces) >= LEFT_AFTER:
                    response.close()
                    return Answer("".join(pieces), {})
            return Answer("".join(pieces), usage)


def _check_end(choice: dict[str, Any]) -> None:
    if choice.get("finish_reason") not in (None, "length", "stop"):
        raise ValueError(f"finish_reason {choice['finish_reason']}")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            found = json.loads(line[6:])
            if "error" in found:
                raise ValueError(f"in the stream: {found['error']}")
            yield found
    raise BrokenError("the stream has no end")


def _margins(choice: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the tokens of an answer, and their margins over the next best; none without log-probabilities."""
    told = (choice.get("logprobs") or {}).get("content") or ()
    ranked = [sorted((one["logprob"] for one in token["top_logprobs"]), reverse=True) for token in told]
    return [(token["token"], one[0] - one[1] if len(one) > 1 else 0.0) for token, one in zip(told, ranked, strict=True)]
