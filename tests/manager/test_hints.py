"""Hints as clients write them, and the sentence for each mistake."""

import pytest

from manthan.manager.session.hints import (
    HIGHEST_PRIORITY,
    LONGEST_NAME,
    MOST_PREFETCHES,
    NO_HINTS,
    TOOL_NAME,
    WHERE,
    HintError,
    Hints,
    TokenRange,
    parse_hints,
)

NAMES = (
    "expect_return_s, keep, parent_session_id, pin, prefetch, priority, quality, release, store, tenant, tool, ttl_s"
)
BOOLEAN = "true or false"
SECONDS = "a number of seconds above 0, and at most 2592000 (30 days)"
PRIORITY = f"a whole number from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
PREFETCH = f"a session id or a list of up to {MOST_PREFETCHES}, each of 1 to {LONGEST_NAME} printable characters"
KEEP = (
    "a list of up to 16 objects with from, to and seconds: token numbers from 0 to 10000000, from below to, and "
    "a number of seconds above 0, and at most 2592000 (30 days)"
)
RANGE = {"from": 0, "to": 9, "seconds": 1}
PARENT = f"a session id of 1 to {LONGEST_NAME} printable characters"
TENANT = f"a name of at most {LONGEST_NAME} printable characters"


def refusal(value: object) -> str:
    """Return the sentence that a client is told, without its beginning."""
    with pytest.raises(HintError) as error:
        parse_hints(value)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert sentence.startswith(WHERE)
    return sentence.removeprefix(WHERE)


@pytest.mark.parametrize("value", [None, {}, dict.fromkeys(Hints.model_fields)])
def test_nothing_is_said(value: object) -> None:
    assert parse_hints(value) == NO_HINTS == Hints()
    assert NO_HINTS.given == ()
    assert NO_HINTS.pin is NO_HINTS.store is None, "which is not false"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("pin", True, True),
        ("pin", False, False),
        ("store", False, False),
        ("store", True, True),
        ("ttl_s", 2_592_000, 2_592_000.0),
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
        ("parent_session_id", "agent 7", "agent 7"),
        ("keep", [RANGE] * 16, (TokenRange(**RANGE),) * 16),
        ("quality", "exact", "exact"),
    ],
)
def test_each_hint(name: str, given: object, expected: object) -> None:
    hints = parse_hints({name: given})
    assert getattr(hints, name) == expected
    assert hints.given == (name,)


@pytest.mark.parametrize(
    ("name", "right", "values"),
    [
        ("pin", BOOLEAN, [1, 0, "true", "", []]),
        ("release", BOOLEAN, [1, "yes"]),
        ("keep", KEEP, ["all", {"from": 0, "to": 9, "seconds": 1}, [{"from": 0, "to": 9}], [RANGE] * 17, [[0, 9, 1]]]),
        (
            "keep",
            KEEP,
            [[RANGE | {"from": 9}], [RANGE | {"from": -1}], [RANGE | {"to": 10_000_001}], [RANGE | {"x": 1}]],
        ),
        ("keep", KEEP, [[RANGE | {"seconds": 0}], [RANGE | {"from": True}], [RANGE | {"to": 9.0}], [RANGE, None]]),
        ("store", BOOLEAN, [0, "no"]),
        ("ttl_s", SECONDS, [0, -1, 2_592_001, True, "60", float("inf"), float("nan"), 10**400, [60]]),
        ("expect_return_s", SECONDS, [0, False, "5m", float("-inf")]),
        ("quality", "exact, high or any", ["best", 1, ""]),
        ("priority", PRIORITY, [11, -11, True, 1.0, "1", float("nan")]),
        ("prefetch", PREFETCH, ["", [""], [1], 1, True, {"alice": 1}, ["alice", None]]),
        ("prefetch", PREFETCH, ["a" * (LONGEST_NAME + 1), ["a"] * (MOST_PREFETCHES + 1), "\ud800", "a\nb"]),
        ("parent_session_id", PARENT, ["", 1, ["agent"], "a\nb", "a" * (LONGEST_NAME + 1)]),
        ("tool", TOOL_NAME, [1, True, ["search"], "a\nb", "a" * (LONGEST_NAME + 1)]),
        ("tenant", TENANT, [1, True, ["acme"], "a\nb", "\x1b[2J", "a" * (LONGEST_NAME + 1), "\ud800", b"acme"]),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(name: str, right: str, values: list[object]) -> None:
    for value in values:
        assert refusal({name: value}).startswith(f".{name} must be {right}, not "), value
    assert refusal({name: 1.5j}).endswith("not 1.5j")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ttl", "'ttl' (did you mean 'ttl_s'?)"),
        ("Release", "'Release' (did you mean 'release'?)"),
        ("expected_return", "'expected_return' (did you mean 'expect_return_s'?)"),
        ("zzz", f"'zzz' (valid: {NAMES})"),
        (7, f"'7' (valid: {NAMES})"),
    ],
)
def test_unknown_hints_are_refused_with_the_nearest_one(name: object, hint: str) -> None:
    assert refusal({"pin": True, name: 1}) == refusal({name: None}) == f": unknown hint {hint}"


@pytest.mark.parametrize("value", [[], "pin", True, 3, [{"pin": True}]])
def test_hints_must_be_a_mapping(value: object) -> None:
    assert refusal(value) == f" must be a mapping of hints to values, not {value!r}"


@pytest.mark.parametrize(
    ("name", "value"), [("pin", True), ("keep", [RANGE]), ("expect_return_s", 5), ("tool", "search")]
)
def test_contradictions_are_refused(name: str, value: object) -> None:
    assert refusal({"release": True, name: value}) == (
        f": release drops the session when this request ends, but {name} keeps it: give one of them"
    )
    assert parse_hints({"release": False, name: value}).given == (name,)


LONG = "x" * 1_000_000


@pytest.mark.parametrize("value", [{LONG: 1}, {"tenant": LONG}, {"prefetch": ["x"] * 1_000_000}, [LONG]], ids=range(4))
def test_a_refusal_stays_short_whatever_was_sent(value: object) -> None:
    assert len(refusal(value)) < 300
