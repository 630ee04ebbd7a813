"""Sessions in Redis: lookups of blocks, a hash for each session, and times to live. All on a separate thread.

The engine's thread leaves lookups and records here and fetches answers. While Redis is down, records wait, the last
record of each session, and are written when Redis is back.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from manthan.manager.events import BlocksDropped, DropCause
from manthan.manager.pool import BlockName
from manthan.manager.tiers.redis_client import BATCH, Circuit, Client, pipelined
from manthan.manager.tiers.redis_schema import Namespace, lives_s
from manthan.manager.tiers.sealed import Sealer
from manthan.manager.tiers.shards import Shard
from manthan.manager.tiers.tier import TierError

logger = logging.getLogger("vllm.manthan.redis")

Needed: TypeAlias = Callable[[int], Sequence[BlockName]]
"""Returns the blocks of further KV cache groups needed to continue behind a number of blocks."""
CLOSE_S = 5.0
REST_S = 0.5
RENEW = 1 / 16
"""Share of the time to live after which the blocks of a used session are renewed."""
FIRST, RUN, SWITCHES = 32, 256, 16
"""First blocks of a lookup, so that an unknown prompt costs only a short question; blocks assumed to be of equal
size; most changes to a different number of shards."""
DELETED = (DropCause.FAILED, DropCause.ABANDONED, DropCause.EXPIRED, DropCause.RELEASED)
"""Causes of drops that delete blocks, even if several engines use them. Drops for room delete none."""
LASTING = (DropCause.EXPIRED, DropCause.RELEASED)
"""Causes of drops carried out later if Redis is down."""


class StoredPoint(NamedTuple):
    """Number of looked up blocks in front of a complete resume point, and the sizes of the further groups' blocks
    there.
    """

    blocks: int
    sizes: Sequence[int]


class LookupResult(NamedTuple):
    """Sizes of a prompt's stored blocks, up to the first absent block, and the deepest resume point among them.

    sampled: the `redis_schema.sample` of the session's blocks, by the last engine of the session.
    """

    sizes: Sequence[int] = ()
    point: StoredPoint | None = None
    sampled: str = ""


class SessionRecord(NamedTuple):
    """Current session.

    fields: of the hash; None for a forgotten session. used: Unix time of the last use. blocks: group, block hash and
    position of each stored block.
    """

    session_id: str
    fields: Mapping[str, object] | None = None
    used: float = 0.0
    blocks: Sequence[tuple[int, bytes, int]] = ()


class _Lookup(NamedTuple):
    request_id: str
    session_id: str
    group: int
    hashes: Sequence[bytes]
    needed: Needed | None


class RedisSessions:
    """Books of this engine's sessions in Redis. No call makes the engine's thread wait.

    Args:
        counts: numbers of shards of a block, this engine's first, and then the further readable numbers.
        facts: fields of all hashes. `engine` names the writing engine.
        answered: called on the books' thread when an answer is ready.
        sealer: names sessions if blocks are sealed.
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
        self._renews = {counts[0]}
        """Numbers of shards of blocks stored or found by this engine."""
        self._base = self._namespace = namespace
        self._facts, self._answered, self._sealer = facts, answered, sealer
        self._wake = threading.Condition()
        self._lookups: list[_Lookup] = []
        self._answers: dict[str, LookupResult] = {}
        self._records: dict[str, SessionRecord] = {}
        self._deletes: dict[BlockName, None] = {}
        self._renewed: dict[str, tuple[int, float]] = {}  # by session, how many blocks, and when
        self._was_up, self._closing = True, False
        self._thread = threading.Thread(target=self._run, name="manthan-redis", daemon=True)

    # -- the engine's thread --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def look_up(
        self, request_id: str, session_id: str, group: int, hashes: Sequence[bytes], needed: Needed | None = None
    ) -> bool:
        """Ask for stored blocks of `hashes`. Return False if no answer will come.

        Args:
            session_id: session of the request.
            needed: called on another thread; None for a model without further groups.
        """
        if not self._circuit.is_up:
            return False
        with self._wake:
            self._lookups.append(_Lookup(request_id, session_id, group, tuple(hashes), needed))
            self._wake.notify()
        return True

    def tell(self, records: Iterable[SessionRecord], drops: Iterable[BlocksDropped]) -> None:
        """Leave records of changed sessions, and blocks dropped by this engine."""
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
        """Return the name of a new namespace. The KV may be of different weights from now on."""
        with self._wake:
            self._namespace = Namespace(self._base.prefix, f"{self._base.name}-{secrets.token_hex(4)}")
            self._answers |= {lookup.request_id: LookupResult() for lookup in self._lookups}
            self._answers = dict.fromkeys(self._answers, LookupResult())
            self._lookups, self._records, self._deletes, self._renewed = [], {}, {}, {}
            return self._namespace.name

    def take(self) -> dict[str, LookupResult]:
        """Return the answers since the last call, by request id."""
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
        """Write the rest, if Redis answers within CLOSE_S."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("Manthan: Redis does not answer; what was not told it yet is left untold.")

    # -- the books' thread ----------------------------------------------------------------------------

    @property
    def _is_behind(self) -> bool:
        return bool(self._records or self._deletes)

    def _run(self) -> None:
        while not (self._closing and not (self._is_behind and self._circuit.is_up)):
            with self._wake:
                self._wake.wait_for(self._is_due, None if self._circuit.is_up else max(0.01, self._circuit.wait_s))
                lookups, self._lookups = self._lookups, []
                namespace = self._namespace
            for lookup in lookups:
                found = self._look_up(namespace, lookup)
                with self._wake:
                    self._answers[lookup.request_id] = found if namespace is self._namespace else LookupResult()
            if lookups:
                self._answered()
            self._try(namespace)
            self._log_state()

    def _is_due(self) -> bool:
        return bool(self._lookups or self._closing or (self._is_behind and not self._circuit.wait_s))

    def _look_up(self, namespace: Namespace, lookup: _Lookup) -> LookupResult:
        try:
            sizes, sampled = self._found(namespace, lookup)
            point = self._point(namespace, len(sizes), lookup.needed) if lookup.needed is not None else None
            return LookupResult(sizes, point, sampled)
        except TierError:
            pass
        except Exception:  # the request must get an answer, and this thread must live
            logger.exception("Manthan: a lookup in Redis failed")
        return LookupResult()

    def _found(self, namespace: Namespace, lookup: _Lookup) -> tuple[list[int], str]:
        """Return sizes of the blocks up to the first absent block, each in all shards, and the session's sample.

        If a block is absent in this engine's number of shards, the search continues in further numbers of shards.
        """
        [sampled] = self._ask([("HGET", self._name(namespace, lookup.session_id), "hashes")])
        sizes = list[int]()
        for _ in range(SWITCHES):
            for count in self._counts:
                found = self._stored(namespace, lookup.group, lookup.hashes[len(sizes) :], count)
                if found:
                    self._renews.add(count)
                    sizes += found
                    break
            else:
                break
        return sizes, (sampled or b"").decode()

    def _stored(self, namespace: Namespace, group: int, hashes: Sequence[bytes], count: int) -> list[int]:
        """Return sizes of the first blocks stored in `count` shards.

        Blocks are counted in runs. Runs double until a run has a hole, and are then halved. The blocks of RUN are about
        as large as the one in the middle. The first may be larger, because a session's first tokens are exact.
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
        """Return the deepest complete resume point, up to `count` blocks: mostly the first tried."""
        tried = 1
        while count > 0:
            some = {at: needed(at) for at in range(count, max(0, count - tried), -1)}
            names = list(dict.fromkeys(chain.from_iterable(some.values())))
            sizes = dict(zip(names, self._sizes(namespace, names), strict=True))
            for at, blocks in some.items():
                if blocks and all(sizes[block] for block in blocks):
                    return StoredPoint(at, [sizes[block] for block in blocks])
            count, tried = count - tried, min(4 * tried, 64)
        return None

    def _sizes(self, namespace: Namespace, blocks: Sequence[BlockName]) -> list[int]:
        """Return the bytes of each block in all shards; 0 for an absent block."""
        sizes = dict.fromkeys(blocks, 0)
        for count, shards in self._counts.items():
            left = [block for block, nbytes in sizes.items() if not nbytes]
            found = self._ask([("STRLEN", namespace.block(*block, shard)) for block in left for shard in shards])
            for at, block in enumerate(left):
                each = found[at * count : (at + 1) * count]
                if all(each):
                    self._renews.add(count)
                    sizes[block] = sum(each)
        return list(sizes.values())

    def _try(self, namespace: Namespace) -> None:
        """Write the rest, or test if Redis is back."""
        if self._circuit.wait_s:
            return
        try:
            if not (self._is_behind or self._circuit.is_up):
                self._ask([("PING",)])
            while (record := next(iter(list(self._records.values())), None)) is not None:
                self._save(namespace, record)
                with self._wake:
                    if self._records.get(record.session_id) is record:
                        del self._records[record.session_id]
            while names := list(self._deletes)[:BATCH]:
                every = list(chain.from_iterable(self._counts.values()))
                self._ask([("UNLINK", *(namespace.block(*name, shard) for name in names for shard in every))])
                with self._wake:
                    for name in names:
                        self._deletes.pop(name, None)
        except TierError:
            if not self._circuit.wait_s:  # Redis answers, but memory is full
                time.sleep(REST_S)
        except Exception:
            logger.exception("Manthan: sessions could not be told to Redis")
            with self._wake:
                self._records, self._deletes = {}, {}

    def _name(self, namespace: Namespace, session_id: str) -> str:
        return namespace.session(self._sealer.name(session_id) if self._sealer is not None else session_id)

    def _save(self, namespace: Namespace, record: SessionRecord) -> None:
        """Write a session's hash, and renew the blocks if there are more, or when due."""
        session_id = record.session_id
        name = self._name(namespace, session_id)
        if record.fields is None:
            self._renewed.pop(session_id, None)
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
        count, when = self._renewed.get(session_id, (-1, 0.0))
        if count != len(record.blocks) or record.used - when > RENEW * self._ttl_s:
            self._renewed[session_id] = len(record.blocks), record.used
            shards = [shard for count in self._renews for shard in self._counts[count]]
            for group, block_hash, depth in record.blocks:
                until = round(1000 * (record.used + lives_s(self._ttl_s, depth)))
                names = (namespace.block(group, block_hash, shard) for shard in shards)
                commands += [("PEXPIREAT", name, until, "GT") for name in names]
        self._ask(commands)

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._circuit.guard():
            return pipelined(self._client, commands)

    def _log_state(self) -> None:
        if self._circuit.is_up is not self._was_up:
            self._was_up = self._circuit.is_up
            if self._was_up:
                logger.info("Manthan: Redis answers again.")
            else:
                logger.warning(
                    "Manthan: Redis does not serve (%s). Sessions are recomputed until it does.",
                    self._circuit.last_error,
                )
