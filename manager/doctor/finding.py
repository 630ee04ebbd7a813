"""What a check found."""

from enum import StrEnum, auto
from typing import NamedTuple


class Mark(StrEnum):
    """OK. SKIPPED: there is nothing to look at. WARNING: it works, and could do better. WRONG: it does not work, or not
    as it is meant to."""

    OK = auto()
    SKIPPED = auto()
    WARNING = auto()
    WRONG = auto()


class Finding(NamedTuple):
    """check: what was looked at, in a word or two. said: one sentence; where something is wrong, with what is right."""

    check: str
    mark: Mark
    said: str
