"""Sentences about users' mistakes, for error messages. Each says what would be right."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pydantic import ByteSize, ValidationError


class Mistake(NamedTuple):
    """First error that pydantic found.

    Args:
        key: Dotted key; empty if the error is from a validator that compares several keys.
        value: Value given for the key.
        kind: pydantic's type of the error, such as "missing".
        said: Message of pydantic, or of a validator of Manthan.
    """

    key: str
    value: object
    kind: str
    said: str

    @property
    def field(self) -> str:
        """First part of the key; of a flat model, the field's name."""
        return self.key.partition(".")[0]


def first_mistake(error: ValidationError) -> Mistake:
    """Return the first error only, because people mend one error after the other."""
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return Mistake(key, first["input"], first["type"], first["msg"].removeprefix("Value error, "))


def written(value: object) -> str:
    return "empty" if value is None else repr(value)


def must_be(key: str, right: str | None, value: object, show: Callable[[object], str] = written) -> str:
    """Return the sentence about a wrong value. right: completes "KEY must be". show: returns the value as text."""
    shown = show(value)
    if key == "tiers.redis.url" and re.search("[@?]", str(value)):  # the value may have a password
        shown = "a URL with '@' or '?' in it"
    return f"{key} must be {right}, not {shown}"


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` with the valid name nearest to `name`; if none is near, all valid names."""
    valid = sorted(valid)
    if not valid:
        return " (there are none)"
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else f" (valid: {', '.join(valid)})"


def human_bytes(nbytes: int) -> str:
    """Return a readable size, such as 1.6MiB."""
    return ByteSize(nbytes).human_readable()
