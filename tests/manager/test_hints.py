"""What clients may say of their sessions, and what they are told when it makes no sense."""

from typing import Any

import pytest

from manthan.manager.sessions.hints import (
    HIGHEST_PRIORITY,
    LONGEST_NAME,
    MOST_PREFETCHES,
    NO_HINTS,
    TOOL_NAME,
    WHERE,
    HintError,
    Hints,
    parse_hints,
)

NAMES = "expect_return_s, pin, prefetch, priority, quality, release, tenant, tool, ttl_s"


def refusal(value: object) -> str:
    with pytest.raises(HintError) as error:
        parse_hints(value)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert sentence.startswith(WHERE)
    return sentence.removeprefix(WHERE)


@pytest.mark.parametrize("value", [None, {}, {"pin": None, "ttl_s": None, "prefetch": None, "release": None}])
def test_nothing_said(value: object) -> None:
    assert parse_hints(value) == NO_HINTS == Hints()
    assert NO_HINTS.given == ()
    assert NO_HINTS.pin is None  # which is not false


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("pin", True, True),
        ("pin", False, False),
        ("ttl_s", 60, 60.0),
        ("ttl_s", 0.5, 0.5),
        ("priority", HIGHEST_PRIORITY, HIGHEST_PRIORITY),
        ("priority", -HIGHEST_PRIORITY, -HIGHEST_PRIORITY),
        ("priority", 0, 0),
        ("release", True, True),
        ("expect_return_s", 1, 1.0),
        ("prefetch", "alice", ("alice",)),
        ("prefetch", ["alice", "bob"], ("alice", "bob")),
        ("prefetch", ["a" * LONGEST_NAME] * MOST_PREFETCHES, ("a" * LONGEST_NAME,) * MOST_PREFETCHES),
        ("tenant", "Universität Zürich", "Universität Zürich"),
        ("tool", "web search", "web search"),
    ],
)
def test_each_hint(name: str, given: object, expected: object) -> None:
    hints = parse_hints({name: given})
    assert getattr(hints, name) == expected
    assert hints.given == (name,)
    assert hints == Hints.model_validate({name: expected})


SECONDS = "a number of seconds above 0, and at most 2592000 (30 days)"
PRIORITY = f"a whole number from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
PREFETCH = f"a session id or a list of up to {MOST_PREFETCHES}, each of 1 to {LONGEST_NAME} printable characters"
TENANT = f"a name of at most {LONGEST_NAME} printable characters"


@pytest.mark.parametrize(
    ("name", "right", "values"),
    [
        ("pin", "true or false", [1, 0, "true", "", []]),
        ("release", "true or false", [1, "yes"]),
        ("ttl_s", SECONDS, [0, -1, True, "60", float("inf"), float("nan"), 10**400, [60]]),
        ("expect_return_s", SECONDS, [0, False, "5m", float("-inf")]),
        ("quality", "exact or any", ["best", 1, ""]),
        ("priority", PRIORITY, [11, -11, True, 1.0, "1", float("nan")]),
        ("prefetch", PREFETCH, ["", [""], [1], 1, True, {"alice": 1}, ["alice", None]]),
        ("prefetch", PREFETCH, ["a" * (LONGEST_NAME + 1), ["a"] * (MOST_PREFETCHES + 1), "\ud800", "a\nb"]),
        ("tool", TOOL_NAME, [1, True, ["search"], "a\nb", "a" * (LONGEST_NAME + 1)]),
        ("tenant", TENANT, [1, True, ["acme"], "a\nb", "\x1b[2J", "a" * (LONGEST_NAME + 1), "\ud800", b"acme"]),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(name: str, right: str, values: list[Any]) -> None:
    for value in values:
        assert refusal({name: value}).startswith(f".{name} must be {right}, not "), value
    assert refusal({name: 1.5j}).endswith("not 1.5j")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ttl", "'ttl' (did you mean 'ttl_s'?)"),
        ("pinned", "'pinned' (did you mean 'pin'?)"),
        ("Release", "'Release' (did you mean 'release'?)"),
        ("expected_return", "'expected_return' (did you mean 'expect_return_s'?)"),
        ("zzz", f"'zzz' (valid: {NAMES})"),
        (7, f"'7' (valid: {NAMES})"),
    ],
)
def test_unknown_hints_are_refused_with_the_nearest_one(name: object, hint: str) -> None:
    assert refusal({"pin": True, name: 1}) == f": unknown hint {hint}"
    assert refusal({name: None}) == f": unknown hint {hint}"


@pytest.mark.parametrize("value", [[], "pin", True, 3, [{"pin": True}]])
def test_what_is_no_mapping_is_refused(value: object) -> None:
    assert refusal(value) == f" must be a mapping of hints to values, not {value!r}"


@pytest.mark.parametrize(("name", "value"), [("pin", True), ("expect_return_s", 5), ("tool", "search")])
def test_contradictions_are_refused(name: str, value: object) -> None:
    assert refusal({"release": True, name: value}) == (
        f": release drops the session when this request ends, but {name} keeps it: give one of them"
    )
    assert parse_hints({"release": False, name: value}).given == (name,)


def test_a_refusal_stays_short_whatever_was_sent() -> None:
    for value in (
        {"x" * 1_000_000: 1},
        {"tenant": "x" * 1_000_000},
        {"prefetch": ["x"] * 1_000_000},
        ["x" * 1_000_000],
    ):
        assert len(refusal(value)) < 300
