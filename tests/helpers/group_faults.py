"""Conversations on an engine of its own, to which something happens between two turns. Told on standard output as JSON:
of each fault its turns, prompts with the tokens of the answers, and what became of restores.

On standard input: as for `group_sessions`; prompts is null, or a list of prompts that are only answered, each with how
many tokens: with what the pool has of them, and anew. Those of which tokens are given besides, and the prompt of a turn
before, are also answered as vLLM does it that was interrupted behind these tokens: they are computed with the prompt,
from where the turn before had ended.
"""

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from group_sessions import engine
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import get_group_id

from manthan.manager.observer import Restored
from manthan.manager.sessions.session import Session, SessionState

FIRST, MORE, ANSWER = 700, 60, 24
PATIENCE_S = 300.0


class Conversations:
    """An engine in this process, stepped by hand; requests one after the other."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.engine: Any = engine(job).llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.chance, self.count = random.Random(0), 0
        self.preempted_at: dict[str, int] = {}
        """By request, how many tokens it had been answered with."""
        preempt = self.scheduler._preempt_request

        def noting(request: Any, *args: Any, **more: Any) -> None:
            self.preempted_at[request.request_id.rpartition("-")[0]] = request.num_output_tokens
            preempt(request, *args, **more)

        self.scheduler._preempt_request = noting

    def begin(self, prompt: list[int], session: str | None = None, tokens: int = ANSWER) -> str:
        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        name = f"request-{self.count}"
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params, session_id=session)
        return name

    def answers(self) -> dict[str, Any]:
        """What those that run end with."""
        found = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                found[output.request_id] = output
        return found

    def ask(self, prompt: list[int], session: str | None = None) -> dict[str, Any]:
        name = self.begin(prompt, session)
        return told(prompt, self.answers()[name])

    def answer(self, prompt: list[int], tokens: int, is_hot: bool = True) -> list[int]:
        """With what is in the prefix cache, or without."""
        assert is_hot or self.engine.reset_prefix_cache(reset_connector=True)
        name = self.begin(prompt, tokens=tokens)
        return list(self.answers()[name].outputs[0].token_ids)

    def resume(self, prompt: list[int], tokens: int, had: list[int], before: list[int]) -> list[int]:
        """After a preemption behind the tokens that it had."""
        self.answer(before, ANSWER, is_hot=False)
        return [*had, *self.answer([*prompt, *had], tokens - len(had))]

    def some(self, count: int) -> list[int]:
        return [self.chance.randrange(10, 1000) for _ in range(count)]


def told(prompt: list[int], output: Any) -> dict[str, Any]:
    return {"prompt": prompt, "tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}


class Faults(Conversations):
    """A new conversation for each fault, which is named as its method."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.half = self.scheduler.connector.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.path = get_kv_transfer_group().worker.path
        self.restores: list[Restored] = []
        restored = self.half.telemetry.restored

        def noting(what: Restored) -> None:
            self.restores.append(what)
            restored(what)

        self.half.telemetry.restored = noting

    def run(self, fault: str) -> dict[str, Any]:
        self.restores.clear()
        turns: list[dict[str, Any]] = []
        getattr(self, fault)(fault, turns)
        self.go_cold()
        usage, gauges = self.half.manager.usage, self.half.telemetry._stats._gauges()
        return {
            "turns": turns,
            "causes": [cause for what in self.restores for cause in what.causes],
            "restored": [[what.good, what.blocks, what.beside] for what in self.restores],
            "free": self.pool.get_num_free_blocks() == self.half.pool.usable_blocks,
            "cold_bytes": gauges["cold_bytes"][""],
            "anchors": gauges["anchors"][""],
            "sessions": usage.sessions[SessionState.COLD],
            "stored": self.path.store.used,
            "ratio": gauges["compression_ratio"][""],
        }

    # -- what happens ---------------------------------------------------------------------------------

    def unreadable(self, session: str, turns: list[dict[str, Any]]) -> None:
        """The store fails when a block beside the chain is read."""
        self.between_turns(session, turns, self.failing_reads)

    def missing(self, session: str, turns: list[dict[str, Any]]) -> None:
        """It has lost them."""

        @contextmanager
        def without() -> Iterator[None]:
            for group, key in self.beside(session):
                self.path.store.drop(group, [key])
            yield

        self.between_turns(session, turns, without)

    def corrupted(self, session: str, turns: list[dict[str, Any]]) -> None:
        """A byte of each has changed."""

        @contextmanager
        def changed() -> Iterator[None]:
            for group, key in self.beside(session):
                [buf] = self.path.store.read(group, [key])
                buf[len(buf) // 2] ^= 1
                assert self.path.store.put_all(group, {key: buf}) == {}
            yield

        self.between_turns(session, turns, changed)

    def aborted(self, session: str, turns: list[dict[str, Any]]) -> None:
        """A request goes away while it is restored; then it is asked again."""
        prompt = self.turn(session, turns, self.some(FIRST))
        self.go_cold()
        gate, at_gate, store = threading.Event(), threading.Event(), self.path.store

        def read(group: int, keys: Any, tenant: str = "", into: Any = None) -> Any:
            at_gate.set()
            assert gate.wait(PATIENCE_S)
            return type(store).read(store, group, keys)

        store.read = read
        name = self.begin(prompt, session)
        self.step_until(at_gate.is_set)
        self.engine.abort_request([name])
        gate.set()
        del store.read
        self.step_until(lambda: len(self.restores) == 1)
        self.go_cold()
        self.turn(session, turns, prompt)

    def windows_lost(self, session: str, turns: list[dict[str, Any]]) -> None:
        """The pool has the chain, which was restored and has grown, but nothing beside it any more."""
        prompt = self.turn(session, turns, self.some(FIRST))
        self.go_cold()
        prompt = self.turn(session, turns, prompt)
        self.lose_windows()
        self.turn(session, turns, prompt)

    def preempted(self, session: str, turns: list[dict[str, Any]]) -> None:
        """Two restored sessions are answered when there is no block left; what stands beside their chains is lost."""
        prompts = [self.turn(f"{session}-{n}", turns, self.some(FIRST)) for n in range(2)]
        self.go_cold()
        names = [self.begin(prompt, f"{session}-{n}", 6 * ANSWER) for n, prompt in enumerate(prompts)]
        self.step_until(lambda: len(self.scheduler.running) == len(names))
        before, taken = len(self.preempted_at), self.pool.get_new_blocks(self.pool.get_num_free_blocks())
        self.step_until(lambda: len(self.preempted_at) > before)
        self.lose_windows()
        self.pool.free_blocks(taken)
        found = self.answers()
        for name, prompt, before in zip(names, prompts, turns[:2], strict=True):
            turns.append(told(prompt, found[name]))
            if name in self.preempted_at:
                turns[-1]["interrupted"] = turns[-1]["tokens"][: self.preempted_at[name]], before["prompt"]

    # -- parts of it ----------------------------------------------------------------------------------

    def between_turns(self, session: str, turns: list[dict[str, Any]], happens: Callable[[], Any]) -> None:
        """Something happens while the session is cold; once it has gone cold again, it is well."""
        prompt = self.turn(session, turns, self.some(FIRST))
        self.go_cold()
        with happens():
            prompt = self.turn(session, turns, prompt)
        self.go_cold()
        self.turn(session, turns, prompt)

    def turn(self, session: str, turns: list[dict[str, Any]], prompt: list[int]) -> list[int]:
        """Ask; returns the next turn's prompt."""
        turns.append(self.ask(prompt, session))
        return [*prompt, *turns[-1]["tokens"], *self.some(MORE)]

    @contextmanager
    def failing_reads(self) -> Iterator[None]:
        store, chain = self.path.store, self.half.groups.chain.index

        def read(group: int, keys: Any, tenant: str = "", into: Any = None) -> Any:
            if group != chain:
                raise OSError("the store is on fire")
            return type(store).read(store, group, keys)

        store.read = read
        yield
        del store.read

    def beside(self, session: str) -> list[tuple[int, bytes]]:
        """The last block that each of the session's anchors is made of."""
        found: Session = self.half.manager.table.by_id[session]
        last = (anchor.parts[-1] for anchor in found.anchors)
        return [(part.group, part.key) for part in last if part.group is not None]

    def lose_windows(self) -> None:
        """What the pool has beside the chains is not to be found there any more."""
        chain = self.half.groups.chain.index
        named = [block for block in self.pool.blocks if block.block_hash is not None]
        self.pool.evict_blocks({block.block_id for block in named if get_group_id(block.block_hash) != chain})

    def go_cold(self) -> None:
        manager = self.half.manager
        manager.sweep(time.monotonic() + manager.idle_after_s)
        self.step_until(
            lambda: {s.state for s in manager.table.by_id.values()} <= {SessionState.COLD} and not self.half.has_work
        )

    def step_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until
            self.half._rung = True
            self.engine.step()
            time.sleep(0.005)


FAULTS = ("unreadable", "missing", "corrupted", "aborted", "windows_lost", "preempted")


def main() -> None:
    job = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    found: Any
    if job["prompts"] is None:
        faults = Faults(job)
        found = {fault: faults.run(fault) for fault in FAULTS}
    else:
        plain = Conversations(job)
        found = [[plain.answer(prompt, tokens)] for prompt, tokens, *_ in job["prompts"]]
        for answers, (prompt, tokens, *interrupted) in zip(found, job["prompts"], strict=True):
            answers.append(plain.answer(prompt, tokens, is_hot=False))
            if interrupted:
                answers.append(plain.resume(prompt, tokens, *interrupted))
    with report:
        json.dump(found, report)


if __name__ == "__main__":
    main()
