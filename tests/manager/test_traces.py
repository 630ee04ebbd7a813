"""Reading traces: both formats, and one sentence for every mistake."""

import json
from pathlib import Path

import pytest
from traces import EXCERPT

from manthan.manager.simulator.traces import Trace, TracedRequest, TraceError, read_trace

HEAD = "time_s,session_id,input_tokens,output_tokens"
LINE = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}


@pytest.fixture
def read(tmp_path: Path):
    def write_and_read(text: str, block_tokens: int | None = None) -> Trace:
        path = tmp_path / "trace"
        path.write_text(text)
        return read_trace(path, block_tokens)

    return write_and_read


def keys_of(trace: Trace) -> list[list[bytes]]:
    return [request.keys for request in trace.requests]


def test_mooncake(read) -> None:
    later = LINE | {"timestamp": 2500, "hash_ids": [1, 2, 4]}
    trace = read(json.dumps(later) + "\n\n" + json.dumps(LINE))
    assert trace == Trace(
        "trace",
        512,
        [
            TracedRequest(0, None, [b"1", b"2"], 2, 1100, 5),
            TracedRequest(2.5, None, [b"1", b"2"], 2, 1100, 5),
        ],
        4,
    )


def test_what_the_client_says_of_its_return(read) -> None:
    said = read(json.dumps(LINE | {"expect_return_s": 8}))
    assert [request.expect_return_s for request in said.requests] == [8.0]
    said = read(f"{HEAD},expect_return_s\n0,a,100,5,2.5\n9,a,120,5,\n")
    assert [request.expect_return_s for request in said.requests] == [2.5, None]
    said = read(json.dumps(LINE | {"tool": "search"}))
    assert [request.tool for request in said.requests] == ["search"]
    said = read(f"{HEAD},tool\n0,a,100,5,search\n9,a,120,5,\n")
    assert [request.tool for request in said.requests] == ["search", ""]
    with pytest.raises(TraceError, match=r"line 1: tool must be a tool's name, of at most 256 "):
        read(json.dumps(LINE | {"tool": 5}))
    sentence = r"line 1: expect_return_s must be a number of seconds above 0, and at most 2592000 .30 days., not "
    for seconds in (0, 2592001):  # a replay gives hints as a client does
        with pytest.raises(TraceError, match=f"{sentence}{seconds}"):
            read(json.dumps(LINE | {"expect_return_s": seconds}))


def test_the_excerpt() -> None:
    trace = read_trace(EXCERPT)
    assert len(trace.requests) == 1000
    assert trace.distinct_blocks == len({i for line in EXCERPT.open() for i in json.loads(line)["hash_ids"]})
    assert all(one.prompt_blocks == len(one.keys) == one.input_tokens // 512 for one in trace.requests)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"timestamp": "noon"}, "timestamp must be a number of milliseconds, 0 or more, not 'noon'"),
        ({"input_length": 0}, "input_length must be a whole number of tokens, 1 or more, not 0"),
        ({"input_length": 7.5}, "input_length must be a whole number of tokens, 1 or more, not 7.5"),
        ({"output_length": None}, "output_length must be a whole number of tokens, 0 or more, not None"),
        ({"hash_ids": [1, 2]}, "hash_ids must be 3 ids, one for each 512 tokens of the input_length 1100, not 2"),
        ({"hash_ids": 7}, "hash_ids must be a list of whole numbers, one a block of the prompt, not 7"),
        (
            {"hash_ids": [2, 1, 3]},
            "hash_ids has 2 first, but line 1 has it after 1: an id stands for all of the prompt up to its block",
        ),
    ],
)
def test_a_mistake_in_mooncakes_format(read, change, sentence) -> None:
    with pytest.raises(TraceError) as error:
        read(f"{json.dumps(LINE)}\n{json.dumps(LINE | change)}\n")
    assert str(error.value) == f"trace, line 2: {sentence}"


def test_a_field_is_missing(read) -> None:
    with pytest.raises(TraceError) as error:
        read(json.dumps({name: value for name, value in LINE.items() if name != "hash_ids"}))
    assert str(error.value) == (
        "trace, line 1: hash_ids must be a list of whole numbers, one a block of the prompt, not missing"
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{json.dumps(LINE)}\n{{", "trace, line 2: is not valid JSON"),
        (
            f"{json.dumps(LINE)}\n[]",
            "trace, line 2: must be an object with timestamp, input_length, output_length, hash_ids",
        ),
        (f"{HEAD}\n", "trace: there are no requests in it"),
        ("", "trace, line 1: there is no column time_s: time_s, session_id, input_tokens, output_tokens are needed"),
        (f"{HEAD},prefix\n", "trace, line 1: unknown column 'prefix' (did you mean 'prefix_id'?)"),
        (f"{HEAD}\n1,a,5,5\n1,a,5\n", "trace, line 3: must have 4 values, one a column"),
        (f"{HEAD}\n1,a,5,5\n,a,5,5\n", "trace, line 3: time_s must be a number of seconds, 0 or more, not missing"),
        (f"{HEAD}\n1,a,no,5\n", "trace, line 2: input_tokens must be a whole number of tokens, 1 or more, not 'no'"),
        (
            f"{HEAD},prefix_id\n1,a,5,5,p\n",
            "trace, line 2: prefix_id and prefix_tokens must be given together",
        ),
        (
            f"{HEAD},prefix_id,prefix_tokens\n1,a,5,5,p,6\n",
            "trace, line 2: prefix_tokens must be at most input_tokens, which is 5, not 6",
        ),
        (
            f"{HEAD},prefix_id,prefix_tokens\n1,a,5,5,p,4\n2,a,9,5,q,4\n",
            "trace, line 3: prefix_id and prefix_tokens must be ('p', 4) as before in the session 'a', not ('q', 4)",
        ),
    ],
)
def test_a_mistake(read, text, sentence) -> None:
    with pytest.raises(TraceError) as error:
        read(text)
    assert str(error.value) == sentence


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot be read: No such file or directory$"):
        read_trace(tmp_path / "none")
    (tmp_path / "noise").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(TraceError, match=r"is no text: a trace is JSON lines or CSV in UTF-8$"):
        read_trace(tmp_path / "noise")


# -- what a CSV says about who shares what ----------------------------------------------------------------


def test_a_session_goes_on_from_what_it_said(read) -> None:
    trace = read(f"{HEAD}\n5,a,20,9\n1,a,10,6\n2,b,10,6\n", block_tokens=4)
    first, other, second = keys_of(trace)
    assert [request.session for request in trace.requests] == ["a", "b", "a"]
    assert [request.prompt_blocks for request in trace.requests] == [2, 2, 5]
    assert len(first) == 3  # 15 tokens are computed: the last one of the answer is not
    assert len(second) == 7
    assert second[:3] == first
    assert not set(other) & set(second)
    assert trace.distinct_blocks == 10


def test_a_shorter_prompt_takes_back_what_followed(read) -> None:
    first, second, third = keys_of(read(f"{HEAD}\n1,a,12,5\n2,a,9,8\n3,a,16,1\n", block_tokens=4))
    assert second[:2] == first[:2]
    assert not set(second[2:]) & set(first)
    assert third == second


def test_a_prefix_is_shared_as_far_as_whole_blocks_go(read) -> None:
    text = f"{HEAD},prefix_id,prefix_tokens\n1,a,14,1,p,10\n2,b,14,1,p,10\n3,c,14,1,q,10\n4,d,14,1,,\n5,e,14,1,p,5\n"
    a, b, c, d, e = keys_of(read(text, block_tokens=4))
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert not set(a) & (set(c) | set(d))
    assert e[0] == a[0]
    assert e[1] != a[1]


def test_requests_without_a_session_are_on_their_own(read) -> None:
    trace = read(f"{HEAD}\n1,,8,1\n2,,8,1\n", block_tokens=4)
    one, other = keys_of(trace)
    assert not set(one) & set(other)
    assert trace.requests[0].session is None
