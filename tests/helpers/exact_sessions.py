"""Sessions of a real engine that go cold and return, and what became of the bits of their blocks.

Run as a script: a job as JSON on standard input, a report as JSON on standard output. See SteppedEngine.
"""

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import vllm_engine
from evicted import evict
from numpy.typing import NDArray
from scripts import answer
from stepped_engine import SteppedEngine
from vllm.distributed.kv_transfer import get_kv_transfer_group

from manthan.codec import wire
from manthan.manager.events import Event, Restored
from manthan.manager.session.blocks import Rows
from manthan.manager.session.table import SessionState
from manthan.vllm_hooks.worker.blocks import PackedMemory

Blocks = dict[bytes, NDArray[Any]]
"""Keys with values of paged blocks, [layers, heads, tokens, 2 * head_dim], or all of their bytes, by block key."""
PATIENCE_S = 300.0


class ExactSessions:
    """Does jobs, and writes down what happens."""

    def __init__(self, engine: SteppedEngine) -> None:
        self.engine, self.half = engine, engine.half
        self.path = get_kv_transfer_group().worker.engine
        [(self.group, self.blocks)] = self.path.blocks.items()
        self.report: dict[str, Any] = {"right": [], "failures": []}
        self.half.manager.events.subscribe(self._note)

    def _note(self, event: Event) -> None:
        if isinstance(event, Restored):
            self.report["failures"] += event.causes

    @cached_property
    def tokenizer(self) -> Any:
        return self.engine.engine.get_tokenizer()

    # -- what can be done -----------------------------------------------------------------------------

    def ask(self, table: vllm_engine.Table, index: int, session: str, after: list[int]) -> list[int]:
        """Ask for an entry at the end of a conversation; returns the conversation with question and answer."""
        prompt, right = table.question(index)
        text = prompt if not after else f"\nassert {list(table.values)[index]} == "
        tokens = after + self.tokenizer.encode(text, add_special_tokens=False)
        answer = self.engine.ask(tokens, session, 4)
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
        manager, until = self.half.manager, time.monotonic() + PATIENCE_S
        evict(self.half)
        while {s.state for s in manager.table.by_id.values()} != {SessionState.COLD} or self.half.has_work:
            assert time.monotonic() < until, "sessions do not go cold"
            self.half._rung = True
            self.engine.engine.step()
            self.engine._wait_for_threads()
        assert self.half.pool._pool.reset_prefix_cache()
        memory = self.blocks._memory
        for rows in memory._rows if isinstance(memory, PackedMemory) else [rows for rows, _, _ in memory._layers]:
            rows[:] = 0

    def stored(self, session: str) -> dict[str, Any]:
        """Return the number of exact tokens and of bytes of each compressed block of a cold session."""
        bufs = list(self.path.store.read(self.group, self.hashes(session)))
        sizes = [None if buf is None else len(buf) for buf in bufs]
        return {"exact": self.half.manager.blocks.exact[self.rows(session)].tolist(), "sizes": sizes}

    def usage(self) -> dict[str, Any]:
        """Return what is saved as the manager counts it, and as the store does if it counts at all."""
        usage, store = self.half.manager.usage(), self.path.store
        counted = {name: getattr(store, name, None) for name in ("used", "peak")}
        return {"cold_bytes": usage.saved_nbytes, "exact_blocks": usage.exact_blocks} | counted

    # -- jobs -----------------------------------------------------------------------------------------

    def grow(self) -> None:
        """One session goes cold and returns, three times, and grows by five blocks or so each time."""
        table = vllm_engine.Table(1)
        rounds = self.report["rounds"] = []
        conversation, before = self.ask(table, 0, "user", []), self.pool("user")
        for turn in range(3):
            self.go_cold()
            cold = self.stored("user") | self.usage()
            more = self.tokenizer.encode("\n" + table.text[:250], add_special_tokens=False)
            conversation = self.ask(table, turn + 1, "user", conversation + more)
            after = self.pool("user")
            rounds.append({"same": same_tokens(before, after), "restored": self.engine.requests[-1]["found"][1]} | cold)
            before = after

    def codecs(self) -> None:
        """In which codecs the blocks of a cold session are, as their headers say, and what the metrics say."""
        self.go_cold()
        bufs = list(self.path.store.read(self.group, self.hashes("user")))
        found = {section.codec for buf in bufs if buf is not None for section in wire.parse(buf).header.sections}
        stats = self.half.telemetry._stats._gauges()
        self.report["codecs"] = sorted(found)
        self.report["gauges"] = {"compression_ratio": stats["compression_ratio"]}

    def damage(self) -> None:
        """A byte of the last block but one of a session changes."""
        table = vllm_engine.Table(2)
        conversation, before = self.ask(table, 0, "unlucky", []), self.pool("unlucky")
        self.go_cold()
        key = list(before)[-2]
        [buf] = self.path.store.read(self.group, [key])
        assert buf is not None
        buf[len(buf) // 2] ^= 1
        assert self.path.store.put_all(self.group, {key: buf}) == {}
        self.ask(table, 1, "unlucky", conversation)
        report = self.report["damage"] = {"blocks": len(before), "restored": [self.engine.requests[-1]["found"][1]]}
        computed = self.pool("unlucky")
        report["same"] = same_tokens(before, computed)
        self.go_cold()
        report |= self.stored("unlucky")
        self.ask(table, 1, "unlucky", conversation)
        report["restored"].append(self.engine.requests[-1]["found"][1])
        after = self.pool("unlucky")
        report |= {"as_computed": same_tokens(computed, after), "as_first": same_tokens(before, after)}

    def profile(self) -> None:
        """What the codec has been told of the model."""
        found = self.blocks.format.facts.profile
        self.report["profile"] = None if found is None else found.digest


def same_tokens(before: Mapping[Any, NDArray[Any]], after: Mapping[Any, NDArray[Any]]) -> list[int]:
    """Places in the chain of the tokens whose numbers are the same in all layers, bit for bit."""
    same: list[int] = []
    for depth, (key, numbers) in enumerate(before.items()):
        tokens = np.all(numbers == after[key], axis=(0, 1, 3))
        same += (depth * len(tokens) + np.flatnonzero(tokens)).tolist()
    return same


def main(job: Any) -> Any:
    vllm_engine.MODEL = job.get("model", vllm_engine.MODEL)
    sessions = ExactSessions(SteppedEngine(job["blocks"], job.get("vllm"), **job["manthan"]))
    for name in job["what"]:
        getattr(sessions, name)()
    return sessions.report


if __name__ == "__main__":
    answer(main)
