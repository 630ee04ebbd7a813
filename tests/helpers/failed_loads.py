"""A real engine in this process whose loads fail, in part or as a whole: where its requests begin to compute.

Run as a script: a job as JSON on standard input, a report as JSON on standard output. All blocks are saved as they
are, so that each block of the prefix cache can be compared with the one that was computed first. The pool is full of
GARBAGE before a load, and so is each block whose load fails.
"""

import threading
import time
from collections import deque
from typing import Any

import numpy as np
import torch
import vllm_engine
from scripts import answer
from stepped_engine import ASYNC, SteppedEngine, evict
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import get_block_hash

GARBAGE = 50.0
TOLERANCE = 0.05
"""Difference of a block that was computed again, with other tokens next to it in a step, from what it was."""
ALL = 100_000
"""More first tokens than any session has."""
PATIENCE_S = 60
SHORT, LONG = 40, 32
"""Tokens of the prompts and answers of requests that run meanwhile."""

Asked = dict[str, list[int]]
"""Prompts by the names of their sessions."""


def name_of(request_id: str) -> str:
    return request_id.rpartition("-")[0]


class FailedLoads(SteppedEngine):
    """Requests are named as their sessions.

    hurt: positions of blocks whose load fails, by the name of the request. right: the first keys and values of each
    block, by its hash. began: number of blocks of which each request of `serve` computed nothing. computed: number of
    tokens that each was scheduled to compute. wrong: hashes of blocks in the prefix cache that were not right after a
    step.
    """

    def __init__(self, is_async: bool) -> None:
        more: dict[str, Any] = {"dtype": "float32", "scheduler_cls": ASYNC if is_async else None}
        codec = {"name": "k3v3", "sink_tokens": ALL, "guard": False}
        super().__init__(
            200, more, idle={"after_s": 3600, "min_tokens": 64}, codec=codec, tiers={"max_bytes": "256MiB"}
        )
        if is_async:  # vLLM's CPU platform does not offer it
            self.core.batch_queue_size, self.core.batch_queue = 2, deque(maxlen=2)
            self.core.step_fn = self.core.step_with_batch_queue
        self.path: Any = self.worker.engine
        [(self.group, self.blocks)] = self.path.blocks.items()
        self.rows = [rows.view(torch.uint16).numpy() for rows in self.blocks._memory._rows]
        self.hurt: dict[str, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.right: dict[bytes, Any] = {}
        self.began: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.wrong: set[str] = set()
        self.told: dict[str, Any] = {}
        self._watch_scheduler()
        self._damage_loads()

    def _watch_scheduler(self) -> None:
        schedule = self.scheduler.schedule

        def noting(*args: Any) -> Any:
            output = schedule(*args)
            for new in output.scheduled_new_reqs:
                self.began[name_of(new.req_id)] = new.num_computed_tokens // vllm_engine.BLOCK
            for request_id, tokens in output.num_scheduled_tokens.items():
                name = name_of(request_id)
                self.computed[name] = self.computed.get(name, 0) + tokens
            return output

        self.scheduler.schedule = noting

    def _damage_loads(self) -> None:
        read, decode = self.path._read, self.blocks.decode
        loads: dict[int, Any] = {}

        def of_job(job: Any, *args: Any) -> None:
            loads[threading.get_ident()] = job
            self.gate.wait()
            read(job, *args)

        def damaged(key: bytes, block_id: int, found: Any) -> str | None:
            job = loads[threading.get_ident()]
            if self.hurt.get(name_of(job.request_id or "")) != job.block_ids.tolist().index(block_id):
                return decode(key, block_id, found)
            self._spoil(block_id)
            return "corrupt"

        self.path._read, self.blocks.decode = of_job, damaged

    def _spoil(self, block_ids: Any) -> None:
        for rows in self.rows:
            rows[block_ids] = GARBAGE

    # -- requests -------------------------------------------------------------------------------------

    def question(self, seed: int, head: int | None = None) -> list[int]:
        """A prompt that ends with a question. head: seed of a table in front of the one that is asked for."""
        front = "" if head is None else vllm_engine.Table(head).text
        prompt, _ = vllm_engine.Table(seed, front).question(0)
        return list(self.engine.get_tokenizer().encode(prompt))

    def add(self, asked: Asked, tokens: int = 4) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for name, prompt in asked.items():
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params, session_id=name)

    def step(self) -> None:
        for output in self.engine.step():
            self.told[output.request_id] = output.outputs[0]
        if self.gate.is_set():
            self._wait_for_threads()
        for block in self.half.pool._pool.blocks:
            if block.block_hash is None or (right := self.right.get(get_block_hash(block.block_hash))) is None:
                continue
            if not np.allclose(self._numbers(block.block_id), right, atol=TOLERANCE):
                self.wrong.add(get_block_hash(block.block_hash).hex())

    def serve(self, asked: Asked) -> None:
        """Serve these requests and those that were added before."""
        self.began, self.computed, self.told = {}, {}, {}
        self.add(asked)
        self.finish()

    def finish(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.engine.has_unfinished_requests() or self.half.has_work() or self.core.batch_queue:
            assert time.monotonic() < until, "a request hangs"
            self.step()

    def answers(self) -> dict[str, list[int]]:
        assert all(told.finish_reason == "length" for told in self.told.values())
        return {name: list(told.token_ids) for name, told in self.told.items()}

    def _numbers(self, block_id: int) -> Any:
        return np.concatenate(self.blocks._memory.gather(block_id), axis=3)

    def learn(self, asked: Asked) -> dict[str, list[int]]:
        """Compute sessions for the first time, and have them saved and not resident; the answers."""
        self.serve(asked)
        for block in self.half.pool._pool.blocks:
            if block.block_hash is not None:
                self.right.setdefault(get_block_hash(block.block_hash), self._numbers(block.block_id))
        answers = self.answers()
        evict(self.half)
        self.finish()
        assert self.half.pool._pool.reset_prefix_cache()
        self._spoil(slice(None))
        self.hurt.clear()
        return answers

    def come_back(self, asked: Asked, before: dict[str, list[int]]) -> dict[str, Any]:
        """Serve the same again, after `learn`; where each began, and whether all answers are the same."""
        self.serve(asked)
        return self.told_of(before, asked)

    def told_of(self, before: dict[str, list[int]], asked: Asked) -> dict[str, Any]:
        answers = self.answers()
        full = {name: (len(prompt) - 1) // vllm_engine.BLOCK for name, prompt in asked.items()}
        once = {name: tokens for name, tokens in self.computed.items() if name in asked}
        wanted = {
            name: len(prompt) - self.began[name] * vllm_engine.BLOCK + len(answers[name]) - 1
            for name, prompt in asked.items()
        }
        left = {
            "loads": len(self.half.driver._loading) + len(self.path._open) + len(self.path._bad),
            "requests": len(self.half._requests) + len(self.scheduler.requests),
            "referenced": sum(block.ref_cnt > 0 and not block.is_null for block in self.half.pool._pool.blocks),
        }
        return {
            "began": {name: self.began[name] for name in asked},
            "full": full,
            "same": all(answers[name] == before[name] for name in asked),
            "computed_once": once == wanted,
            "wrong": len(self.wrong),
            "is_broken": self.scheduler.connector._is_broken,
            "left": left,
        }

    # -- scenarios ------------------------------------------------------------------------------------

    def some(self) -> list[dict[str, Any]]:
        """One block of a session's cannot be loaded: the first, one amid the others, and the last."""
        found = []
        for seed, at in enumerate((0, 5, -1), 10):
            asked = {f"some{at}": self.question(seed)}
            before = self.learn(asked)
            [prompt] = asked.values()
            self.hurt[f"some{at}"] = at % ((len(prompt) - 1) // vllm_engine.BLOCK)
            found.append(self.come_back(asked, before))
        return found

    def shared(self) -> dict[str, Any]:
        """Two sessions have the same head and come back at once; a block of the head fails for one of them. Then the
        first comes back again, and another session has the same head."""
        asked = {"one": self.question(21, head=20), "two": self.question(22, head=20)}
        before = self.learn(asked)
        self.hurt["one"] = 3
        report = {"at_once": self.come_back(asked, before)}
        third = {"three": self.question(23, head=20)}
        self.serve(third)
        report["third"] = self.told_of(self.answers(), third)
        report["again"] = self.come_back(asked, before)
        return report

    def beside(self) -> dict[str, Any]:
        """Two requests run while one load fails and another does not."""
        running = {name: self.question(seed)[:SHORT] for seed, name in ((30, "run0"), (31, "run1"))}
        self.add(running, LONG)
        before = self.learn({})
        asked = {"fails": self.question(32), "loads": self.question(33)}
        before |= self.learn(asked)
        self.began, self.computed, self.told = {}, {}, {}
        self.add(running, LONG)
        for _ in range(4):
            self.step()
        self.hurt["fails"] = 7
        self.add(asked)
        self.finish()
        return self.told_of(before, running | asked)

    def aborted(self) -> dict[str, Any]:
        """A request is aborted while its load is under way, which then fails. Another request runs, and takes the
        blocks that are free again. Then the session comes back."""
        running = {"runs": self.question(40)[:SHORT]}
        self.add(running, LONG)
        before = self.learn({})
        asked = {"gone": self.question(41)}
        before |= self.learn(asked)
        self.began, self.computed, self.told = {}, {}, {}
        self.add(running, LONG)
        self.gate.clear()
        self.hurt["gone"] = 2
        self.add(asked)
        for _ in range(4):
            self.step()
        self.engine.abort_request(["gone"])
        self.step()
        self.gate.set()
        self.finish()
        self.told.pop("gone", None)
        report = {"meanwhile": self.told_of(before, running)}
        self.hurt.clear()
        report["again"] = self.come_back(asked, before)
        return report

    def preempted(self) -> dict[str, Any]:
        """All running and waiting requests lose their blocks while one is loaded; the load then fails."""
        asked = {"back": self.question(50)}
        before = self.learn(asked)
        self.gate.clear()
        self.hurt["back"] = 2
        self.began, self.computed, self.told = {}, {}, {}
        self.add(asked)
        for _ in range(3):
            self.step()

        def soon() -> None:
            time.sleep(0.2)
            self.hurt.clear()
            self.gate.set()

        opener = threading.Thread(target=soon)
        opener.start()
        assert self.engine.reset_prefix_cache(reset_running_requests=True)
        opener.join()
        self.finish()
        return self.told_of(before, asked)


def main(job: Any) -> Any:
    engine = FailedLoads(job["is_async"])
    return {name: getattr(engine, name)() for name in job["what"]}


if __name__ == "__main__":
    answer(main)
