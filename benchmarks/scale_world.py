"""An engine's scheduler with very many sessions, without its model: the real driver over a simulated KV pool, and a
meter on every call of it.
"""

import gc
import hashlib
import random
import time
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar

from manthan.benchmarks.arena import resident
from manthan.manager.config.model import ManthanConfig
from manthan.manager.config.registered import choose_policy
from manthan.manager.driver import Driver
from manthan.manager.lives import Lives
from manthan.manager.sessions.adoption import HISTORY, LeftSession
from manthan.manager.sessions.budget import Shares
from manthan.manager.sessions.hints import NO_HINTS, Hints
from manthan.manager.sessions.listing import Sort
from manthan.manager.sessions.manager import SessionMemoryManager
from manthan.manager.sessions.session import Encoding, MemoryShape, qualified
from manthan.manager.simulator.pool import SimulatedPool
from manthan.manager.work import Load, LoadResult, SpillBlock, SpillResult
from manthan.policies import get_policy
from manthan.vllm_hooks.inquiries import Inquiries

STEP_S = 0.02
"""Between two steps of the engine."""
EVENTS_A_REQUEST = 6
"""Started, wanted, admitted, restoring, restored, finished."""
IDLE_AFTER_S, LEAD_S = 10.0, 2.0
SHAPE = MemoryShape(block_tokens=16, hot_nbytes=4000, bounds={0: 1000}, typical=900)
FILLED = 0.98
"""How much of the budget is taken when the requests begin: before long each eviction has to make room."""
NAME = "app"
TENANTS, QUOTA = 10, 0.02
SYSTEM_PROMPTS = 8
PAGE = 100
LOOKS = 21
REQUEST, WITH_SHARE = "request", "request with its share of steps"
P = ParamSpec("P")
R = TypeVar("R")


class Scale(NamedTuple):
    """sessions: known. named: the share of them that have one session_id. blocks: of a session, on average. pool: its
    blocks. events: a second. requests: measured; warm_up: served before."""

    policy: str
    sessions: int
    named: float
    blocks: int
    pool: int
    events: float
    requests: int
    warm_up: int
    seed: int


class Meter:
    """The processor's time of this thread that calls take, in ns by kind, without what the garbage collector takes."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, list[int]] = defaultdict(list)
        self.pauses: defaultdict[int, list[int]] = defaultdict(list)
        """By generation."""
        self.last = 0
        self._paused = self._began = 0
        gc.callbacks.append(self._collects)

    def close(self) -> None:
        gc.callbacks.remove(self._collects)

    def reset(self) -> None:
        self.spent.clear()
        self.pauses.clear()

    def call(self, kind: str, what: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        paused, began = self._paused, time.thread_time_ns()
        result = what(*args, **kwargs)
        self.last = time.thread_time_ns() - began - (self._paused - paused)
        self.spent[kind].append(self.last)
        return result

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time_ns()
        else:
            took = time.thread_time_ns() - self._began
            self._paused += took
            self.pauses[info["generation"]].append(took)


@dataclass(slots=True)
class Conversation:
    """Its first blocks are a system prompt that others have as well. edits: from which block on it was changed."""

    number: int
    name: str | None
    tenant: str
    length: int
    most: int
    shared: int
    edits: list[int] = field(default_factory=list)

    def keys(self, length: int) -> list[bytes]:
        return [self._key(depth) for depth in range(length)]

    def _key(self, depth: int) -> bytes:
        edits = sum(edit <= depth for edit in self.edits)
        owner = f"s{self.number % SYSTEM_PROMPTS}" if depth < self.shared else f"{self.number}/{edits}"
        return hashlib.sha256(f"{owner}/{depth}".encode()).digest()


@dataclass(slots=True, eq=False)
class Request:
    """spent: ns of the calls that were made for it alone."""

    name: str
    conversation: Conversation
    prompt: list[bytes]
    keys: list[bytes]
    hints: Hints
    blocks: list[int] = field(default_factory=list)
    spent: int = 0

    @property
    def tokens(self) -> int:
        """Of the prompt: a last block is not full."""
        return len(self.prompt) * SHAPE.block_tokens + 1


class Traffic:
    """Who comes, and with what. One request in ten begins a conversation; of the others half go on with one of the
    last 2,048, half with any. One in fifty changes an earlier message, one in five says what it wishes."""

    def __init__(self, scale: Scale) -> None:
        self.rng, self._scale = random.Random(scale.seed), scale
        self._numbers, self._requests = count(), count()
        self.conversations = [self._new(begun=True) for _ in range(scale.sessions)]
        self._recent: deque[Conversation] = deque(maxlen=2048)
        self._running: set[int] = set()

    def _new(self, begun: bool) -> Conversation:
        number, rng, blocks = next(self._numbers), self.rng, self._scale.blocks
        low, most = max(2, blocks // 2), max(4, 3 * blocks // 2)
        is_one_name = rng.random() < self._scale.named
        name = NAME if is_one_name else (f"chat-{number}" if number % 2 else None)
        tenant = f"tenant-{number // 10 % TENANTS}" if number % 10 == 0 else ""
        length = rng.randint(low, most) if begun else low
        return Conversation(number, name, "" if is_one_name else tenant, length, most, shared=max(1, blocks // 8))

    def next(self) -> Request:
        rng = self.rng
        if rng.random() < 0.1:
            one = self._new(begun=False)
            self.conversations[rng.randrange(len(self.conversations))] = one
        else:
            one = self._returning()
        added = max(1, self._scale.blocks // 16)
        kind = rng.random()
        if kind < 0.02 and one.length > one.shared + 2:  # an earlier message is changed
            one.edits.append(one.length - 2)
        elif kind > 0.02:
            one.length += added
        self._recent.append(one)
        self._running.add(one.number)
        keys = one.keys(one.length)
        prompt = keys[: max(1, one.length - added // 2)]
        return Request(f"r{next(self._requests)}", one, prompt, keys, self._hints())

    def _returning(self) -> Conversation:
        while True:
            among: Sequence[Conversation] = self._recent if self._recent and self.rng.random() < 0.5 else ()
            one = self.rng.choice(among or self.conversations)
            if one.number not in self._running and one.length < one.most:
                return one
            if one.length >= one.most and not among:  # it is over, and somebody else comes
                at = self.rng.randrange(len(self.conversations))
                self.conversations[at] = one = self._new(begun=False)
                return one

    def ended(self, request: Request) -> None:
        self._running.discard(request.conversation.number)

    def _hints(self) -> Hints:
        rng = self.rng
        said: dict[str, Any] = rng.choices(
            (
                {},
                {"expect_return_s": rng.uniform(3, 20)},
                {"ttl_s": 600.0},
                {"pin": True},
                {"pin": False},
                {"priority": rng.choice((-1, 1))},
                {"release": True},
            ),
            (80, 6, 6, 2, 2, 2, 2),
        )[0]
        return Hints(**said) if said else NO_HINTS


class _Pool(SimulatedPool):
    """usable_blocks: as the pool of an engine tells it."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.usable_blocks = blocks


class World:
    """One engine. It answers what the driver orders a step later, and computes nothing."""

    def __init__(self, scale: Scale) -> None:
        self.scale, self.traffic, self.meter = scale, Traffic(scale), Meter()
        self.now = 0.0
        lengths = sum(one.length - one.shared for one in self.traffic.conversations)
        quotas = {f"tenant-{number}": QUOTA for number in range(TENANTS)}
        self.manager = SessionMemoryManager(
            get_policy(scale.policy),
            SHAPE,
            int(lengths * SHAPE.cold_nbytes / FILLED),
            IDLE_AFTER_S,
            shares=Shares(tenants=quotas),
            prefetch_lead_s=LEAD_S,
        )
        self.pool = _Pool(scale.pool)
        self.lives = Lives(self.manager.table.by_id, SHAPE.block_tokens, lambda: self.now)
        self.driver = Driver(self.manager, self.pool, scale.pool, low=0.05, high=0.1, observer=self.lives)
        self.inquiries = Inquiries(self._half())  # type: ignore[arg-type]
        self._waiting: deque[Request] = deque()
        self._restoring: dict[str, Request] = {}
        self._computing: defaultdict[int, list[Request]] = defaultdict(list)  # by step
        self._spills: Sequence[SpillBlock] = ()
        self._loads: Sequence[Load] = ()
        self.spent: dict[str, tuple[int, int]] = {}
        """By request, ns of its own calls, and with its share of what is done for all."""
        self._step, self._shared_ns = 0, 0
        self.requests = 0

    def _half(self) -> SimpleNamespace:
        """As much of an engine core's half as is asked when its sessions are looked at."""
        config = ManthanConfig.model_validate({"policy": {"name": self.scale.policy}})
        assert choose_policy(config.policy).policy is get_policy(self.scale.policy)
        telemetry = SimpleNamespace(lives=self.lives, store_is_up=True, totals={})
        return SimpleNamespace(manager=self.manager, config=config, telemetry=telemetry, pool=self.pool)

    def fill(self) -> None:
        """All conversations are known, and cold, as if an earlier process had left them."""
        rng = self.traffic.rng
        self.manager.adopt((self._left(one, rng) for one in self.traffic.conversations), 0.0)
        self.manager.take_news()

    def _left(self, one: Conversation, rng: random.Random) -> LeftSession:
        used = -rng.uniform(IDLE_AFTER_S, 3600)
        keys = one.keys(one.length)
        tokens = len(keys) * SHAPE.block_tokens
        history = dict.fromkeys(HISTORY, 0) | {"gap": 60.0, "ttl_s": None, "expected": None}
        history |= {"uses": 3, "tokens": tokens, "added_tokens": 64, "answer_tokens": 64}
        name = one.name
        told = qualified(f"{name}~{one.number}" if name == NAME else name or f"anonymous-{one.number}", one.tenant)
        codes = {(None, key): Encoding.of(900) for key in keys}
        return LeftSession(told, name, one.tenant, used - 600, used, False, history, keys, (), codes)

    # -- steps ----------------------------------------------------------------------------------------

    def serve(self, requests: int) -> None:
        """So many requests from now on, and whatever belongs to them."""
        rate = self.scale.events / EVENTS_A_REQUEST * STEP_S
        until = self.requests + requests
        while self.requests < until:
            self.now += STEP_S
            self._step += 1
            arrivals = int(rate) + (self.traffic.rng.random() < rate % 1)
            for _ in range(arrivals):
                self._arrive(self.traffic.next())
            self._answer()
            taken = self._admit()
            ended = self._computing.pop(self._step, ())
            for request in ended:
                self._finish(request)
            work = self.meter.call("step", self.driver.step, taken, self.now)
            self._shared_ns += self.meter.last
            self._spills, self._loads = work.spills, work.loads
            self._count(ended)

    def _count(self, ended: Sequence[Request]) -> None:
        """What requests that have ended took, alone and with what was done for all since others ended."""
        for request in ended:
            self.spent[request.name] = request.spent, request.spent + self._shared_ns // len(ended)
        if ended:
            self._shared_ns = 0

    def _of(self, request: Request, kind: str, what: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        result = self.meter.call(kind, what, *args, **kwargs)
        request.spent += self.meter.last
        return result

    def _arrive(self, request: Request) -> None:
        one = request.conversation
        self._of(
            request,
            "started",
            self.driver.started,
            request.name,
            request.prompt,
            one.name,
            self.now,
            tokens=request.tokens,
            blocks=len(request.keys) + 1,
            hints=request.hints,
            tenant=one.tenant,
        )
        self._waiting.append(request)

    def _admit(self) -> int:
        """Let in who need not wait; returns how many blocks they take."""
        waiting, self._waiting = self._waiting, deque()
        before = len(self.pool)
        for request in waiting:
            keys, needed = request.prompt, len(request.keys) + 1
            hits = self.pool.hit(keys)
            cold = self._of(request, "wanted", self.driver.wanted, request.name, keys, len(hits), needed, self.now)
            if cold is None or needed > len(self.pool):
                self._waiting.append(request)
                continue
            self.pool.touch(hits)
            blocks = hits + self.pool.take(needed - len(hits))
            hot, request.blocks = len(hits), blocks
            usable = self.driver.usable(request.tokens)
            self._of(request, "admitted", self.driver.admitted, request.name, keys, hot, usable, needed)
            if cold:
                names = keys[hot : hot + cold]
                self._of(
                    request, "restoring", self.driver.restoring, request.name, names, blocks[hot : hot + len(names)]
                )
                self._restoring[request.name] = request
            else:
                self._compute(request)
        return before - len(self.pool)

    def _compute(self, request: Request) -> None:
        steps = 5 + int(self.traffic.rng.expovariate(1 / 25))
        self._computing[self._step + steps].append(request)

    def _answer(self) -> None:
        """What the last step ordered is done."""
        for load in self._loads:
            answer = LoadResult(load.request_id, (), 900 * load.blocks, 0.01, load.is_prefetch)
            if load.is_prefetch:
                self.meter.call("prefetched", self.driver.answered, (), [answer], self.now)
                self._shared_ns += self.meter.last
                continue
            request = self._restoring.pop(load.request_id)
            self._of(request, "restored", self.driver.answered, (), [answer], self.now)
            self._compute(request)
        answers = [SpillResult(spill.key, spill.group, None, 0.001, 900) for spill in self._spills]
        if answers:
            self.meter.call("encoded", self.driver.answered, answers, (), self.now)
            self._shared_ns += self.meter.last

    def _finish(self, request: Request) -> None:
        for block, key in zip(request.blocks, request.keys, strict=False):
            if self.pool.get(key) is None:
                self.pool.cache(block, key)
        tokens = len(request.keys) * SHAPE.block_tokens + 1
        self._of(request, "finished", self.driver.finished, request.name, request.keys, self.now, tokens)
        self.pool.give_back(reversed(request.blocks))
        self.traffic.ended(request)
        self.requests += 1

    # -- looks ----------------------------------------------------------------------------------------

    def look(self) -> None:
        """What the API and the metrics ask."""
        asked: dict[str, Any] = {
            "bound": None, "states": None, "tenant": None, "tier": None, "pinned": None, "prefix": "",
            "sort": str(Sort.LAST_USED), "descending": True, "limit": PAGE, "offset": 0,
        }  # fmt: skip
        looks: dict[str, dict[str, Any]] = {f"list by {sort}": {"sort": str(sort)} for sort in Sort}
        looks |= {
            "list, oldest first": {"descending": False},
            "list, 50th page": {"offset": 50 * PAGE},
            "list cold": {"states": ["cold"]},
            "list hot": {"states": ["hot"]},
            "list pinned": {"pinned": True},
            "list of a tenant": {"bound": "tenant-0"},
            "list by prefix": {"prefix": f"{NAME}~"},
        }
        for _ in range(LOOKS):
            for kind, changed in looks.items():
                self.meter.call(kind, self.inquiries.answer, "sessions", asked | changed)
            self.meter.call("state", self.inquiries.answer, "state", {"bound": None})
            self.meter.call("state of a tenant", self.inquiries.answer, "state", {"bound": "tenant-0"})
            self.meter.call("gauges", lambda: self.manager.usage)


def figures(spent: Sequence[int]) -> dict[str, float]:
    """Of ns: how many, and µs."""
    ordered = sorted(spent)
    return {
        "count": len(ordered),
        "p50": ordered[len(ordered) // 2] / 1e3,
        "p99": ordered[len(ordered) * 99 // 100] / 1e3,
        "max": ordered[-1] / 1e3,
        "mean": sum(ordered) / len(ordered) / 1e3,
    }


def measure(scale: Scale) -> dict[str, Any]:
    """All figures of one policy and one number of sessions. To be called in a process of its own."""
    world = World(scale)
    gc.collect()
    gc.freeze()  # as an engine does when it has started
    before = resident()
    world.fill()
    gc.collect()
    known = len(world.manager.table.by_id)
    grown, blocks = resident() - before, len(world.manager.blocks)
    world.serve(scale.warm_up)
    world.meter.reset()
    world.spent.clear()
    began = world.now
    world.serve(scale.requests)
    pauses = {str(generation): figures(took) for generation, took in sorted(world.meter.pauses.items())}
    world.look()
    full = _full_collections(world.meter)
    world.meter.close()
    states = {str(state): count for state, count in world.manager.usage.sessions.items()}
    return {
        "known": known,
        "known_blocks": blocks,
        "states": states,
        "seconds": world.now - began,
        "resident_nbytes": grown,
        "resident_after": resident() - before,
        "kinds": {kind: figures(spent) for kind, spent in world.meter.spent.items()},
        "requests": world.spent,
        "pauses": pauses,
        "full_collection": figures(full),
    }


def _full_collections(meter: Meter) -> list[int]:
    """What it takes Python to go through all that there is: it does so now and then by itself, more seldom the more
    there is."""
    meter.pauses.clear()
    for _ in range(3):
        gc.collect()
    return meter.pauses[2]


def measure_memory(scale: Scale) -> dict[str, Any]:
    """Bytes that Python allocates for the sessions, their keys included."""
    world = World(scale)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    world.fill()
    gc.collect()
    nbytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    world.meter.close()
    return {"known": len(world.manager.table.by_id), "nbytes": nbytes, "blocks": len(world.manager.blocks)}
