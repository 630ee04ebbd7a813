"""One sentence for each mistake: what is wrong where, and what would be right."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pydantic import ValidationError


class Mistake(NamedTuple):
    """The first thing that pydantic found. key: dotted, empty where a validator compares several; said: by that one.

    value: as it was given, of what stands at the key. kind: pydantic's name for it, such as missing.
    """

    key: str
    value: object
    kind: str
    said: str

    @property
    def field(self) -> str:
        """The first part of the key."""
        return self.key.partition(".")[0]


def first_mistake(error: ValidationError) -> Mistake:
    """What to tell of: people mend one thing after the other."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return Mistake(key, first["input"], first["type"], first["msg"].removeprefix("Value error, "))


def written(value: object) -> str:
    """A value of a YAML file, as whoever wrote it sees it."""
    return "empty" if value is None else repr(value)


def must_be(key: str, right: str | None, value: object, show: Callable[[object], str] = written) -> str:
    """The sentence about a value that is not what `right` says it must be."""
    shown = show(value)
    if key == "tiers.redis.url" and re.search("[@?]", str(value)):  # there may be a password in it
        shown = "a URL with '@' or '?' in it"
    return f"{key} must be {right}, not {shown}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or the list of what is valid when nothing comes near."""
    valid = sorted(valid)
    if not valid:
        return " (there are none)"
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f" (did you mean '{close[0]}'?)"
    return f" (valid: {', '.join(valid)})"
