"""Reading traces, and one sentence for every mistake."""

import json
from pathlib import Path

import pytest
from traces import EXCERPT

from manthan.benchmarks.simulator.traces import HASH_NBYTES, Trace, TracedRequest, TraceError, read_trace

LINE = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}


@pytest.fixture
def read(tmp_path: Path):
    def write_and_read(text: str) -> Trace:
        path = tmp_path / "trace"
        path.write_text(text)
        return read_trace(path)

    return write_and_read


def test_mooncake(read) -> None:
    later = LINE | {"timestamp": 2500, "hash_ids": [1, 2, 4]}
    trace = read(json.dumps(later) + "\n\n" + json.dumps(LINE))
    assert trace == Trace(
        "trace",
        512,
        [
            TracedRequest(0, None, trace.requests[1].hashes, 2, 1100, 5),
            TracedRequest(2.5, None, trace.requests[0].hashes, 2, 1100, 5),
        ],
        4,
    )
    hashes = trace.requests[0].hashes
    assert (len(set(hashes)), [len(name) for name in hashes]) == (2, [HASH_NBYTES] * 2)


def test_what_the_client_says_of_its_return(read) -> None:
    said = read(json.dumps(LINE | {"expect_return_s": 8}))
    assert [request.expect_return_s for request in said.requests] == [8.0]
    said = read(json.dumps(LINE | {"tool": "search"}))
    assert [request.tool for request in said.requests] == ["search"]
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
    assert all(one.prompt_blocks == len(one.hashes) == one.input_tokens // 512 for one in trace.requests)


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
        ("", "trace: there are no requests in it"),
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
    with pytest.raises(TraceError, match=r"is no text: a trace is JSON lines in UTF-8$"):
        read_trace(tmp_path / "noise")
