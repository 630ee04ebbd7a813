"""Sessions, the blocks their chains name, and what the manager asks of whoever owns the memory."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from manthan.manager.sessions.marks import Mark, Owner


class SessionState(StrEnum):
    """HOT: a request runs. IDLE: bf16 in the pool, no request. EVICTING: being encoded. COLD: codes only."""

    HOT = auto()
    IDLE = auto()
    EVICTING = auto()
    COLD = auto()


HOT_STATES = (SessionState.HOT, SessionState.IDLE)


class CodeState(StrEnum):
    """Where a block's codes are: nowhere, waiting to be encoded, being encoded, or in the cold store."""

    NONE = auto()
    QUEUED = auto()
    SPILLING = auto()
    COLD = auto()


_NONE, _COLD = CodeState.NONE, CodeState.COLD
_QUEUED, _SPILLING = CodeState.QUEUED, CodeState.SPILLING
# Looking up an enum's member takes longer than what is asked of a block, thousands of times.


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """What a block is worth: its tokens, its bytes as bf16, and at most so many as codes (all ranks together).

    bounds: the most bytes that an encoded block takes, by how many of its first tokens are kept exact; 0 is there.
    group: the KV cache group whose blocks make up the chains; None where chains are keys only, without codes of their
    own, since no layer looks back over all of them. beside: what blocks of other groups take, by group, as in bounds;
    from a place in a chain nobody goes on without some of these. hot_beside: the bytes of such a block in the pool, by
    group; tokens_beside: how many tokens one has, where they are not as many as a chain's. settled: groups that stay in
    one codec, whatever `codec` is. lossless: groups whose codec gives back every bit. typical: about how many bytes an
    encoded block of the main group without exact tokens takes; 0 for just its bound. codec: the name of the one that
    has these bounds; empty for that which whoever encodes was told of.
    """

    block_tokens: int
    hot_nbytes: int
    bounds: Mapping[int, int]
    group: int | None = 0
    typical: int = 0
    codec: str = ""
    beside: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    hot_beside: Mapping[int, int] = field(default_factory=dict)
    tokens_beside: Mapping[int, int] = field(default_factory=dict)
    settled: Collection[int] = ()
    lossless: Collection[int] = ()

    def pool_nbytes(self, group: int | None) -> int:
        """What a block takes in the pool: of chains, or of another group."""
        return self.hot_nbytes if group is None else self.hot_beside.get(group, 0)

    @property
    def main_group(self) -> int:
        """That of chains; where these have no codes, the one whose windows are kept."""
        return next(iter(self.beside)) if self.group is None else self.group

    @property
    def cold_nbytes(self) -> int:
        """About what a chain's block without exact tokens takes."""
        return 0 if self.group is None else self.coded_nbytes

    @property
    def coded_nbytes(self) -> int:
        """The same of a block of the main group."""
        return self.typical or self._main_bounds[0]

    @property
    def ratio(self) -> float:
        """How many times less that is than in the pool."""
        hot = self.hot_beside[self.main_group] if self.group is None else self.hot_nbytes
        return hot / self.coded_nbytes

    @property
    def sizes(self) -> set[int]:
        """What encoded blocks may take, of all groups."""
        beside = {nbytes for bounds in self.beside.values() for nbytes in bounds.values()}
        return {*self._main_bounds.values(), self.coded_nbytes, *beside}

    @property
    def _main_bounds(self) -> Mapping[int, int]:
        return self.beside[self.main_group] if self.group is None else self.bounds

    def tokens_of(self, group: int | None) -> int:
        """Of a block: None for one of chains."""
        return self.block_tokens if group is None else self.tokens_beside.get(group, self.block_tokens)

    def is_exact(self, group: int | None, encoding: "Encoding") -> bool:
        """True if a compressed block of a group, None for that of chains, gives back every bit."""
        return group in self.lossless or encoding.exact >= self.tokens_of(group)


class Encoding(NamedTuple):
    """What a block's codes take, all ranks together, how many of its first tokens they keep exact, and their codec.

    nbytes: an upper bound until every rank has told the real size. codec: as in MemoryShape, which may be another one
    by now.
    """

    nbytes: int = 0
    exact: int = 0
    codec: str = ""

    @staticmethod
    @lru_cache(maxsize=2**14)
    def of(nbytes: int, exact: int = 0, codec: str = "") -> "Encoding":
        """The same object for all that are alike: there are few kinds of many blocks, and each object that is kept is
        one more for Python's garbage collector to visit."""
        return Encoding(nbytes, exact, codec)


NO_CODES = Encoding()


@dataclass(slots=True, eq=False)
class Block:
    """One block key and who needs it. A key covers its prefix, so it has the same place in every chain.

    depth: its place among the blocks of its group. group: None for a block of chains; else it is of another KV cache
    group, and belongs to anchors, which are its users.
    """

    key: bytes
    depth: int
    group: int | None = None
    code: CodeState = CodeState.NONE
    encoding: Encoding = NO_CODES
    """Of the codes that it has, or that it is about to get."""
    old: Encoding | None = None
    """Of codes that stay in the store until those that are being made replace them."""
    users: int = 0
    """Sessions whose chain holds it."""
    hot: int = 0
    """Those of them that are HOT or IDLE."""
    running: int = 0
    """Those of them that are HOT."""
    pins: int = 0
    """Restores that read the codes right now; a pinned block is never dropped."""
    tenant: str = ""
    """Whose share of the cold store its codes count towards."""
    origin: "Session | None" = None
    """A session whose chain has the block; None if that is not known."""
    moved: int = 0
    """Which fast tiers its codes have left, as is reckoned: bit n is for tier n, the fastest 0. See `FastTiers`."""
    mark: Mark = Mark.EXACT
    """Of the copy that its compressed block was made of."""
    waiters: "tuple[Session, ...] | dict[Session, None]" = ()
    """EVICTING sessions that wait for its codes, in order of arrival; mostly one, so that a dict is for more."""

    @property
    def name(self) -> "BlockName":
        return self.key if self.group is None else (self.group, self.key)

    @property
    def tier(self) -> int:
        """The number of the fastest tier that has its codes."""
        return (~self.moved & (self.moved + 1)).bit_length() - 1

    @property
    def reserves(self) -> bool:
        """Whether the block takes bytes of the cold store, or holds a reservation there."""
        return self.code is not _NONE

    @property
    def has_codes(self) -> bool:
        """True if the cold store has codes of it, be it those that are being replaced."""
        return self.code is _COLD or self.old is not None

    @property
    def in_flight(self) -> bool:
        """Whether its bf16 copy is about to be encoded, or being encoded."""
        return self.code is _QUEUED or self.code is _SPILLING

    def await_codes(self, session: "Session") -> None:
        """An EVICTING session waits for its codes, as others do."""
        if isinstance(self.waiters, tuple):
            self.waiters = dict.fromkeys(self.waiters)
        self.waiters[session] = None

    def await_no_longer(self, session: "Session") -> None:
        """One that waited does so no more."""
        if isinstance(self.waiters, tuple):
            self.waiters = ()
        else:
            del self.waiters[session]

    @property
    def droppable(self) -> bool:
        return self.code is _COLD and not self.pins

    @property
    def exposed(self) -> bool:
        """Whether vLLM may overwrite the only copy: idle in the pool, and neither cold nor on its way."""
        return self.hot > 0 and self.running == 0 and self.code is _NONE


BlockName: TypeAlias = bytes | tuple[int, bytes]
"""A block's key, for one of chains; else its KV cache group and its key."""

Beside = Sequence[tuple[int, bytes, int]]
"""Blocks of KV cache groups beside that of the chains: group, key and place in its group of each."""


class Place(NamedTuple):
    """Where an anchor is to stand: behind so many blocks of a chain, made of these of other groups."""

    depth: int
    parts: Beside


@dataclass(slots=True, eq=False)
class Anchor:
    """What other KV cache groups need to go on behind a block of chains: the last blocks of a window, a state.

    key: of that block. depth: how many blocks a chain has before that place.
    """

    key: bytes
    depth: int
    parts: "list[Block]"
    sessions: "dict[Session, None]" = field(default_factory=dict)

    @property
    def stands(self) -> bool:
        """Whether all of it is in the cold store."""
        return all(part.code is CodeState.COLD for part in self.parts)


@dataclass(slots=True, eq=False)
class Session:
    """One growing chain of block keys; `asked_id` is what the client called it, if it did."""

    session_id: str
    asked_id: str | None
    created: float
    last_used: float
    state: SessionState = SessionState.HOT
    chain: list[Block] = field(default_factory=list)
    requests: set[str] = field(default_factory=set)
    idle_since: float = 0.0
    retry_after: float = 0.0
    """Memory pressure leaves a session alone until then if its last eviction failed."""
    refusals: int = 0
    """How often the cold store had no room for it, one time after the other."""
    pending: int = 0
    """Blocks that an eviction under way still waits for."""
    anchors: list[Anchor] = field(default_factory=list)
    """Where it can go on from, the deepest last; those that are still being made included."""
    prompt_depth: int = 0
    """Behind so many blocks, where its last prompt ends, an anchor is kept beside the deepest."""
    evict_began: float = 0.0
    evict_encoded: int = 0
    evict_nbytes: int = 0
    evict_pressed: bool = False
    """See Eviction.is_pressed."""

    # What policies are told; see SessionView.
    uses: int = 0
    gap: float | None = None
    tokens: int = 0
    """Tokens of the conversation when its last request ended, or of the prompt while one runs."""
    prompt_tokens: int = 0
    """Of its last prompt; 0 where that is not known."""
    added_tokens: int = 0
    answer_tokens: int = 0
    left_tokens: int = 0
    lossy_tokens: int = 0
    """Cached tokens of its last request that were decoded, or computed behind decoded ones."""
    tip: bytes = b""
    """The last key of its chain when it was used last: by it the session is known again when the chain was cut."""

    # What the client said; see Hints.
    pinned: bool = False
    pinned_until: float | None = None
    ttl_s: float | None = None
    priority: int = 0
    tenant: str = ""
    expected: float | None = None
    awaits: str = ""
    """The tool that its client waits for, if it said so."""

    @property
    def beside(self) -> "set[Block]":
        """Blocks of other KV cache groups that its anchors are made of."""
        return {part for anchor in self.anchors for part in anchor.parts}

    @property
    def beside_nbytes(self) -> int:
        """Of the codes that these have, or are about to get."""
        return sum(part.encoding.nbytes for part in self.beside) if self.anchors else 0

    kin: Owner | None = None
    """Owner of the session whose whole prompt this one, without a name, has asked again."""
    prompt_end: str = ""
    """Number of full blocks of its last prompt, and the tokens behind them; empty where these are not known."""

    def has(self, block: Block) -> bool:
        """True if its chain has the block."""
        return block.depth < len(self.chain) and self.chain[block.depth] is block

    @property
    def owner(self) -> Owner:
        """Tenant and name; branches of one named session have the same."""
        return self.kin or (self.tenant, self.session_id if self.asked_id is None else f"={self.asked_id}")

    @property
    def told_id(self) -> str:
        """Its id as its tenant is told it."""
        return self.session_id.removeprefix(_owner(self.tenant, self.session_id))


def common_prefix(chain: Sequence[Block], keys: Sequence[bytes], known: int = 0) -> int:
    """Length of the leading run that a chain and a list of keys share, of which so much is known. O(log n).

    A block key covers the whole prefix before it, so one that agrees settles all before it.
    """
    most = min(len(chain), len(keys))
    if most <= known or chain[most - 1].key == keys[most - 1]:  # mostly all of it
        return max(most, known)
    both = range(known, most - 1)
    return known + bisect_left(both, True, key=lambda place: chain[place].key != keys[place])


def qualified(told_id: str, tenant: str) -> str:
    """A session's id among those of all tenants, of whom two may call theirs alike: no two of tenant and told id make
    the same, or who has a name would keep another tenant from it."""
    return _owner(tenant, told_id) + told_id


def _owner(tenant: str, name: str) -> str:
    """What stands before the names of a tenant's sessions; before nobody's only where they look like a tenant's."""
    if tenant:
        return tenant.replace("%", "%25").replace("/", "%2F") + "/"
    return "/" if "/" in name else ""


@dataclass(frozen=True)
class Held:
    """Compressed blocks of a session in one tier. tokens, blocks: of its chain. bytes: of these and of its anchors."""

    tokens: int
    blocks: int
    bytes: int


@dataclass(frozen=True)
class SessionInfo:
    """A session as everybody outside sees it. Times are seconds on the manager's clock, or on the one that was asked
    for; bytes of all ranks together.

    id: its tenant's own name for it, for a tenant. tokens, blocks: of its chain. hot_blocks: believed to be in the
    pool, where they take hot_bytes. cold_blocks: with codes. cold_bytes: of these, and of what its anchors have in
    the cold store. tiers: those that have some of that, by name, the fastest first. expected_return: as its client
    said, or as long as its tool takes. tool: what its client waits for. lossy_tokens: cached tokens of its last
    request that were decoded, or computed behind decoded ones. engine: which data-parallel engine has it.
    """

    id: str
    tenant: str
    state: SessionState
    tokens: int
    blocks: int
    hot_blocks: int
    cold_blocks: int
    hot_bytes: int
    cold_bytes: int
    tiers: Mapping[str, Held]
    created: float
    last_used: float
    requests: int
    pinned: bool
    priority: int
    expected_return: float | None
    tool: str
    lossy_tokens: int
    engine: int = 0


class Outcome(NamedTuple):
    """What came of a request's hints: whether its session is pinned, and what was refused, in a sentence or empty.

    session_id: as its tenant is told it. lossy_tokens: cached tokens of its prompt that were decoded, or computed
    behind decoded ones.
    """

    session_id: str
    pinned: bool
    refused: str
    lossy_tokens: int = 0


class Prefetch(NamedTuple):
    """A session that is expected: its chain, to be restored, and group, key and depth of the blocks of its anchor."""

    session_id: str
    keys: Sequence[bytes]
    beside: Beside = ()
    tenant: str = ""


class Eviction(NamedTuple):
    """A session went cold. `encoded` of its `blocks` had no codes before, which take `encoded_nbytes` now.

    beside: blocks of other KV cache groups that it goes on from. hot_nbytes: what all of these took in the pool.
    cold_nbytes: of all of its codes. exact: how many of its blocks keep tokens exact. Times in seconds. is_pressed:
    memory was short; else the session was idle for long.
    """

    session_id: str
    blocks: int
    beside: int
    tokens: int
    hot_nbytes: int
    encoded: int
    encoded_nbytes: int
    cold_nbytes: int
    idle_s: float
    took_s: float
    exact: int
    is_pressed: bool = False


class NewsKind(StrEnum):
    """TURN: a request ended. DROPPED: codes of it are gone. RELEASED: they are since somebody said so, or since its
    time to live was over."""

    TURN = auto()
    DROPPED = auto()
    PINNED = auto()
    UNPINNED = auto()
    RELEASED = auto()


class News(NamedTuple):
    """What happened to a session beside evictions and restores, for those who look on.

    tokens: of the conversation. blocks: of its chain, or those that lost their codes, of so many bytes. seconds: since
    its request began. found: of the prompt's tokens, those that were hot or restored. cause: of a drop.
    """

    session_id: str
    kind: NewsKind
    tokens: int = 0
    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    found: int = 0
    cause: str = ""


class DropCause(StrEnum):
    """Why codes leave the cold store: no room, unreadable, nobody's any more, the cache was reset, too old, or the
    client said so."""

    BUDGET = auto()
    FAILED = auto()
    ABANDONED = auto()
    RESET = auto()
    EXPIRED = auto()
    RELEASED = auto()


class Drop(NamedTuple):
    """Codes to take out of the cold store, of blocks of one KV cache group."""

    group: int
    keys: Sequence[bytes]
    cause: DropCause


class FoundAnchor(NamedTuple):
    """An anchor that is in a store which engines share, behind `depth` blocks of a chain: group, key and depth of each
    of its blocks, and their bytes."""

    depth: int
    parts: Sequence[tuple[int, bytes, int]]
    sizes: Sequence[int]
