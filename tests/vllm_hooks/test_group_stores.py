"""Models with several KV cache groups and cold stores that outlive the engine, and prefetch: sessions return as if they
had stayed hot, and what cannot be read is recomputed."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import group_models
import pytest
from draft_model import proposed
from redis_server import RedisServer, running
from vllm_engine import BLOCK, Completion, Engine

pytestmark = pytest.mark.slow
ALL = 100_000
"""More first tokens than any session has: all are kept exact."""
FIRST, MORE, ANSWER = 420, 60, 40
FILLERS = 3


class Sizes(NamedTuple):
    """Tokens of a block, which vLLM makes as large as a state; blocks of an anchor; blocks of the pool; and tokens of a
    session that takes nearly all of the pool."""

    tokens: int
    anchor: int
    pool: int
    filler: int


SIZES = {"gpt-oss": Sizes(BLOCK, 4, 140, 1900), "qwen3-next": Sizes(160, 3, 24, 2000)}
PATIENT = {"idle_after_s": 3600.0, "blocks": 400}
"""Nothing goes cold, and nothing is overwritten."""


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from running(tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The model of a family, made once."""
    made: dict[str, str] = {}

    def of(family: str) -> str:
        if family not in made:
            made[family] = group_models.made(family, tmp_path_factory.mktemp("model"))
        return made[family]

    return of


@contextmanager
def engine(model: str, family: str, redis_server: RedisServer, kind: str = "host", **options: Any) -> Iterator[Engine]:
    """Sessions go cold after a second."""
    options = {"blocks": SIZES[family].pool, "idle_after_s": 1.0} | options
    flags = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 2048, "seed": 0}
    made = Engine(
        model=model,
        flags=flags | options.pop("flags", {}),
        codec={"name": "k3v3", "sink_tokens": ALL, "guard": False},
        cold_store={"kind": kind.split()[-1], "max_bytes": "256MiB", "host_bytes": "64MiB" if " " in kind else 0},
        redis={"url": redis_server.url},
        **options,
    )
    try:
        yield made
    finally:
        made.stop()


class Turn(NamedTuple):
    prompt: list[int]
    told: Completion


class Conversation:
    """Of random tokens, and what a model of the family says to them."""

    def __init__(self, name: str, family: str, seed: int) -> None:
        self.name, self.turns, self._sizes = name, list[Turn](), SIZES[family]
        self._chance = random.Random(seed)

    def ask(self, engine: Engine) -> Completion:
        """The next turn."""
        more = [self._chance.randrange(10, 1000) for _ in range(MORE if self.turns else FIRST)]
        before = [*self.turns[-1].prompt, *self.turns[-1].told.tokens] if self.turns else []
        told = say(engine, [*before, *more], self.name)
        self.turns.append(Turn([*before, *more], told))
        return told

    @property
    def kept(self) -> int:
        """Tokens in full blocks whose KV is computed when the last turn has ended."""
        return self.chain * self._sizes.tokens

    @property
    def chain(self) -> int:
        """So many blocks."""
        prompt, told = self.turns[-1]
        return (len(prompt) + len(told.tokens) - 1) // self._sizes.tokens


def say(engine: Engine, prompt: list[int], name: str) -> Completion:
    return engine.run(engine.complete(prompt, name, ANSWER))


def prefetch(engine: Engine, name: str) -> None:
    """Another session's request says that this one is about to be used: then it is being loaded."""
    engine.run(engine.complete([7] * 20, "who asks", 1, {"prefetch": [name]}))


def fill(engine: Engine, family: str) -> None:
    """Beside one that is cold, other sessions take every block of the pool; each goes cold before it is overwritten."""
    chance = random.Random(4)
    for number in range(FILLERS):
        prompt = [chance.randrange(10, 1000) for _ in range(SIZES[family].filler)]
        engine.run(engine.complete(prompt, f"filler {number}", 1))
        engine.wait_until_cold(2 + number)


def assert_as_if_hot(conversation: Conversation, hot: Engine) -> None:
    """Tokens, logprobs, and what was not computed are those of an engine from which nothing was evicted."""
    assert [say(hot, turn.prompt, conversation.name) for turn in conversation.turns] == [
        turn.told for turn in conversation.turns
    ]
    assert len({tuple(turn.told.tokens) for turn in conversation.turns}) == len(conversation.turns)
    assert hot.metric("manthan_evictions_total") == 0


def total(engine: Engine, name: str) -> float:
    return engine.metric(f"manthan_{name}_total")


WAYS = [("qwen3-next", "host redis"), ("qwen3-next", "redis"), ("gpt-oss", "redis"), ("gpt-oss", "host redis")]


@pytest.mark.parametrize(("family", "kind"), WAYS)
def test_a_session_outlives_its_engine(
    family: str, kind: str, models: Callable[[str], str], redis_server: RedisServer
) -> None:
    """It returns to the engine that it left, after a kill to another, and then when it is expected there."""
    redis_server.client.flushall()
    model, alice = models(family), Conversation("alice", family, 1)
    with engine(model, family, redis_server, kind) as one:
        alice.ask(one)
        one.wait_until_cold(1)
        kept = alice.kept
        assert alice.ask(one).cached_tokens == kept
        one.wait_until_cold(1)
        assert total(one, "restores") == 1
        assert one.failures() == 0
        kept = alice.kept
        one.kill()
    with engine(model, family, redis_server, kind) as two:
        assert alice.ask(two).cached_tokens == kept
        two.wait_until_cold(1)
        fill(two, family)
        loaded, kept = alice.chain + SIZES[family].anchor, alice.kept
        prefetch(two, "alice")
        assert alice.ask(two).cached_tokens == kept
        two.wait(lambda: total(two, "prefetch_hits") == 1, "a prefetch that was of use")
        assert (total(two, "prefetches"), total(two, "restores")) == (1, 1)
        assert total(two, "prefetched_blocks") == loaded
        assert two.failures() == 0
    with engine(model, family, redis_server, **PATIENT) as hot:
        assert_as_if_hot(alice, hot)


@pytest.mark.parametrize("kind", ["gpt-oss eagle", "qwen3-next mtp"])
def test_with_a_draft_too(kind: str, tmp_path: Path, redis_server: RedisServer) -> None:
    """But beside windows it is not prefetched, since vLLM would not find it."""
    redis_server.client.flushall()
    model, flags = proposed(kind, tmp_path)
    family, _ = kind.split()
    alice, is_prefetched = Conversation("alice", family, 1), family == "qwen3-next"
    with engine(model, family, redis_server, "redis", flags=flags) as one:
        for _ in range(2):
            alice.ask(one)
            one.wait_until_cold(1)
        assert total(one, "restores") == 1
        assert one.failures() == 0
        one.kill()
    with engine(model, family, redis_server, "redis", flags=flags) as two:
        alice.ask(two)
        two.wait_until_cold(1)
        fill(two, family)
        prefetch(two, "alice")
        alice.ask(two)
        two.wait(lambda: total(two, "prefetch_hits") + total(two, "restores") == 2, "a return")
        assert (total(two, "prefetch_hits"), total(two, "prefetches")) == (is_prefetched, is_prefetched)
        assert two.failures() == 0
    assert all(turn.told.cached_tokens > 0 for turn in alice.turns[1:])
    with engine(model, family, redis_server, flags=flags, **PATIENT) as hot:
        assert_as_if_hot(alice, hot)


# -- what cannot be read ------------------------------------------------------------------------------


def harm(redis_server: RedisServer, what: str) -> None:
    """To each block of an anchor: of another group than that with most blocks."""
    raw = redis_server.binary_client
    names = list(raw.scan_iter("*:block:*"))
    groups = Counter(name.split(b":")[-2] for name in names)
    main = groups.most_common(1)[0][0]
    for name in names:
        if name.split(b":")[-2] != main:
            value = raw.get(name)
            middle = len(value) // 2
            if what == "missing":
                raw.delete(name)
            else:
                raw.set(name, value[:middle] + bytes([value[middle] ^ 4]) + value[middle + 1 :], keepttl=True)


@pytest.mark.parametrize("family", SIZES)
def test_what_cannot_be_read_is_recomputed(
    family: str, models: Callable[[str], str], redis_server: RedisServer
) -> None:
    redis_server.client.flushall()
    model, alice, bob = models(family), Conversation("alice", family, 2), Conversation("bob", family, 3)

    def failures(cause: str) -> float:
        return one.metric("manthan_failures_total", cause=cause)

    with engine(model, family, redis_server, "redis") as one:
        alice.ask(one)
        for cause in ("missing", "checksum"):
            one.wait_until_cold(1)
            harm(redis_server, cause)
            assert alice.ask(one).cached_tokens == 0
            assert failures(cause) > 0
        one.wait_until_cold(1)
        fill(one, family)
        before = failures("checksum")
        harm(redis_server, "checksum")
        prefetch(one, "alice")
        one.wait(lambda: failures("checksum") > before, "a prefetch that fails")
        assert alice.ask(one).cached_tokens == 0
        one.wait_until_cold(1 + FILLERS)
        redis_server.kill()
        assert alice.ask(one).cached_tokens == 0
        assert failures("store_down") > 0
        redis_server.start()
        one.wait(lambda: one.metric("manthan_cold_store_up") == 1, "a store that answers")
        bob.ask(one)
        one.wait_until_cold(1)
        restores, kept = total(one, "restores"), bob.kept
        assert bob.ask(one).cached_tokens == kept
        one.wait(lambda: total(one, "restores") == restores + 1, "a restore")
    with engine(model, family, redis_server, **PATIENT) as hot:
        assert_as_if_hot(bob, hot)
        for turn in alice.turns:
            hot.wait(hot.reset, "a reset")
            assert say(hot, turn.prompt, "alice") == turn.told
