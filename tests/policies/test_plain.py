"""Policies against the same rules written down in the plainest way, lists that are searched through at each event: over
long traffic, the same sessions go in the same order, so the same share of requests finds its session."""

import random
from collections.abc import Iterator

import pytest
from policy_place import Place

from manthan.policies import EvictionPolicy, SessionView, get_policy


class Plain(EvictionPolicy):
    """Sessions in a list; `choose` says who goes first."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[SessionView] = []
        self.age: dict[str, float] = {}
        """gdsf: what a session is worth; fifo: when it came."""
        self.count, self.floor = 0, 0.0

    def used(self, session: SessionView) -> None:
        self.count += 1
        self.rows = [row for row in self.rows if row.session_id != session.session_id] + [session]
        self.enter(session)

    def enter(self, session: SessionView) -> None:
        """Write down more about a session that was used."""

    def worth(self, session: SessionView) -> float:
        raise NotImplementedError

    def forget(self, session_id: str) -> None:
        self.rows = [row for row in self.rows if row.session_id != session_id]
        self.age.pop(session_id, None)

    def victims(self) -> Iterator[str]:
        yield from [row.session_id for row in sorted(self.rows, key=self.worth)]


class LRU(Plain):
    def worth(self, session: SessionView) -> float:
        return session.last_used


class TTL(Plain):
    def worth(self, session: SessionView) -> float:
        return session.last_used + 300


class FIFO(Plain):
    def enter(self, session: SessionView) -> None:
        self.age.setdefault(session.session_id, self.count)

    def worth(self, session: SessionView) -> float:
        return self.age[session.session_id]


class GDSF(Plain):
    def enter(self, session: SessionView) -> None:
        cost = session.tokens + session.tokens**2 / 50_000
        self.age[session.session_id] = self.floor + session.uses * cost / session.nbytes

    def worth(self, session: SessionView) -> float:
        return self.age[session.session_id]

    def evicted(self, session_id: str) -> None:
        self.floor = max(self.floor, self.age[session_id])
        self.forget(session_id)


class ARC(EvictionPolicy):
    """The four lists of the paper, with bytes: [session, bytes], the first come first."""

    def __init__(self) -> None:
        super().__init__()
        self.t1: list[tuple[str, int]] = []
        self.t2: list[tuple[str, int]] = []
        self.b1: list[tuple[str, int]] = []
        self.b2: list[tuple[str, int]] = []
        self.uses: dict[str, int] = {}
        self.p, self.c = 0.0, 0

    def used(self, session: SessionView) -> None:
        name, is_again = session.session_id, False
        if name in self.uses:
            is_again = name in dict(self.t2) or session.uses > self.uses[name]
        elif name in dict(self.b1):
            more = max(1.0, size(self.b2) / size(self.b1)) * dict(self.b1)[name]
            self.p, is_again = min(self.p + more, self.c), True
        elif name in dict(self.b2):
            more = max(1.0, size(self.b1) / size(self.b2)) * dict(self.b2)[name]
            self.p, is_again = max(self.p - more, 0), True
        self.uses[name] = session.uses
        self.t1, self.t2 = without(self.t1, name), without(self.t2, name)
        self.b1, self.b2 = without(self.b1, name), without(self.b2, name)
        (self.t2 if is_again else self.t1).append((name, session.nbytes))
        self.c = max(self.c, size(self.t1) + size(self.t2))

    def forget(self, session_id: str) -> None:
        self.uses.pop(session_id, None)
        self.t1, self.t2 = without(self.t1, session_id), without(self.t2, session_id)

    def evicted(self, session_id: str) -> None:
        self.b1 += [row for row in self.t1 if row[0] == session_id]
        self.b2 += [row for row in self.t2 if row[0] == session_id]
        self.forget(session_id)
        while self.b1 and size(self.b1) > self.c - size(self.t1):
            del self.b1[0]
        while self.b2 and size(self.b2) > 2 * self.c - size(self.t1) - size(self.t2) - size(self.b1):
            del self.b2[0]

    def victims(self) -> Iterator[str]:
        rows = self.t1 if self.t1 and (size(self.t1) > self.p or not self.t2) else self.t2
        yield rows[0][0]


class S3FIFO(EvictionPolicy):
    """Small and main queue and ghosts: [session, bytes], the first come first. Moves are made as the victim is asked
    for, which always goes here."""

    def __init__(self) -> None:
        super().__init__()
        self.small: list[tuple[str, int]] = []
        self.main: list[tuple[str, int]] = []
        self.ghosts: list[tuple[str, int]] = []
        self.uses: dict[str, int] = {}
        self.hits: dict[str, int] = {}
        self.c = 0

    def used(self, session: SessionView) -> None:
        name = session.session_id
        if name not in self.uses:
            self.hits[name] = 0
            (self.main if name in dict(self.ghosts) else self.small).append((name, session.nbytes))
            self.ghosts = without(self.ghosts, name)
        elif session.uses > self.uses[name]:
            self.hits[name] = min(self.hits[name] + 1, 3)
        self.uses[name] = session.uses
        self.c = max(self.c, size(self.small) + size(self.main))

    def forget(self, session_id: str) -> None:
        self.uses.pop(session_id, None)
        self.small, self.main = without(self.small, session_id), without(self.main, session_id)

    def evicted(self, session_id: str) -> None:
        self.ghosts += [row for row in self.small if row[0] == session_id]
        while self.ghosts and size(self.ghosts) > 0.9 * self.c:
            del self.ghosts[0]
        self.forget(session_id)

    def victims(self) -> Iterator[str]:
        while True:
            if self.small and size(self.small) >= 0.1 * (size(self.small) + size(self.main)):
                name, nbytes = self.small[0]
                if self.hits[name] <= 1:
                    break
                self.small, self.hits[name] = self.small[1:], 0
            else:
                name, nbytes = self.main[0]
                if not self.hits[name]:
                    break
                self.main, self.hits[name] = self.main[1:], self.hits[name] - 1
            self.main.append((name, nbytes))
        yield name


def size(rows: list[tuple[str, int]]) -> int:
    return sum(nbytes for _, nbytes in rows)


def without(rows: list[tuple[str, int]], name: str) -> list[tuple[str, int]]:
    return [row for row in rows if row[0] != name]


PLAIN = {"lru": LRU, "ttl": TTL, "fifo": FIFO, "gdsf": GDSF, "arc": ARC, "s3fifo": S3FIFO}


def traffic(seed: int, requests: int = 1500) -> Iterator[tuple[str, int]]:
    """Sessions of 1 to 9 bytes, some of them asked for much more often than others, and every fifth for once."""
    rng = random.Random(seed)
    for number in range(requests):
        once = rng.random() < 0.2
        name = f"once-{number}" if once else f"s{int(120 * rng.random() ** 2.5)}"
        yield name, 1 + sum(map(ord, name)) % 9


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PLAIN)
def test_the_same_go_in_the_same_order(name: str, seed: int) -> None:
    place, plain = Place(get_policy(name)(), capacity=150), Place(PLAIN[name](), capacity=150)
    found = 0
    for session_id, nbytes in traffic(seed):
        found += session_id in plain.present
        assert place.request(session_id, nbytes=nbytes) == plain.request(session_id, nbytes=nbytes)
    assert place.present == plain.present
    assert found > 200, "hardly anybody came back: this compares nothing"
