"""Which session a request belongs to: the one of its tenant whose chain it extends."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from manthan.manager.sessions.session import Block, Session, qualified


def common_prefix(chain: Sequence[Block], keys: Sequence[bytes], known: int = 0) -> int:
    """Length of the leading run that a chain and a list of keys share, of which so much is known. O(log n).

    A block key covers the whole prefix before it, so one that agrees settles all before it.
    """
    most = min(len(chain), len(keys))
    if most <= known or chain[most - 1].key == keys[most - 1]:  # mostly all of it
        return max(most, known)
    both = range(known, most - 1)
    return known + bisect_left(both, True, key=lambda place: chain[place].key != keys[place])


@dataclass(slots=True, eq=False)
class Node:
    """A place where chains end or go apart, and what leads to it from the one before: the blocks up to `depth`.

    some: a session that has all of these. ends: those whose chain ends here, the first that came first. children: by
    their first key behind it.
    """

    depth: int
    parent: "Node | None" = None
    some: Session | None = None
    ends: list[Session] = field(default_factory=list)
    children: "dict[bytes, Node]" = field(default_factory=dict)


class ChainTree:
    """Sessions by their chains: a tree in which those that begin alike share a path, which names no key of its own.

    A look takes as many steps as there are forks on its way, however many sessions go on from each.
    """

    __slots__ = ("_end_of", "_root")

    def __init__(self) -> None:
        self._root = Node(0)
        self._end_of: dict[Session, Node] = {}

    def __len__(self) -> int:
        return len(self._end_of)

    def add(self, session: Session, keys: Sequence[bytes]) -> None:
        """Enter a session whose chain has these keys, one at least."""
        node, common = self._walk(keys)
        if common < node.depth:
            node = self._split(node, common)
        if common < len(keys):
            node.children[keys[common]] = node = Node(len(keys), node, session)
        node.ends.append(session)
        self._end_of[session] = node

    def resize(self, session: Session, length: int) -> None:
        """The chain of a session that was added has grown to so many blocks, or is about to be cut to them, one at
        least."""
        node = self._end_of[session]
        assert node.parent is not None
        if len(node.ends) == 1 and not node.children and node.parent.depth < length:  # nobody else is here, or behind
            node.depth = length
            return
        self.remove(session)
        self.add(session, [block.key for block in session.chain[:length]])

    def remove(self, session: Session) -> None:
        """Take out a session, before its chain gets shorter."""
        node, chain = self._end_of.pop(session), session.chain
        node.ends.remove(session)
        if not node.ends and not node.children and node.parent is not None:
            node = node.parent
            del node.children[chain[node.depth].key]
        if not node.ends and len(node.children) == 1 and node.parent is not None:
            [child] = node.children.values()
            child.parent = node = node.parent
            node.children[chain[node.depth].key] = child
        while node.parent is not None:
            if node.some is session:
                node.some = node.ends[0] if node.ends else next(reversed(node.children.values())).some
            node = node.parent

    def first(self, keys: Sequence[bytes]) -> Session | None:
        """A session that has all of these keys, one at least; one with no others if there is one."""
        node, common = self._walk(keys)
        return _first_at(node, common) if common == len(keys) else None

    def find(self, keys: Sequence[bytes], again: bool) -> Session | None:
        """The session whose chain is the longest that these keys begin with. again: or `first`, if there is one."""
        node, common = self._walk(keys)
        if again and keys and common == len(keys):
            return _first_at(node, common)
        longest = node if common == node.depth else node.parent
        while longest is not None and not longest.ends:
            longest = longest.parent
        return longest.ends[0] if longest is not None else None

    def end(self, session: Session) -> Node | None:
        """Where its chain ends, if it was added."""
        return self._end_of.get(session)

    def has_several(self, keys: Sequence[bytes]) -> bool:
        """Whether more than one session has all of these keys."""
        node, common = self._walk(keys)
        return common == len(keys) and len(node.ends) + len(node.children) > 1

    def nearest(self, keys: Sequence[bytes]) -> tuple[int, Session | None]:
        """How many keys at their beginning some session has, and one that has so many; nobody where that is 0."""
        node, common = self._walk(keys)
        return common, node.some

    def nodes(self) -> Iterator[Node]:
        """All of them; parents before their children."""
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _walk(self, keys: Sequence[bytes]) -> tuple[Node, int]:
        """How many of the keys some session has, and the first node at that depth or behind it."""
        node, depth, length = self._root, 0, len(keys)
        while depth < length and (child := node.children.get(keys[depth])) is not None:
            assert child.some is not None
            chain, end = child.some.chain, min(child.depth, length)
            if chain[end - 1].key != keys[end - 1]:
                return child, common_prefix(chain, keys[:end], depth)
            node, depth = child, end
        return node, depth

    def _split(self, node: Node, depth: int) -> Node:
        """A new node on the way to this one."""
        parent, some = node.parent, node.some
        assert parent is not None
        assert some is not None
        middle = Node(depth, parent, some, children={some.chain[depth].key: node})
        parent.children[some.chain[parent.depth].key] = node.parent = middle
        return middle


def _first_at(node: Node, depth: int) -> Session | None:
    """Of those that have the keys up to there, one with no others if there is one."""
    return node.ends[0] if node.ends and depth == node.depth else node.some


class ChainIndex:
    """Sessions by their chains. No tenant finds another's.

    Sessions that clients named are found by requests of that name, and by requests without one.

    label: tells this engine's sessions without a name from other engines'.
    """

    def __init__(self, label: str = "") -> None:
        self._anonymous_name = f"anonymous-{label}-" if label else "anonymous-"
        self._trees: dict[tuple[str, str | None], ChainTree] = {}  # by tenant and name; None for all of a tenant
        self._anonymous = defaultdict[str, Iterator[int]](lambda: count(1))  # by tenant, who learns nothing of others
        self._forks = defaultdict[str, Iterator[int]](lambda: count(2))

    def find(self, keys: Sequence[bytes], asked_id: str | None, tenant: str) -> Session | None:
        """The session that these keys belong to; None means a new one or a fork.

        That is one of this name which has all of them, for a prompt that is asked again; otherwise the one with the
        longest chain that is a prefix of them.
        """
        return self.of(tenant, asked_id).find(keys, again=asked_id is not None)

    def of(self, tenant: str, asked_id: str | None = None) -> ChainTree:
        """The sessions of that name, or all, of a tenant; to be looked at only."""
        tree = self._trees.get((tenant, asked_id))
        return ChainTree() if tree is None else tree

    def add(self, session: Session) -> None:
        """Enter a session; where one with the same chain is there already, that one is found before it."""
        if session.chain:
            keys = [block.key for block in session.chain]
            for owner in _owners(session):
                tree = self._trees.get(owner)
                if tree is None:
                    tree = self._trees[owner] = ChainTree()
                tree.add(session, keys)

    def grow(self, session: Session, before: int) -> None:
        """A session's chain has grown; it had so many blocks before."""
        if not before:
            self.add(session)
            return
        for owner in _owners(session):
            self._trees[owner].resize(session, len(session.chain))

    def cut(self, session: Session, length: int) -> None:
        """A session's chain is about to be cut to so many blocks."""
        for owner in _owners(session) if length < len(session.chain) else ():
            tree = self._trees[owner]
            if length:
                tree.resize(session, length)
                continue
            tree.remove(session)
            if not tree:
                del self._trees[owner]

    def forget_tenant(self, tenant: str) -> None:
        """The tenant's last session is gone."""
        self._anonymous.pop(tenant, None)
        self._forks.pop(tenant, None)

    def trees(self, session: Session) -> list[ChainTree]:
        """Those that the session is entered in while it has a chain."""
        return [self.of(*owner) for owner in _owners(session)]

    def new_id(self, asked_id: str | None, tenant: str, taken: Container[str]) -> str:
        """What the client called it, with a number behind it for a fork; `anonymous-N` without a name."""
        if asked_id is None:
            names = (f"{self._anonymous_name}{n}" for n in self._anonymous[tenant])
        else:
            names = (asked_id if n == 1 else f"{asked_id}~{next(self._forks[tenant])}" for n in count(1))
        return next(name for told in names if (name := qualified(told, tenant)) not in taken)


def _owners(session: Session) -> set[tuple[str, str | None]]:
    return {(session.tenant, None), (session.tenant, session.asked_id)}
