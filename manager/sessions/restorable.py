"""Which blocks the cold store gives back, kept as it changes: who routes requests asks for that.

A block of a chain is of use if all before it are cold as well and, where other KV cache groups are needed to go on, if
there is an anchor that stands behind it or behind one that follows; what such an anchor is made of is of use too. Keys
cover their prefix, so that the chains of all sessions together are a forest, and nothing depends on who has a block.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from manthan.manager.sessions.anchors import Anchors
from manthan.manager.sessions.session import Block, CodeState
from manthan.manager.sessions.table import SessionTable
from manthan.manager.work import Name


class News(NamedTuple):
    """By KV cache group and key: blocks that can be restored now, heads of chains before their tails; those that cannot
    be any more; and those that nobody knows any more, which may come back as others."""

    stored: Sequence[Name]
    removed: Sequence[Name]
    forgotten: Sequence[Name]


@dataclass(slots=True, eq=False)
class Node:
    """A block of chains.

    is_reached: whether it and all before it are cold. parts: what the anchor behind it is made of, if that can be gone
    on from. ends: how many such anchors there are, here and in what follows.
    """

    key: bytes
    parent: "Node | None" = None
    children: "dict[bytes, Node]" = field(default_factory=dict)
    is_stored: bool = False
    is_reached: bool = False
    parts: tuple[Name, ...] = ()
    ends: int = 0


class Restorable:
    """Does nothing until somebody listens."""

    def __init__(self, table: SessionTable, anchors: Anchors) -> None:
        self._table, self._blocks, self._anchors = table, table.blocks, anchors
        self._group = table.shape.group
        self._nodes: dict[bytes, Node] = {}
        self._parts: Counter[Name] = Counter()
        """Of anchors that can be gone on from: of how many of them."""
        self._was: dict[Name, bool] = {}
        """Whether blocks could be restored that may have changed since."""

    def listen(self) -> None:
        """From now on somebody asks for news; the first have all that there is."""
        self._blocks.changed = {(block.group, block.key): None for block in self._blocks}
        self._table.grown = self._grown
        for session in self._table.by_id.values():
            self._grown(session.chain, 0)

    @property
    def is_listened_to(self) -> bool:
        return self._blocks.changed is not None

    @property
    def has_news(self) -> bool:
        """Whether there may be some."""
        return bool(self._blocks.changed)

    def take(self) -> News:
        """What has changed since the last call."""
        changed, self._blocks.changed = self._blocks.changed or {}, {}
        forgotten = []
        for group, key in changed:
            block = self._blocks.get(key, group)
            if group is None:
                self._look(key, block)
            elif block is not None:
                for anchor in self._anchors.with_part(block):
                    self._look(anchor.key, self._blocks.get(anchor.key))
            if block is None and (named := self._group if group is None else group) is not None:
                forgotten.append((named, key))
        for group, key in changed:
            if group is None and self._blocks.get(key) is None:
                self._forget(key)
        was, self._was = self._was, {}
        now = {name: self._is_of_use(name) for name in was}
        for name in was:
            if not self._parts[name]:
                del self._parts[name]
        stored = sorted((name for name, before in was.items() if now[name] > before), key=self._depth)
        return News(stored, [name for name, before in was.items() if now[name] < before], forgotten)

    def all(self) -> Iterator[Name]:
        """All that can be restored, as of the last call of `take`."""
        chains = ((self._group, key) for key in self._nodes) if self._group is not None else ()
        return (name for name in (*chains, *self._parts) if self._is_of_use(name))

    def _is_of_use(self, name: Name) -> bool:
        group, key = name
        if group != self._group:
            return self._parts[name] > 0
        node = self._nodes.get(key)
        return node is not None and (node.ends > 0 if self._anchors.is_needed else node.is_reached)

    def _depth(self, name: Name) -> tuple[int, int]:
        group, key = name
        block = self._blocks.get(key, None if group == self._group else group)
        return group, 0 if block is None else block.depth

    def _note(self, group: int | None, key: bytes) -> None:
        """Something about the block is about to change."""
        if group is not None:
            self._was.setdefault((group, key), self._is_of_use((group, key)))

    # -- the forest -----------------------------------------------------------------------------------

    def _grown(self, chain: Sequence[Block], start: int) -> None:
        parent = self._nodes[chain[start - 1].key] if start else None
        for block in chain[start:]:
            node = self._nodes.get(block.key)
            if node is None:
                node = self._nodes[block.key] = Node(block.key)
            if parent is not None and node.parent is not parent:
                node.parent, parent.children[node.key] = parent, node
            parent = node

    def _forget(self, key: bytes) -> None:
        node = self._nodes.pop(key, None)
        if node is not None and node.parent is not None:
            del node.parent.children[key]

    def _look(self, key: bytes, block: Block | None) -> None:
        """See what became of a block of chains, and of the anchor behind it."""
        node = self._nodes.get(key)
        if node is None:
            return
        node.is_stored = block is not None and block.users > 0 and self._is_cold(block)
        self._settle(node)

    def _is_cold(self, block: Block) -> bool:
        return self._group is None or block.code is CodeState.COLD

    def _settle(self, node: Node) -> None:
        """The node, and what follows it as far as that changes with it."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            is_reached = node.is_stored and (node.parent is None or node.parent.is_reached)
            if is_reached != node.is_reached:
                self._note(self._group, node.key)
                node.is_reached = is_reached
                waiting += node.children.values()
            if self._anchors.is_needed:
                self._end(node)

    def _end(self, node: Node) -> None:
        """Whether chains can be gone on from behind this node."""
        anchor = self._anchors.at(node.key) if node.is_reached else None
        stands = anchor is not None and anchor.stands
        parts = tuple((p.group, p.key) for p in anchor.parts if p.group is not None) if anchor and stands else ()
        for by, some in ((+1, parts), (-1, node.parts)):
            for part in some:
                self._note(*part)
                self._parts[part] += by
        more = bool(parts) - bool(node.parts)
        node.parts = parts
        above: Node | None = node
        while more and above is not None:
            self._note(self._group, above.key)
            above.ends += more
            above = above.parent
