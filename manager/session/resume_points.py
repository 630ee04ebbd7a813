"""Resume points: lengths of a session at which every KV cache group has the blocks needed to continue.

A session is a list of blocks of the main KV cache group. Models with only this group, of full attention, need no resume
points. Further groups, of sliding windows or recurrent states, have the needed blocks only at a few lengths of a
session. These blocks are stored at the request's end, because the pool overwrites them first. A session keeps the
deepest resume point, and the resume point at the end of the last prompt, for a client that asks for another answer.
Until all blocks are saved, the session also keeps the deepest resume point up to which all blocks are saved.

Ends of earlier prompts are spare points. A client whose chat template drops earlier thinking continues from a spare
point. Spare points may take a share of the tiers' budget. If they take more, the session whose spare points take most
bytes gives up a point that lies in the same stretch of blocks as a less deep point, or else its first point. A point's
stretch is as long as the greatest power of two that is not above the point's distance from the deepest point.

A row is a block's number in the BlockTable. A block is saved if a tier has it, compressed. A point stands if all its
blocks of further groups are saved.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from manthan.manager.events import DropCause
from manthan.manager.session.table import ResumePoint, Session

if TYPE_CHECKING:
    from manthan.manager.session.manager import SessionManager

SPARE_SHARE = 1 / 8  # share of the tiers' budget that the spare points of all sessions together may take
MOST_SPARE = 16  # most spare points of a session, because each request checks all of them


class ResumePoints:
    """Resume points of all sessions."""

    def __init__(self, manager: "SessionManager") -> None:
        self._manager, self._blocks, self._touch = manager, manager.blocks, manager.table.touch
        self.is_needed = manager.shape.needs_points  # True if the model has windows or states
        self._spare: dict[Session, list[ResumePoint]] = {}  # spare points by session, the deepest last
        self._taken: dict[Session, int] = {}  # bytes of the blocks that only the session's spare points use
        self.at: dict[int, ResumePoint] = {}  # points by `ResumePoint.row`
        self.standing: set[int] = set()  # `ResumePoint.row` of the points that stand
        self._of: dict[int, dict[int, ResumePoint]] = {}
        """By row of a further group's block, the points that need the block, by `ResumePoint.row`."""

    def stands(self, point: ResumePoint) -> bool:
        """True if a point's blocks of further groups are all saved."""
        return bool(self._blocks.is_saved(point.rows).all())

    def place(self, session: Session, depth: int, parts: Sequence[tuple[int, bytes, int]]) -> ResumePoint:
        """Return the point behind the first `depth` blocks of a session, new or known. parts: see `PointParts`."""
        groups, hashes, positions = zip(*parts, strict=True) if parts else ((), (), ())
        rows, row = self._blocks.enter(groups, hashes, positions), int(session.rows[depth - 1])
        point = self.at.get(row)
        if point is None:
            point = self.at[row] = ResumePoint(row, depth, rows)
            self._blocks.refer(self._blocks.users, rows, +1)
            for part in rows.tolist():
                self._of.setdefault(part, {})[row] = point
            if self.stands(point):
                self.standing.add(row)
        if session not in point.sessions:
            point.sessions[session] = None
            session.points = tuple(sorted((*session.points, point), key=lambda point: point.depth))
            self._touch(session)
        return point

    def deepest(self, session: Session, length: int) -> int:
        """Return the depth of a session's deepest point, stored or being stored, at most `length` blocks deep.

        Return 0 without a point, and `length` for a model that needs no resume points.
        """
        if not self.is_needed:
            return length
        return max((point.depth for point in session.points if point.depth <= length), default=0)

    def cut(self, session: Session, length: int, cause: DropCause) -> None:
        """Take from a session the points that are deeper than `length` blocks."""
        for point in [point for point in session.points if point.depth > length]:
            self.leave(session, point, cause)
        self._bound()

    def leave(self, session: Session, point: ResumePoint, cause: DropCause) -> None:
        """Take a point from a session. If no session has the point now, drop the blocks that nothing else needs."""
        self._touch(session)
        session.points = tuple(each for each in session.points if each is not point)
        spare = [each for each in self._spare.get(session, ()) if each is not point]
        self._set_spare(session, spare)
        del point.sessions[session]
        if point.sessions:
            return
        del self.at[point.row]
        self.standing.discard(point.row)
        for part in point.rows.tolist():
            del self._of[part][point.row]
            if not self._of[part]:
                del self._of[part]
        blocks = self._blocks
        unused = point.rows[blocks.users[point.rows] == 1]
        self._manager.drop(unused[blocks.is_droppable(unused)], cause)
        blocks.refer(blocks.users, point.rows, -1)
        self._set_spare(session, spare)  # the session's points may be the last users of a block

    def stored(self, rows: Iterable[int]) -> None:
        """Note newly saved blocks of further groups."""
        points = {point.row: point for row in rows for point in self._of.get(row, {}).values()}
        self.standing.update(row for row, point in points.items() if self.stands(point))
        for point in points.values():
            for session in list(point.sessions):
                self._touch(session)
                self.tidy(session)

    def tidy(self, session: Session) -> None:
        """Take from a session the points that a deeper standing point makes worthless, except spare points."""
        standing = [point for point in session.points if self.stands(point)]
        if len(standing) < 2:
            return
        saved = self._blocks.saved_prefix(session.rows)
        ready = [point for point in standing if point.depth <= saved]
        others = [point for point in standing[:-1] if point not in ready[-1:] and point.depth != session.prompt_depth]
        self._set_spare(session, [point for point in others if point.ends_prompt and not session.is_pinned])
        for point in others:
            if not point.ends_prompt or session.is_pinned:
                self.leave(session, point, DropCause.ABANDONED)
        while len(self._spare.get(session, ())) > MOST_SPARE:
            self._leave_spare(session)
        self._bound()

    def leave_spare(self, session: Session, cause: DropCause) -> None:
        """Take all spare points from a session."""
        for point in self._spare.get(session, []):
            self.leave(session, point, cause)
        self._bound()

    def _bound(self) -> None:
        """Take spare points from sessions until the rest takes at most SPARE_SHARE of the budget."""
        while sum(self._taken.values()) > int(SPARE_SHARE * self._manager.budget_nbytes):
            self._leave_spare(max(self._taken, key=self._taken.__getitem__))

    def _set_spare(self, session: Session, points: list[ResumePoint]) -> None:
        """Note a session's spare points, except its deepest standing point, which may be the only standing point."""
        self._spare.pop(session, None)
        self._taken.pop(session, None)
        deepest = next((point for point in reversed(session.points) if self.stands(point)), None)
        points = [point for point in points if point is not deepest]
        if points:
            rows = np.unique(np.concatenate([point.rows for point in points]))
            self._spare[session] = points
            self._taken[session] = self._blocks.nbytes_of(rows[self._blocks.users[rows] == 1])

    def recount(self, session: Session) -> None:
        """Count the bytes of a session's spare points again, after some of their blocks became smaller."""
        self._set_spare(session, self._spare.get(session, []))

    def _leave_spare(self, session: Session) -> None:
        """Take a spare point from a session: the second in a stretch (see the module's docstring), or its first."""
        points, end, stretches = self._spare[session], session.points[-1].depth, set[tuple[int, int]]()
        for point in points:
            length = 1 << (max(1, end - point.depth).bit_length() - 1)
            stretch = length, point.depth // length
            if stretch in stretches:
                break
            stretches.add(stretch)
        else:
            point = points[0]
        self.leave(session, point, DropCause.ABANDONED)

    def lose(self, row: int, cause: DropCause) -> list[Session]:
        """Remove the points that need a lost block, given by its row. Return the sessions that had such a point."""
        points = list(self._of.get(row, {}).values())
        found = dict.fromkeys(session for point in points for session in point.sessions)
        for point in points:
            for session in list(point.sessions):
                self.leave(session, point, cause)
        self._bound()
        return list(found)
