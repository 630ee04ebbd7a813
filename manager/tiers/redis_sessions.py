"""Sessions in Redis: lookups of blocks, a Redis hash for each session, and times to live. One thread does all I/O.

The scheduler's thread hands lookups and records over, and later takes the answers. While Redis is down, the latest
record of each session waits, and is written when Redis is back. A shard is the part of a block that one rank stores.
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

from manthan.manager.events import BlocksDropped, DropCause
from manthan.manager.pool import BlockName
from manthan.manager.tiers.joined import Shard
from manthan.manager.tiers.redis import BATCH, Circuit, Client, Namespace, block_ttl_s, pipelined
from manthan.manager.tiers.sealed import Sealer
from manthan.manager.tiers.tier import TierError

logger = logging.getLogger("vllm.manthan.redis")

Needed: TypeAlias = Callable[[int], Sequence[BlockName]]
"""Function that takes a number of looked-up blocks. It returns the blocks of further KV cache groups that a request
needs to continue behind these."""
CLOSE_S = 5.0  # most seconds that `close` waits
REST_S = 0.5  # seconds until the next try while Redis has no free memory
RENEW = 1 / 16  # share of the time to live after which a used session's blocks get their full time to live again
FIRST, RUN, SWITCHES = 32, 256, 16
"""FIRST: blocks that a lookup asks for first, few so that a lookup of an unknown prompt is short. RUN: consecutive
blocks taken to be as large as their middle block. SWITCHES: most runs of a lookup with different numbers of shards."""
DELETED = (DropCause.FAILED, DropCause.ABANDONED, DropCause.EXPIRED, DropCause.RELEASED)
"""Causes of this engine's drops for which blocks are deleted from Redis, though other engines may use the blocks.
Blocks dropped for another cause, such as lack of room, stay in Redis."""
LASTING = (DropCause.EXPIRED, DropCause.RELEASED)  # causes for which a drop while Redis is down deletes blocks later


class StoredPoint(NamedTuple):
    """Resume point, a length at which a request can continue, whose blocks are all in Redis."""

    blocks: int  # number of looked-up blocks before the point
    sizes: Sequence[int]  # bytes of each block of further KV cache groups there


class LookupResult(NamedTuple):
    """Answer to a lookup."""

    sizes: Sequence[int] = ()  # approximate bytes of each block before the first absent block
    point: StoredPoint | None = None  # deepest complete resume point in these blocks; None without one
    sampled: str = ""  # `redis.sample` of the session's blocks, as last written by any engine


class SessionRecord(NamedTuple):
    """Record of a session as of now."""

    session_id: str
    fields: Mapping[str, object] | None = None  # fields of the Redis hash; None for a forgotten session
    used: float = 0.0  # Unix time of the last use
    blocks: Sequence[tuple[int, bytes, int]] = ()
    """KV cache group, block hash and depth (number of earlier blocks) of each block that a tier has."""


class RedisSessions:
    """This engine's sessions in Redis. No call but `close` waits for Redis.

    Args:
        counts: numbers of shards that a block may have: first this engine's, then each other that it can read.
        ttl_s: seconds from a session's last use until its first block expires; see `block_ttl_s`.
        facts: fields that each Redis hash of a session gets. `engine` names the engine that wrote the hash.
        answered: called on this object's thread when answers are ready.
        sealer: turns sessions' ids into digests; None if blocks are not sealed (encrypted).
    """

    def __init__(
        self,
        client: Client,
        circuit: Circuit,
        namespace: Namespace,
        counts: Sequence[int],
        ttl_s: float,
        facts: Mapping[str, object],
        answered: Callable[[], None],
        sealer: Sealer | None = None,
    ) -> None:
        self._client, self._circuit, self._ttl_s = client, circuit, ttl_s
        self._counts = {count: [Shard(at, count) for at in range(count)] for count in counts}
        self._renews = {counts[0]}  # numbers of shards with which blocks were stored or found
        self._base = self._namespace = namespace
        self._facts, self._answered, self._sealer = facts, answered, sealer
        self._wake = threading.Condition()
        self._lookups: dict[str, Callable[[Namespace], LookupResult]] = {}
        self._answers: dict[str, LookupResult] = {}
        self._records: dict[str, SessionRecord] = {}
        self._deletes: dict[BlockName, None] = {}
        self._renewed: dict[str, tuple[int, float]] = {}  # by session id, number of blocks and `used` at last renewal
        self._was_up, self._closing = True, False
        self._thread = threading.Thread(target=self._run, name="manthan-redis", daemon=True)

    # -- the scheduler's thread -----------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def look_up(
        self, request_id: str, session_id: str, group: int, hashes: Sequence[bytes], needed: Needed | None = None
    ) -> bool:
        """Ask which of the blocks `hashes` exist in Redis; see `take`. Return False if no answer will come.

        needed: see `Needed`. It is called on this object's thread. None for a model without resume points.
        """
        if not self._circuit.is_up:
            return False
        with self._wake:
            self._lookups[request_id] = partial(self._look_up, session_id, group, tuple(hashes), needed)
            self._wake.notify()
        return True

    def tell(self, records: Iterable[SessionRecord], drops: Iterable[BlocksDropped]) -> None:
        """Hand over records of changed sessions, and blocks that this engine has dropped."""
        with self._wake:
            causes = DELETED if self._circuit.is_up else LASTING
            for drop in drops:
                if drop.cause in causes:
                    self._deletes.update(((drop.group, block_hash), None) for block_hash in drop.block_hashes)
            for record in records:
                self._records[record.session_id] = record
                for group, block_hash, _ in record.blocks if self._deletes else ():
                    self._deletes.pop((group, block_hash), None)  # stored again
            if self._is_behind:
                self._wake.notify()

    def reset(self) -> str:
        """Begin a new namespace, because the weights may be different from now on. Return the namespace's name."""
        with self._wake:
            self._namespace = Namespace(self._base.prefix, f"{self._base.name}-{secrets.token_hex(4)}")
            self._answers = dict.fromkeys([*self._answers, *self._lookups], LookupResult())
            self._lookups, self._records, self._deletes, self._renewed = {}, {}, {}, {}
            return self._namespace.name

    def take(self) -> dict[str, LookupResult]:
        """Return the answers to lookups since the last call, by request id."""
        with self._wake:
            taken, self._answers = self._answers, {}
            return taken

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    @property
    def is_up(self) -> bool:
        return self._circuit.is_up

    def close(self) -> None:
        """Write the waiting records and deletions, if Redis answers within CLOSE_S seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:  # started
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("Manthan: Redis does not answer: the last changes of sessions are not written.")

    # -- this object's thread -------------------------------------------------------------------------

    @property
    def _is_behind(self) -> bool:
        return bool(self._records or self._deletes)

    def _run(self) -> None:
        with suppress(TierError):  # so that the first lookup has a connection
            self._ask([("EXISTS", self._name(self._namespace, ""))])
        while not self._closing or (self._is_behind and self._circuit.is_up):
            with self._wake:
                self._wake.wait_for(
                    lambda: self._lookups or self._closing or (self._is_behind and not self._circuit.wait_s),
                    None if self._circuit.is_up else max(0.01, self._circuit.wait_s),
                )
                lookups, self._lookups = self._lookups, {}
                namespace = self._namespace
            for request_id, look_up in lookups.items():
                found = look_up(namespace)
                with self._wake:
                    self._answers[request_id] = found if namespace is self._namespace else LookupResult()
            if lookups:
                self._answered()
            self._try()
            was_up, self._was_up = self._was_up, self._circuit.is_up
            if self._was_up and not was_up:
                logger.info("Manthan: Redis answers again.")
            elif was_up and not self._was_up:
                why = self._circuit.last_error
                logger.warning("Manthan: Redis does not serve (%s). Sessions are recomputed until it does.", why)

    def _look_up(
        self, session_id: str, group: int, hashes: Sequence[bytes], needed: Needed | None, namespace: Namespace
    ) -> LookupResult:
        try:
            [sampled] = self._ask([("HGET", self._name(namespace, session_id), "hashes")])
            sizes = self._found(namespace, group, hashes)
            point = self._point(namespace, len(sizes), needed) if needed is not None else None
            return LookupResult(sizes, point, (sampled or b"").decode())
        except TierError:
            pass
        except Exception:  # the request waits for an answer, and the thread must go on
            logger.exception("Manthan: a lookup in Redis failed")
        return LookupResult()

    def _found(self, namespace: Namespace, group: int, hashes: Sequence[bytes]) -> list[int]:
        """Return the approximate bytes, of all shards together, of each block before the first absent block.

        A block that is not stored in this engine's number of shards is searched for in the other numbers.
        """
        sizes = list[int]()
        for _ in range(SWITCHES):
            for count in self._counts:
                if found := self._stored(namespace, group, hashes[len(sizes) :], count):
                    self._renews.add(count)
                    sizes += found
                    break
            else:
                break
        return sizes

    def _stored(self, namespace: Namespace, group: int, hashes: Sequence[bytes], count: int) -> list[int]:
        """Return the approximate bytes of each block before the first that is not stored in `count` shards.

        One command asks for a run of blocks. From run to run the length doubles until a block is absent, and then is
        halved. Of each RUN blocks, only the middle block is measured. The first of all blocks is measured, too, because
        it may be larger: a session's first tokens are exact.
        """
        names = [[namespace.block(group, each, shard) for shard in self._counts[count]] for each in hashes]
        good, run, grows = 0, FIRST, True
        while run and good < len(names):
            some = list(chain.from_iterable(names[good : good + run]))
            [found] = self._ask([("EXISTS", *some)])
            if not found:
                break
            grows = grows and found == len(some)
            good += len(some) // count if found == len(some) else 0
            run = 2 * run if grows else run // 2
        middles = [min(at + RUN // 2, good - 1) for at in range(0, good, RUN)]
        measured = [0, *middles] if good else []
        lengths = self._ask([("STRLEN", name) for at in measured for name in names[at]])
        sizes = [sum(lengths[at : at + count]) for at in range(0, len(lengths), count)]
        return sizes[:1] + [sizes[1 + at // RUN] for at in range(1, good)]

    def _point(self, namespace: Namespace, count: int, needed: Needed) -> StoredPoint | None:
        """Return the deepest complete resume point behind at most `count` blocks. Mostly the first try finds it."""
        tried = 1
        while count > 0:
            some = {at: needed(at) for at in range(count, max(0, count - tried), -1)}
            sizes = self._sizes(namespace, chain.from_iterable(some.values()))
            for at, blocks in some.items():
                if blocks and all(sizes[block] for block in blocks):
                    return StoredPoint(at, [sizes[block] for block in blocks])
            count, tried = count - tried, min(4 * tried, 64)
        return None

    def _sizes(self, namespace: Namespace, blocks: Iterable[BlockName]) -> dict[BlockName, int]:
        """Return the bytes of each block, all shards together; 0 for an absent block."""
        sizes = dict.fromkeys(blocks, 0)
        for count, shards in self._counts.items():
            left = [block for block, nbytes in sizes.items() if not nbytes]
            found = self._ask([("STRLEN", namespace.block(*block, shard)) for block in left for shard in shards])
            for at, block in enumerate(left):
                each = found[at * count : (at + 1) * count]
                if all(each):
                    self._renews.add(count)
                    sizes[block] = sum(each)
        return sizes

    def _try(self) -> None:
        """Write the waiting records and deletions. If none waits and Redis was down, ask if it is back."""
        if self._circuit.wait_s:
            return
        record, names = None, list[BlockName]()
        try:
            if not (self._is_behind or self._circuit.is_up):
                self._ask([("PING",)])
            while True:
                with self._wake:  # `reset` changes all three together
                    namespace, names = self._namespace, list(islice(self._deletes, BATCH))
                    gone = (one for one in self._records.values() if one.fields is None)
                    # a full Redis still deletes, and has room for records then
                    record = None if names else next(gone, None) or next(iter(self._records.values()), None)
                if record is not None:
                    self._save(namespace, record)
                    self._done(record)
                    continue
                if not names:
                    break
                every = list(chain.from_iterable(self._counts.values()))
                self._ask([("UNLINK", *(namespace.block(*name, shard) for name in names for shard in every))])
                self._done(None, names)
        except TierError:
            if not self._circuit.wait_s:  # Redis answers, but memory is full
                with self._wake:
                    self._wake.wait_for(lambda: self._lookups or self._closing, REST_S)
        except Exception:  # the other records are still written
            logger.exception("Manthan: a session could not be told to Redis")
            self._done(record, names)

    def _done(self, record: SessionRecord | None, names: Iterable[BlockName] = ()) -> None:
        """Forget a waiting record, unless a newer one has replaced it, and waiting deletions."""
        with self._wake:
            if record is not None and self._records.get(record.session_id) is record:
                del self._records[record.session_id]
            for name in names:
                self._deletes.pop(name, None)

    def _name(self, namespace: Namespace, session_id: str) -> str:
        return namespace.session(self._sealer.name(session_id) if self._sealer is not None else session_id)

    def _save(self, namespace: Namespace, record: SessionRecord) -> None:
        """Write a session's Redis hash, or delete a forgotten session's hash if this engine wrote the hash last.

        Renew the blocks' times to live if the number of blocks has changed, or after RENEW of the time to live.
        """
        session_id, renewed = record.session_id, self._renewed  # `reset` makes a new dict
        name = self._name(namespace, session_id)
        if record.fields is None:
            renewed.pop(session_id, None)
            [owner] = self._ask([("HGET", name, "engine")])
            if owner is not None and owner.decode() == self._facts["engine"]:
                self._ask([("DEL", name)])
            return
        said = {} if self._sealer is not None else {"id": session_id}
        fields = [word for field in {**said, **record.fields, **self._facts}.items() for word in field]
        commands: list[tuple[Any, ...]] = [
            ("HSET", name, *map(str, fields)),
            ("PEXPIREAT", name, round(1000 * (record.used + self._ttl_s))),
        ]
        count, when = renewed.get(session_id, (-1, 0.0))
        if count != len(record.blocks) or record.used - when > RENEW * self._ttl_s:
            count, when = len(record.blocks), record.used
            shards = [shard for count in self._renews for shard in self._counts[count]]
            for group, block_hash, depth in record.blocks:
                until = round(1000 * (record.used + block_ttl_s(self._ttl_s, depth)))
                names = (namespace.block(group, block_hash, shard) for shard in shards)
                commands += [("PEXPIREAT", name, until, "GT") for name in names]
        self._ask(commands)
        renewed[session_id] = count, when

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._circuit.guard():
            return pipelined(self._client, commands)
