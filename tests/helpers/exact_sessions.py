"""Sessions of a real engine that go cold and return, and what became of the bits of their blocks.

Run as a script: a job as JSON on standard input, a report as JSON on standard output. See SteppedEngine.
"""

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import vllm_engine
from numpy.typing import NDArray
from scripts import answer
from stepped_engine import SteppedEngine
from vllm.distributed.kv_transfer import get_kv_transfer_group

from manthan.codec import wire
from manthan.manager.observer import Restored
from manthan.manager.sessions.session import Session, SessionState
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
        restored = self.half.telemetry.restored

        def noting(what: Restored) -> None:
            self.report["failures"] += what.causes
            restored(what)

        self.half.telemetry.restored = noting

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

    def session(self, name: str) -> Session:
        found: Session = self.half.manager.table.by_id[name]
        return found

    def pool(self, session: str) -> Blocks:
        """The numbers of a hot session's blocks, in order."""
        found = {block.key: self.half.pool.get(block.key) for block in self.session(session).chain}
        memory = self.blocks._memory
        return {key: np.concatenate(memory.gather(at.block_id), axis=3) for key, at in found.items() if at}

    def go_cold(self) -> None:
        """Everything is evicted, and nothing of it is left in the pool."""
        manager = self.half.manager
        manager.sweep(time.monotonic() + manager.idle_after_s)
        until = time.monotonic() + PATIENCE_S
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
        """How many tokens of each block of a cold session are exact, and how many bytes its codes have."""
        chain = self.session(session).chain
        codes = list(self.path.store.read(self.group, [block.key for block in chain]))
        sizes = [None if buf is None else len(buf) for buf in codes]
        return {"exact": [block.encoding.exact for block in chain], "sizes": sizes}

    def usage(self) -> dict[str, Any]:
        """What is cold as the manager counts it, and as the store does if it counts at all."""
        usage, store = self.half.manager.usage, self.path.store
        counted = {name: getattr(store, name, None) for name in ("used", "peak")}
        return {"cold_bytes": usage.cold_nbytes, "exact_blocks": usage.exact_blocks} | counted

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
        bufs = list(self.path.store.read(self.group, [block.key for block in self.session("user").chain]))
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
