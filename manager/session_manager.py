"""The session memory manager: events and the time in, actions out.

It does no I/O, starts no thread, reads no clock and knows neither torch nor vLLM. Whoever drives it calls the
event methods from one thread and carries out, in this order, `take_drops`, `take_releases`, `take_spills`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from manthan.manager.chains import common_prefix
from manthan.manager.session import (
    Block,
    CodeState,
    Drop,
    DropCause,
    Eviction,
    Session,
    SessionState,
)
from manthan.manager.session_table import MemoryShape, SessionTable
from manthan.policies import EvictionPolicy, PolicyOptions


class SessionMemoryManager:
    """Decides which sessions are evicted, restored and dropped.

    policy: one instance of it orders the hot pool, another the cold store.
    capacity_nbytes: the cold store's hard budget; a block is only ordered to be encoded while it fits.
    idle_after_s: seconds without a request after which a sweep evicts a session.
    min_tokens: shorter sessions are not tracked.
    label: stands in the ids of sessions without a name.
    options: of the policy; None for its defaults.
    """

    def __init__(
        self,
        policy: type[EvictionPolicy],
        shape: MemoryShape,
        capacity_nbytes: int,
        idle_after_s: float,
        min_tokens: int = 0,
        label: str = "",
        options: PolicyOptions | None = None,
    ) -> None:
        self.shape = shape
        self.total_blocks = capacity_nbytes // shape.cold_nbytes
        self.idle_after_s = idle_after_s
        self.min_blocks = max(1, -(-min_tokens // shape.block_tokens))
        self.table = SessionTable(policy, shape, label, options)
        self.blocks = self.table.blocks
        self._running: dict[str, Session] = {}  # by request id
        self._restoring: dict[str, list[Block]] = {}  # by request id
        self._restored: dict[str, list[Block]] = {}  # by id of a running request
        self._stale: set[bytes] = set()  # being encoded since before a reset
        self._queue: OrderedDict[bytes, None] = OrderedDict()  # the QUEUED blocks, first come first
        self._releases: list[bytes] = []
        self._drops: list[Drop] = []
        self._evictions: list[Eviction] = []

    # -- requests -------------------------------------------------------------------------------------

    def request_started(self, request_id: str, keys: Sequence[bytes], asked_id: str | None, now: float) -> str:
        """A request with these prompt block keys came in; returns the id of the session it belongs to."""
        session = self.table.chains.find(keys, asked_id) or self.table.create(asked_id, now)
        self._begin_use(session, request_id, now)
        self._running[request_id] = session
        return session.session_id

    def request_finished(self, request_id: str, keys: Sequence[bytes], now: float) -> None:
        """A request ended, however it did; `keys` are the blocks whose KV was computed, prompt and output."""
        session = self._running.pop(request_id, None)
        self._restored.pop(request_id, None)
        if session is None:
            return
        if common_prefix(session.chain, keys) < len(keys):
            home = self._home(session, keys, now)
            if home is not session:
                self._begin_use(home, request_id, now)
                self._end_use(session, request_id, now)
            self.table.extend(home, keys[len(home.chain) :])
            session = home
        self._end_use(session, request_id, now)

    def _home(self, session: Session, keys: Sequence[bytes], now: float) -> Session:
        """Which session these keys extend, now that others may have grown, or that the answer is known."""
        found = self.table.chains.find(keys, session.asked_id)
        if found is None:
            return self.table.create(session.asked_id, now) if session.chain else session
        return found

    def _begin_use(self, session: Session, request_id: str, now: float) -> None:
        if session.state is SessionState.EVICTING:
            self._unwait(session, session.chain)
        session.requests.add(request_id)
        session.uses += 1
        if session.state is not SessionState.HOT:
            self.table.set_state(session, SessionState.HOT, now)
        self.table.used(session, now)

    def _end_use(self, session: Session, request_id: str, now: float) -> None:
        session.requests.discard(request_id)
        self.table.used(session, now)
        if session.requests:
            return
        if len(session.chain) < self.min_blocks:
            self._cut(session, 0, DropCause.ABANDONED)
        else:
            self.table.set_state(session, SessionState.IDLE, now)

    # -- restore --------------------------------------------------------------------------------------

    def match(self, keys: Iterable[bytes]) -> int:
        """How many of these keys, from the first on without a gap, can be restored."""
        count, find, cold = 0, self.blocks.get, CodeState.COLD
        for key in keys:
            block = find(key)
            if block is None or block.code is not cold:
                break
            count += 1
        return count

    def restore_started(self, request_id: str, keys: Sequence[bytes]) -> None:
        """These codes, which matched, are being read for the request; they are not dropped until it ends."""
        blocks = [block for key in keys if (block := self.blocks.get(key)) is not None]
        self.blocks.pin(blocks, +1)
        self._restoring[request_id] = blocks

    def restore_finished(self, request_id: str, failed: Iterable[bytes] = ()) -> None:
        """The restore ended; codes in `failed` could not be read and are dropped."""
        blocks = self._restoring.pop(request_id, [])
        self.blocks.pin(blocks, -1)
        if request_id in self._running:
            self._restored[request_id] = blocks
        keys = set(failed)
        unreadable = [block for block in blocks if block.key in keys]
        self._drop(unreadable, DropCause.FAILED)
        self._drop([block for block in blocks if not block.users], DropCause.ABANDONED)
        self._bury(unreadable)

    # -- eviction -------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When the session that is idle for longest is due, or None."""
        first = next(iter(self.table.idle.values()), None)
        return None if first is None else first.idle_since + self.idle_after_s

    def sweep(self, now: float) -> None:
        """Start to evict every session that is idle for long enough."""
        while (deadline := self.next_deadline) is not None and deadline <= now:
            self._evict(next(iter(self.table.idle.values())), now)

    def relieve(self, wanted: int, now: float) -> bool:
        """Memory is short: evict idle sessions in policy order until `wanted` exposed blocks are under way.

        Returns whether any session was chosen.
        """
        goal = max(0, self.blocks.exposed - wanted)
        chosen = False
        if self.blocks.exposed > goal:
            for session in self.table.hot_victims():
                if session.retry_after <= now and any(block.exposed for block in session.chain):
                    self._evict(session, now)
                    chosen = True
                    if self.blocks.exposed <= goal:
                        break
        return chosen

    def spilled(self, key: bytes, now: float) -> None:
        """Every rank has put the codes of this block into its tier."""
        if key in self._stale:
            self.spill_failed(key, now)
        if (block := self._spilling(key)) is None:
            return
        self.blocks.change(block, code=CodeState.COLD)
        if not block.hot:
            self._releases.append(key)
        for session in self._waiters_of(block):
            self.table.touch(session)
            session.evict_encoded += 1
            self._finish_eviction(session, now)
        if not block.users:
            self._drop([block], DropCause.ABANDONED)

    def spill_failed(self, key: bytes, now: float) -> None:
        """A rank could not store this block: its sessions stay hot; pressure leaves them be for a while."""
        if (block := self._spilling(key)) is None:
            return
        cause = DropCause.RESET if key in self._stale else DropCause.FAILED
        self._stale.discard(key)
        self._forget_codes([block], cause)  # some rank may have stored its shard
        for session in self._waiters_of(block):
            self._unwait(session, session.chain)
            session.retry_after = now + self.idle_after_s
            self.table.set_state(session, SessionState.IDLE, now)
        self._bury([block])

    def lost(self, key: bytes, now: float) -> None:
        """A block that was to be encoded is not in the pool any more: what follows it is of no use."""
        if (block := self._spilling(key)) is None:
            return
        self._stale.discard(key)
        self.blocks.change(block, code=CodeState.NONE)
        for session in self._waiters_of(block):
            self._cut(session, block.depth, DropCause.ABANDONED)
            self._finish_eviction(session, now)
        self._bury([block])

    def reset(self) -> None:
        """Forget all KV, hot and cold: the weights changed, or somebody asked for it."""
        for request_id in list(self._restoring):  # they read from a store that is being emptied
            self.restore_finished(request_id)
        for session in list(self.table.by_id.values()):
            self._cut(session, 0, DropCause.RESET)
        self._stale.update(block.key for block in self.blocks)  # what is left is being encoded
        self._releases.clear()

    def _evict(self, session: Session, now: float) -> None:
        """Queue what has no codes yet, tail first, so that the head stays hot for longest."""
        self.table.set_state(session, SessionState.EVICTING, now)
        session.evict_began, session.evict_encoded = now, 0
        needed = [block for block in session.chain if block.code is CodeState.NONE]
        granted = self._make_room(len(needed), session)
        if granted < len(needed):
            self._cut(session, needed[granted].depth, DropCause.BUDGET)
        for block in reversed(needed[:granted]):
            self.blocks.change(block, code=CodeState.QUEUED)
            self._queue[block.key] = None
        for block in session.chain:
            if block.in_flight:
                block.waiters[session] = None
                session.pending += 1
            elif not block.hot:
                self._releases.append(block.key)
        self._finish_eviction(session, now)

    def _finish_eviction(self, session: Session, now: float) -> None:
        if session.pending or not session.chain:
            return
        self.table.set_state(session, SessionState.COLD, now)
        self._bury(session.chain)
        if not session.chain:
            return
        self._evictions.append(
            Eviction(
                session_id=session.session_id,
                blocks=len(session.chain),
                tokens=len(session.chain) * self.shape.block_tokens,
                encoded=session.evict_encoded,
                idle_s=session.evict_began - session.last_used,
                took_s=now - session.evict_began,
            )
        )

    def _spilling(self, key: bytes) -> Block | None:
        block = self.blocks.get(key)
        return block if block is not None and block.code is CodeState.SPILLING else None

    def _waiters_of(self, block: Block) -> list[Session]:
        """The sessions that waited for a block, which is answered for now."""
        sessions = list(block.waiters)
        block.waiters.clear()
        for session in sessions:
            session.pending -= 1
        return sessions

    def _unwait(self, session: Session, blocks: Iterable[Block]) -> None:
        """An eviction waits for these no longer. Encodings go on; what only it had queued is taken back."""
        for block in blocks:
            if session in block.waiters:
                del block.waiters[session]
                session.pending -= 1
                if not block.waiters and block.code is CodeState.QUEUED:
                    del self._queue[block.key]
                    self.blocks.change(block, code=CodeState.NONE)

    # -- the cold store's budget ----------------------------------------------------------------------

    def _make_room(self, wanted: int, session: Session) -> int:
        """Drop codes until `wanted` blocks fit, or all that is worth less than this session is gone.

        Returns how many blocks fit, at most `wanted`.
        """
        self._drop_redundant(wanted)
        if self._free < wanted:
            for victim in self.table.cold_victims():
                self._drop_strangers(victim.last_used, wanted)
                if victim is session or self._free >= wanted:
                    break
                self._drop_tail(victim, wanted)
        return min(wanted, self._free)

    @property
    def capacity_blocks(self) -> int:
        """How many blocks this engine may have in the cold store."""
        return self.total_blocks

    @property
    def _free(self) -> int:
        return self.capacity_blocks - self.blocks.reserved

    def _drop_strangers(self, before: float, wanted: int) -> None:
        """Where engines share a store, others' sessions that were not used since `before` go first."""

    def _drop_redundant(self, wanted: int) -> None:
        """Codes that a running request has read, and that nobody else needs, go before any cold session."""
        for request_id, blocks in self._restored.items():
            while blocks and self._free < wanted:
                block = blocks.pop()
                if block.users == 1 and block.running:
                    self._drop([block], DropCause.BUDGET)
                    self.table.touch(self._running[request_id])

    def _drop_tail(self, victim: Session, wanted: int) -> None:
        """Drop codes from the victim's tail until `wanted` blocks are free; its hot blocks it keeps."""
        if victim.state is SessionState.COLD:
            length, free = len(victim.chain), self._free
            while length and free < wanted and not victim.chain[length - 1].pins:
                length -= 1
                free += victim.chain[length].users == 1 and victim.chain[length].droppable
            if length < len(victim.chain):
                self._cut(victim, length, DropCause.BUDGET)
        elif victim.state is SessionState.IDLE:
            codes = [b for b in reversed(victim.chain) if b.users == 1 and b.droppable]
            self._drop(codes[: wanted - self._free], DropCause.BUDGET)
            self.table.touch(victim)

    def _cut(self, session: Session, length: int, cause: DropCause) -> None:
        """Shorten a chain; codes, and in an eviction bf16 copies, that nobody needs any more go."""
        self._bury(self._shorten(session, length, cause))

    def _shorten(self, session: Session, length: int, cause: DropCause) -> list[Block]:
        cut = session.chain[length:]
        self._unwait(session, cut)
        self.table.truncate(session, length)
        if session.state is SessionState.EVICTING:
            self._releases += [block.key for block in cut if not block.hot]
        self._drop([block for block in cut if not block.users], cause)
        return cut

    def _bury(self, blocks: Iterable[Block]) -> None:
        """Cold sessions end before the first of these blocks of a chain that is gone.

        Sessions that are being evicted look for themselves when they are done.
        """
        gone = next((block for block in blocks if block.gone), None)
        if gone is not None:
            for session in self.table.holders(gone):
                if session.state is SessionState.COLD:
                    self._shorten(session, gone.depth, DropCause.ABANDONED)

    def _drop(self, blocks: Iterable[Block], cause: DropCause) -> None:
        self._forget_codes([block for block in blocks if block.droppable], cause)

    def _forget_codes(self, blocks: Sequence[Block], cause: DropCause) -> None:
        for block in blocks:
            self.blocks.change(block, code=CodeState.NONE)
        if blocks:
            self._drops.append(Drop([block.key for block in blocks], cause))

    # -- what is to be done ---------------------------------------------------------------------------

    def take_drops(self) -> list[Drop]:
        """Codes to remove, before any spill taken later is begun."""
        taken, self._drops = self._drops, []
        return taken

    def take_releases(self) -> list[bytes]:
        """Blocks whose bf16 copy nobody needs any more."""
        keys, self._releases = self._releases, []
        return [key for key in keys if (b := self.blocks.get(key)) is None or not (b.hot or b.in_flight)]

    def take_spills(self, limit: int) -> list[bytes]:
        """Up to `limit` blocks to encode now; each must be answered by spilled, spill_failed or lost."""
        taken: list[bytes] = []
        while self._queue and len(taken) < limit:
            key, _ = self._queue.popitem(last=False)
            taken.append(key)
            block = self.blocks.get(key)
            assert block is not None
            self.blocks.change(block, code=CodeState.SPILLING)
        return taken

    def take_evictions(self) -> list[Eviction]:
        """Evictions that ended since the last call, for logs and metrics."""
        taken, self._evictions = self._evictions, []
        return taken

    @property
    def has_work(self) -> bool:
        """Whether something is to be taken, or an answer to a taken spill is outstanding."""
        return bool(self._queue or self._releases or self._drops or self.blocks.spilling)
