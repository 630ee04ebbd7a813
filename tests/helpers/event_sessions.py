"""Random conversations on an engine in this process, and a subscriber to its KV events. Whenever all is quiet, what is
stored by its events is what is saved by the manager's books, and what it would promise is kept.

On standard input: model, blocks, manthan (its options), seed, folder (for sockets), number of actions, resets (whether
there are any). On standard output: what came to pass, and what was stored when the process ended, which is no shutdown
of the engine.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import vllm_engine  # sets the environment
from event_subscriber import Name, Subscriber, block_hashes_of
from integrity import check_integrity, stored
from stepped_engine import SteppedEngine, evict
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

PATIENCE_S = 60.0
LONGEST = 500
LIVES_S = 3600
# A time to live ends when sessions go cold, never between two engines: the next would not find what it has ended.
HINTS: list[dict[str, Any]] = [{}, {}, {}, {"pin": True}, {"pin": False}, {"release": True}, {"ttl_s": LIVES_S}]


class Talk:
    """A conversation: what it is called, its cache salt, all of its tokens, and how many of them were served before."""

    def __init__(self, name: str | None, salt: str | None, tokens: list[int]) -> None:
        self.name, self.salt, self.tokens, self.served = name, salt, tokens, 0


class Router(SteppedEngine):
    """The engine, its subscriber, and conversations."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.chance = random.Random(job["seed"])
        endpoint, replay = (f"ipc://{job['folder']}/{kind}-{job['seed']}" for kind in ("events", "replay"))
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay)
        more = {"max_num_seqs": 4, "skip_tokenizer_init": True, "kv_events_config": events, "seed": 0}
        super().__init__(job["blocks"], more, model=job["model"], idle=1e6, **job["manthan"])
        self.publisher = self.scheduler.kv_event_publisher
        self.is_single = not self.half.groups.at_points
        self._subscribe: Callable[[], Subscriber] = lambda: Subscriber(endpoint, replay, self.half.groups.hash_tokens)
        self.subscriber: Subscriber | None = None
        self.talks: list[Talk] = []
        self.hinted: dict[str, bool] = {}
        """By request, whether hints came with it: those are answered."""
        self.shared = [self.chance.randrange(10, 200) for _ in range(100)]
        self.came = {"asked": 0, "restored": 0, "promised": 0, "checks": 0, "enveloped": 0, "resets": 0, "most": 0}

    # -- what happens -----------------------------------------------------------------------------------

    def act(self) -> None:
        chance = self.chance.random()
        if chance < 0.45:
            self.ask([self.talk()])
        elif chance < 0.6:
            self.ask([self.talk() for _ in range(3)])
        elif chance < 0.65:
            self.abort(self.talk())
        elif chance < 0.85:
            self.let_go_cold()
        elif chance < 0.93:
            self.ask([Talk(None, f"salt-{self.came['asked']}", self.words(LONGEST))])  # it takes others' blocks
        elif self.subscriber is not None:
            self.subscriber.lose()
            self.let_go_cold()
            self.ask([self.talk()])
            self.subscriber.connect()
            self.let_go_cold()

    def words(self, most: int) -> list[int]:
        return [self.chance.randrange(10, 200) for _ in range(self.chance.randrange(20, most))]

    def talk(self) -> Talk:
        """A new conversation, one that goes on, or one that goes on from its middle."""
        if len(self.talks) < 4 or self.chance.random() < 0.3:
            name = self.chance.choice([None, "a", "b", f"user-{len(self.talks)}"])
            salt = self.chance.choice([None, None, None, "salt"])
            self.talks.append(Talk(name, salt, list(self.shared) if self.chance.random() < 0.5 else []))
            self.talks = self.talks[-14:]
        talk = self.chance.choice(self.talks)
        if len(talk.tokens) > LONGEST or self.chance.random() < 0.1:
            del talk.tokens[self.chance.randrange(len(talk.tokens) + 1) :]
            talk.served = min(talk.served, len(talk.tokens))
        talk.tokens += self.words(150)
        return talk

    def ask(self, talks: list[Talk]) -> None:
        promised = {}
        for talk in dict.fromkeys(talks):
            request_id = self.add(talk)
            promised[request_id] = (self.promised(talk) if len(talks) == 1 else 0), talk
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    blocks, talk = promised[output.request_id]
                    talk.tokens += output.outputs[0].token_ids
                    talk.served = len(talk.tokens)
                    found = output.num_cached_tokens // vllm_engine.BLOCK
                    assert found >= blocks, f"events have promised {blocks} blocks, and {found} were there"
                    said = (output.kv_transfer_params or {}).get("manthan")
                    # Without hints only those are told of it that were served decoded KV.
                    assert said if self.hinted.pop(output.request_id) else not said or said["lossy_tokens"]
                    self.came["promised"] += blocks
                    self.came["restored"] += output.num_cached_tokens > 0
        self.settle()

    def add(self, talk: Talk) -> str:
        hints, is_enveloped = self.chance.choice(HINTS), self.chance.random() < 0.5
        params = SamplingParams(
            temperature=0,
            max_tokens=self.chance.randrange(1, 24),
            ignore_eos=True,
            detokenize=False,
            extra_args=None if is_enveloped else {"kv_transfer_params": {"manthan": hints}},
        )
        request_id = f"request-{self.came['asked']}"
        self.came["asked"] += 1
        prompt = {"prompt_token_ids": list(talk.tokens)} | ({"cache_salt": talk.salt} if talk.salt else {})
        said = KvHintsEnvelope("0.1", request_id, [KvHintAction("1", "manthan.hints", "1.0", hints)])
        self.engine.add_request(
            request_id, prompt, params, session_id=talk.name, kv_hints=said if is_enveloped else None
        )
        self.hinted[request_id] = bool(hints)
        self.came["enveloped"] += bool(is_enveloped and hints)
        return request_id

    def promised(self, talk: Talk) -> int:
        """How many blocks of a prompt a router would say are here, in the pool or cold: of a named session's own, since
        others are not served decoded KV. What several begin with may be there for others only."""
        if self.subscriber is None or self.subscriber.is_deaf or not self.is_single or talk.name is None:
            return 0
        group, here = self.half.groups.main.index, 0
        for key in map(
            maybe_convert_block_hash,
            block_hashes_of(talk.tokens[: min(talk.served, len(talk.tokens) - 1)], vllm_engine.BLOCK, talk.salt),
        ):
            if (group, key) not in self.subscriber.pool and (group, key) not in self.subscriber.cold:
                break
            here += 1
        return here if here > len(self.shared) // vllm_engine.BLOCK else 0

    def abort(self, talk: Talk) -> None:
        request_id = self.add(talk)
        for _ in range(self.chance.randrange(4)):
            self.engine.step()
        self.engine.abort_request([request_id])
        self.settle()

    def let_go_cold(self) -> None:
        """Have two sessions go cold, or all, and end times to live."""
        sessions = list(self.half.manager.table.by_id.values())
        if self.chance.random() < 0.5:
            evict(self.half, self.chance.sample(sessions, min(2, len(sessions))))
        else:
            evict(self.half)
            self.settle()
            self.half.manager.said.expire(time.monotonic() + LIVES_S)
            self.half.steered()
        self.settle()

    def reset(self) -> None:
        assert self.engine.reset_prefix_cache(reset_connector=self.chance.random() < 0.5)
        self.came["resets"] += 1
        self.settle()

    def settle(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.engine.has_unfinished_requests() or self.half.has_work():
            assert time.monotonic() < until, "it does not come to rest"
            self.engine.step()
            time.sleep(0.001)

    # -- what holds -------------------------------------------------------------------------------------

    def check(self) -> None:
        """All is quiet: events and books agree, as soon as the last event has come, be it of the pool."""
        if self.subscriber is None:
            self.subscriber = self._subscribe()
        heard, until = self.subscriber, time.monotonic() + PATIENCE_S
        self.publisher._event_queue.join()
        while heard.hear() < self.published or heard.cold.keys() != self.stored():
            found = self.stored()
            missing, more = len(found - heard.cold.keys()), len(heard.cold.keys() - found)
            assert time.monotonic() < until, f"of {len(found)} blocks {missing} were not told, and {more} more were"
            time.sleep(0.01)
            heard.catch_up()  # the last batch may be among those that were lost
            self.settle()
        check_integrity(self.half.manager)
        found = self.stored()
        assert heard.after_clearing == found
        self.came["checks"] += 1
        self.came["most"] = max(self.came["most"], len(found))

    @property
    def published(self) -> int:
        """How many batches of events."""
        sent = self.publisher._buffer
        return sent[-1][0] + 1 if sent else 0

    def stored(self) -> set[Name]:
        """By the manager's books."""
        return {(group, maybe_convert_block_hash(key)) for group, key in stored(self.half.manager)}


def main() -> None:
    job = json.load(sys.stdin)
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    router = Router(job)
    router.settle()
    first = {key.hex() for _, key in stored(router.half.manager)}
    for action in range(job["actions"]):
        router.act()
        if job["resets"] and router.chance.random() < 0.03:
            router.reset()
        if action > 2:
            router.check()
    assert router.subscriber is not None
    with report:
        last = {key.hex() for _, key in stored(router.half.manager)}
        told = {"came": router.came | router.subscriber.seen, "first": sorted(first), "last": sorted(last)}
        json.dump(told, report)
    if router.half._journal is not None:
        router.half._journal.close()
    os._exit(0)


if __name__ == "__main__":
    main()
