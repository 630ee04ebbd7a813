"""Sessions of a real engine in this process that go cold and return, and what became of the bits of their blocks.

Run as a script: a job as JSON on standard input, a report as JSON on standard output. See SteppedEngine and SCENARIOS.
"""

import random
import threading
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import vllm_engine
from latent_model import VOCAB, add_index_keys, allow_prefix_caching
from numpy.typing import NDArray
from opentelemetry import trace
from scripts import answer
from stepped_engine import SteppedEngine, evict, evict_all

from manthan.codec import wire
from manthan.codec.cpu.numbers import as_floats
from manthan.manager.events import Event, Restored
from manthan.manager.session.blocks import Rows
from manthan.vllm_hooks.worker import half

Blocks = dict[bytes, NDArray[Any]]
"""Keys with values of paged blocks, [layers, heads, tokens, 2 * head_dim], or all of their bytes, by block hash."""


class Sessions(SteppedEngine):
    """An engine with one KV cache group. report: what happened."""

    def __init__(self, blocks: int, vllm: dict[str, Any] | None = None, **manthan: Any) -> None:
        super().__init__(blocks, vllm, **manthan)
        self.path = self.worker.engine
        [(self.group, self.blocks)] = self.path.blocks.items()
        self.report: dict[str, Any] = {"right": [], "failures": []}
        self.half.manager.events.subscribe(self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, Restored):
            self.report["failures"] += event.causes

    @cached_property
    def tokenizer(self) -> Any:
        return self.engine.get_tokenizer()

    def look_up(self, table: vllm_engine.Table, index: int, session: str, after: list[int]) -> list[int]:
        """Ask for an entry at the end of a conversation; returns the conversation with question and answer."""
        prompt, right = table.question(index)
        text = prompt if not after else f"\nassert {list(table.values)[index]} == "
        tokens = after + self.tokenizer.encode(text, add_special_tokens=False)
        answer = self.ask(tokens, session, 4)
        self.report["right"].append(self.tokenizer.decode(answer) == right)
        return tokens + answer

    def rows(self, session: str) -> Rows:
        rows: Rows = self.half.manager.table.by_id[session].rows
        return rows

    def hashes(self, session: str) -> list[bytes]:
        hashes: list[bytes] = self.half.manager.blocks.hashes(self.rows(session))
        return hashes

    def pool(self, session: str) -> Blocks:
        """Return the numbers of a session's resident blocks, in order."""
        hashes, memory = self.hashes(session), self.blocks._memory
        found = zip(hashes, self.half.pool.lookup(self.group, hashes), strict=True)
        return {name: np.concatenate(memory.gather(at), axis=3) for name, at in found if at >= 0}

    def go_cold(self) -> None:
        """Evict everything, and leave nothing of it in the pool."""
        evict_all(self.engine, self.half)
        for rows in (*self.blocks._memory._rows, *self.blocks._memory._raw):
            rows[:] = 0

    def stored(self, session: str) -> list[Any]:
        """Return the compressed blocks of a cold session."""
        return list(self.path.store.read(self.group, self.hashes(session)))

    def cold(self, session: str) -> dict[str, Any]:
        """Return exact tokens and bytes of a cold session's blocks, and what is saved as manager and store count it."""
        usage, store = self.half.manager.usage(), self.path.store
        sizes = [None if buf is None else len(buf) for buf in self.stored(session)]
        found = {"exact": self.half.manager.blocks.exact[self.rows(session)].tolist(), "sizes": sizes}
        return found | {"cold_bytes": usage.saved_nbytes, "used": store.used}

    # -- a session that grows -------------------------------------------------------------------------

    def grow(self) -> None:
        """One session goes cold and returns, three times, and grows by five blocks or so each time."""
        table = vllm_engine.Table(1)
        rounds = self.report["rounds"] = []
        conversation, before = self.look_up(table, 0, "user", []), self.pool("user")
        for turn in range(3):
            self.go_cold()
            cold = self.cold("user")
            more = self.tokenizer.encode("\n" + table.text[:250], add_special_tokens=False)
            conversation = self.look_up(table, turn + 1, "user", conversation + more)
            after = self.pool("user")
            rounds.append({"same": same_tokens(before, after), "restored": self.requests[-1]["found"][1]} | cold)
            before = after

    def shrink(self) -> None:
        """One session goes cold and returns at each level, the finest first. Say how far its KV is from what it was."""
        table, manager = vllm_engine.Table(1), self.half.manager
        rounds = self.report["rounds"] = []
        conversation = self.look_up(table, 0, "user", [])
        first = self.pool("user")
        for turn, level in enumerate((4, 3, 2, 1, 0), 1):
            self.go_cold()
            if level < 4:
                manager._trim(manager.table.by_id["user"], level + 1, 1 << 60)
            conversation = self.look_up(table, turn, "user", conversation)
            after, pool = self.pool("user"), np.stack(list(first.values()))
            wrong = as_floats(np.stack([after[name] for name in first])) - as_floats(pool)
            rounds.append(
                {
                    "level": level,
                    "levels": manager.blocks.level[self.rows("user")[: len(first)]].tolist(),
                    "restored": self.requests[-1]["found"][1],
                    "error": float(np.square(wrong).sum() / np.square(as_floats(pool)).sum()),
                    "cold_bytes": manager.usage().saved_nbytes,
                    "used": self.path.store.used,
                }
            )

    def codecs(self) -> None:
        """In which codecs the blocks of a cold session are, as their headers say, and what the metrics say."""
        self.go_cold()
        found = {
            each.codec for buf in self.stored("user") if buf is not None for each in wire.parse(buf).header.sections
        }
        self.report["codecs"] = sorted(found)
        gauges = self.half.telemetry._gauges()
        self.report["gauges"] = {"compression_ratio": gauges["compression_ratio"]}

    def profile(self) -> None:
        """What the codec has been told of the model."""
        found = self.blocks.format.facts.profile
        self.report["profile"] = None if found is None else found.digest


def same_tokens(before: Mapping[Any, NDArray[Any]], after: Mapping[Any, NDArray[Any]]) -> list[int]:
    """Positions in the session of the tokens whose numbers are the same in all layers, bit for bit."""
    same: list[int] = []
    for depth, (key, numbers) in enumerate(before.items()):
        tokens = np.all(numbers == after[key], axis=(0, 1, 3))
        same += (depth * len(tokens) + np.flatnonzero(tokens)).tolist()
    return same


def growing(job: Any) -> Any:
    """Return the report of the jobs by name in `what`."""
    sessions = Sessions(job["blocks"], job.get("vllm"), **job["manthan"])
    for name in job["what"]:
        getattr(sessions, name)()
    return sessions.report


# -- latents ------------------------------------------------------------------------------------------

LATENT_BLOCK = 16
PROMPT, ANSWER, FILLED = 20 * LATENT_BLOCK, LATENT_BLOCK + 1, 21
"""Tokens of the prompt and of the first answer; blocks that are full then."""
NAME = "user"
Latents = dict[int, NDArray[Any]]
"""Latents of each block of the session, as gathered."""


class LatentSessions(Sessions):
    """A session of a model with latents (MLA).

    A prompt that returns has one token behind its last full block. The CPU's kernel for single tokens computes that
    one, and reads the paged cache.
    """

    def answered(self, tokens: list[int]) -> dict[str, Any]:
        """The session's next answer, and how many blocks were resident and restored."""
        return {"answer": self.ask(tokens, NAME, 24), "found": self.requests[-1]["found"]}

    def gathered(self) -> tuple[list[NDArray[Any]], Latents]:
        """RoPE's part of all blocks, with the opaque bytes if there are any, and the latents of each.

        Of blocks of bytes the latents are empty.
        """
        ids = self.half.pool.lookup(self.group, self.hashes(NAME)[:FILLED])
        turned, latents, *index = zip(*(self.blocks._memory.gather(block_id) for block_id in ids), strict=True)
        return [np.stack(part) for part in (turned, *index)], dict(enumerate(latents))

    def sections(self) -> list[list[Any]]:
        """Kind, codec and tokens of each section of the first block and of the second."""
        blocks = [wire.parse(buf).header.sections for buf in self.stored(NAME)[:2]]
        return [[[s.kind.name, s.codec, s.first_token, s.tokens] for s in block] for block in blocks]

    def come_back(self) -> dict[str, Any]:
        """The same question while the session is resident, after it was cold, and with a cache of zeros."""
        rng = random.Random(0)
        tokens = [rng.randrange(10, VOCAB) for _ in range(PROMPT)]
        tokens += self.ask(tokens, NAME, ANSWER)
        report = self.report | {"hot": self.answered(tokens)}
        turned, latents = self.gathered()
        self.go_cold()
        report["sections"] = self.sections()
        report["cold"] = self.answered(tokens)
        turned_after, after = self.gathered()
        report["kept"] = [bool(x.any()) and np.array_equal(x, y) for x, y in zip(turned, turned_after, strict=True)]
        if latents[0].size:
            report |= {"same_tokens": same_tokens(latents, after), "noise": noise(latents, after)}
        self.blocks.decode = lambda *_: None
        self.go_cold()
        report["zeros"] = self.answered(tokens)
        return report | {"sizes": [len(buf) for buf in self.stored(NAME)[:FILLED]]}


def noise(before: Latents, after: Latents) -> float:
    """The error of all latents next to what they differ in from their mean, in energy, in the worst layer."""
    x, y = (as_floats(np.concatenate(list(latents.values()), axis=2)) for latents in (before, after))
    wrong, spread = np.square(x - y), np.square(x - x.mean(axis=2, keepdims=True))
    return float((wrong.sum(axis=(1, 2, 3)) / spread.sum(axis=(1, 2, 3))).max())


def latents(job: Any) -> Any:
    """Return what became of a session with latents.

    index: True for a cache of index keys next to them. hidden: True for layers that cannot be probed.
    """
    allow_prefix_caching()
    if job.get("index"):
        add_index_keys()
    if job.get("hidden"):
        half.probe_layers = hide
    vllm = {"skip_tokenizer_init": True, "block_size": LATENT_BLOCK}
    return LatentSessions(131, vllm, model=job["model"], **job["manthan"]).come_back()


def hide(*_: object) -> None:
    """Attention that writes its cache in a way of its own."""
    raise AttributeError("do_kv_cache_update")


# -- a session that is evicted in the very step that computes its blocks ------------------------------


class SameStep(Sessions):
    """steps: in which order forward passes, the draft's too, loads and stores begin in each step."""

    def watch(self, loads_first: bool) -> None:
        """loads_first: vLLM has loads begun before each forward pass, as for connectors with synchronous ones."""
        self.steps: list[list[str]] = []
        schedule, runner = self.scheduler.schedule, self.core.model_executor.driver_worker.worker.model_runner
        loads, stores = self.path.submit_loads, self.path.submit_stores

        def noting_schedule(*args: Any, **more: Any) -> Any:
            self.steps.append([])
            output = schedule(*args, **more)
            output.has_sync_kv_loads = loads_first
            return output

        def noting_loads(metadata: Any) -> None:
            self.steps[-1].append("loads")
            loads(metadata)

        def noting_stores(metadata: Any) -> None:
            self.steps[-1] += ["stores"] if metadata.stores else []
            stores(metadata)

        self.scheduler.schedule = noting_schedule
        self.path.submit_loads, self.path.submit_stores = noting_loads, noting_stores
        self._note_end(runner, "_model_forward", "forward")
        if hasattr(runner, "drafter"):
            self._note_end(runner.drafter, "propose", "draft")

    def _note_end(self, owner: Any, name: str, what: str) -> None:
        call = getattr(owner, name)

        def noting(*args: Any, **more: Any) -> Any:
            computed = call(*args, **more)
            self.steps[-1].append(what)
            return computed

        setattr(owner, name, noting)

    def lose(self, session: str) -> None:
        """vLLM does not have a session's blocks any more, of which the manager has not heard."""
        pool = self.half.pool
        pool._pool.evict_blocks(set(pool.lookup(self.group, self.hashes(session))))
        for rows in self.blocks._memory._rows:
            rows[:] = 0

    def evict_when_computed(self) -> None:
        """Whoever is idle is evicted in the next step that computes a prompt."""
        half, step = self.half, self.half.step

        def evicting_step(tokens: int, requests: int) -> Any:
            if tokens > 10 * self.block:
                evict(half)
                half.step = step
            metadata = step(tokens, requests)
            if tokens > 10 * self.block:
                self.report["named"] = sum(map(len, metadata.stores))
            return metadata

        half.step = evicting_step

    def blocks_are_right(self, session: str) -> list[bool]:
        """For each block of a session, True if its compressed block is made of what the pool has now."""
        right, exact = [], self.half.manager.blocks.exact[self.rows(session)].tolist()
        for depth, (key, both) in enumerate(self.pool(session).items()):
            keys, values = map(np.ascontiguousarray, np.split(both, 2, axis=3))
            [buf] = self.path.store.read(self.group, [key])
            first = depth * self.block
            wanted = self.blocks.format.encode(keys, values, key=key, first_token=first, exact=exact[depth])
            right.append(buf is not None and np.array_equal(buf, wanted))
        return right


def same_step(job: Any) -> Any:
    """Two sessions have the same prompt; the first is evicted while the second computes it anew."""
    codec = {"name": "k3v3", "sink_tokens": 0, "guard": False}  # blocks that are encoded again are as they were
    idle, table = {"after_s": 3600, "min_tokens": 64}, vllm_engine.Table(1)
    sessions = SameStep(131, job["vllm"], codec=codec, idle=idle, tiers={"max_bytes": "64MiB"})
    sessions.watch(job["loads_first"])
    sessions.look_up(table, 0, "first", [])
    sessions.lose("first")
    sessions.evict_when_computed()
    sessions.look_up(table, 0, "second", [])
    report = sessions.report | {"state": sessions.half.manager.table.by_id["first"].state}
    report["equal"] = sessions.blocks_are_right("first")
    sessions.go_cold()
    sessions.look_up(table, 3, "second", [])
    last = sessions.requests[-1]
    report |= {"restored": last["found"][1], "asked": last["input_tokens"] // sessions.block}
    return report | {"steps": sessions.steps}


# -- an engine that sleeps, and one with tracing on ---------------------------------------------------


def made_up(number: int, tokens: int = 320) -> list[int]:
    """Return a prompt."""
    return [(7 * at + 31 * number) % 190 + 10 for at in range(tokens)]


def nap(job: Any) -> Any:
    """The engine sleeps while a session is encoded. Return what is under way then, and what is restored later."""
    engine = Sessions(100, idle={"after_s": 600, "min_tokens": 64}, codec={"guard": False})
    encode, began = engine.blocks.encode, threading.Event()

    def ask_all() -> list[int]:
        """Return how many blocks of each prompt were restored."""
        for n in range(3):
            engine.ask(made_up(n), f"session-{n}", 8)
        return [request["found"][1] for request in engine.requests[-3:]]

    def later(*args: Any) -> Any:
        began.set()
        time.sleep(0.2)
        return encode(*args)

    ask_all()
    engine.blocks.encode = later
    evict(engine.half, list(engine.half.manager.table.by_id.values())[:1])
    engine.engine.step()
    assert began.wait(60)
    engine.core.sleep(1)
    asleep = {"steps": engine.scheduler.has_requests(), "held": engine.half.driver.holds_blocks}
    engine.core.wake_up()
    return {"restored": ask_all(), **asleep}


def traced(job: Any) -> Any:
    """Alice's session goes cold by the clock while bob's runs, and returns. Return how much is kept of traces."""
    vllm = {"otlp_traces_endpoint": job["endpoint"]}
    engine = SteppedEngine(72, vllm, idle={"after_s": 0.2, "min_tokens": 64}, codec={"guard": False})

    def ask(number: int, session: str, tokens: list[int]) -> None:
        """Ask with the headers of a client's span in a trace of this number."""
        headers = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
        engine.ask(tokens, session, 4, trace_headers=headers)

    ask(1, "alice", made_up(1))
    time.sleep(0.4)
    ask(2, "bob", made_up(2))
    assert engine.half.pool._pool.reset_prefix_cache()
    ask(3, "alice", made_up(1, tokens=360))
    provider: Any = trace.get_tracer_provider()
    provider.force_flush()
    traces = engine.half.telemetry.traces
    return len(traces._headers) + len(traces._begun)


SCENARIOS = {each.__name__: each for each in (growing, latents, same_step, nap, traced)}


if __name__ == "__main__":
    answer(lambda job: SCENARIOS[job["scenario"]](job))
