"""`manthan bench agents`: sessions in closed loop, cliffs, and a small run on real servers."""

import json
import lzma
import math
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from bench_command import is_png, refusal, report, run
from documents import REPO, commands
from vllm.benchmarks.datasets.datasets import TimedTrace
from vllm.benchmarks.serve import add_cli_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from warm_server import warm_server

from manthan.benchmarks import agents_run, capacity_arms
from manthan.benchmarks.agents_report import Point, cliffs, merged, points_of, said
from manthan.benchmarks.agents_trace import Scale, agents_of, made_up_trace, read_agents, sessions_of
from manthan.benchmarks.arms import make_console
from manthan.benchmarks.endpoint import Reply
from manthan.benchmarks.load_chats import Chat, Replay, replayed
from manthan.benchmarks.progress import Bar
from manthan.benchmarks.restore import SPARE_POSITIONS
from manthan.benchmarks.served import Served
from manthan.benchmarks.shapes import PUBLIC
from manthan.codec import DEFAULT
from manthan.manager.session.blocks import LEVELS

TRACE = Path("tests/data/coding_agents.jsonl.xz")
DOCUMENT = REPO / "docs" / "agents.md"
SCALE = Scale(64, 10, 2000, 1000)


@pytest.fixture(scope="module")
def sessions() -> list[Chat]:
    return sessions_of(made_up_trace(12), SCALE)


def test_prompts_share_what_the_trace_says(sessions: list[Chat]) -> None:
    [agent, *_] = agents_of(sessions, 2, 1.0, 1.0, 0)
    said = [[*turn.said.tokens] for turn in agent.turns]
    assert [len(prompt) for prompt in said] == [len(turn.said.tokens) for turn in agent.turns]
    assert agent.turns[0].known == 0
    for before, prompt, turn in zip(said, said[1:], agent.turns[1:], strict=False):
        assert prompt[: turn.known] == before[: turn.known]
        assert turn.known + 8 > len(before) - 8, "all full blocks of the prompt before"
    others = {tuple(chat.turns[0].said.tokens[:16]) for chat in sessions}
    assert len(others) == len(sessions)


def test_agents_go_through_all_sessions_and_begin_in_the_middle_of_one(sessions: list[Chat]) -> None:
    agents = agents_of(sessions, 4, 20.0, 8.0, 1)
    assert [agent.starts_s for agent in agents] == [0.0, 2.0, 4.0, 6.0]
    names = []
    for agent in agents:
        chat: Chat | None = agent
        while chat is not None:
            names.append(chat.name)
            assert chat.turns[0].pause_s == 0.0
            chat = chat.then
    assert sorted(names) == sorted(chat.name for chat in sessions)
    whole = {chat.name: chat for chat in sessions}
    cut = [agent for agent in agents if len(agent.turns) < len(whole[agent.name].turns)]
    assert cut
    assert all(sum(turn.pause_s for turn in agent.turns) >= 20.0 for agent in cut)
    with pytest.raises(typer.BadParameter, match="the trace has 12 sessions"):
        agents_of(sessions, 13, 20.0, 8.0, 1)


def test_the_halves_of_a_trace_are_all_of_it() -> None:
    trace = made_up_trace(9)
    halves = [[chat.name for chat in sessions_of(trace, SCALE, half)] for half in (0, 1)]
    assert sorted(halves[0] + halves[1]) == sorted(chat.name for chat in sessions_of(trace, SCALE))
    assert abs(len(halves[0]) - len(halves[1])) <= 1


def test_copies_of_a_session_are_alike_but_for_their_tokens() -> None:
    trace = made_up_trace(3)
    plain, copied = sessions_of(trace, SCALE), sessions_of(trace, SCALE, copies=3)
    assert [chat.name for chat in copied[::3]] == [chat.name for chat in plain]
    assert len({chat.name for chat in copied}) == 3 * len(plain)
    for n, chat in enumerate(copied):
        first = copied[n - n % 3]
        told = [(len(turn.said.tokens), turn.answer_tokens, turn.pause_s) for turn in chat.turns]
        assert told == [(len(turn.said.tokens), turn.answer_tokens, turn.pause_s) for turn in first.turns]
    blocks = [{block for turn in chat.turns for block in turn.said.tokens.blocks} for chat in copied]
    assert not blocks[0] & blocks[1] | blocks[0] & blocks[2] | blocks[1] & blocks[2]


def test_a_trace_without_names_has_the_sessions_that_go_on() -> None:
    trace = made_up_trace(6)
    unnamed = trace._replace(requests=[request._replace(agent="") for request in trace.requests])
    turns = [[[*turn.said.tokens] for turn in chat.turns] for chat in sessions_of(unnamed, SCALE)]
    assert turns == [[[*turn.said.tokens] for turn in chat.turns] for chat in sessions_of(trace, SCALE)]


def documented(*words: str) -> list[str]:
    """Return each command of the document that has all of these words."""
    return [one.text for one in commands(DOCUMENT) if {*words} <= {*one.words}]


def shortened(lines: str) -> str:
    """Return lines of a trace as the document's command shortens them for the tests' model."""
    [command] = documented("python", "-c")
    script = shlex.split(command)[2]
    return subprocess.run(
        [sys.executable, "-c", script], input=lines, capture_output=True, text=True, check=True
    ).stdout


WHOLE = ("--timed-trace-chunk-hash-size", "512", "--timed-trace-sec-multiplier", "0.001")
"""Options for the trace as it is."""


@pytest.mark.parametrize("more", [(), WHOLE], ids=["short", "whole"])
def test_vllm_s_client_asks_the_same(more: tuple[str, ...], tmp_path: Path) -> None:
    """The commands of the document: times, numbers of tokens, and as far as which block prompts begin alike."""
    [command], [ours] = documented("vllm", "bench", "serve"), documented("manthan", "bench", "load", "--trace")
    shrink, speed = (
        1.0 if more else float(ours.partition(f"{name} ")[2].split()[0]) for name in ("--shrink", "--speed")
    )
    with lzma.open(TRACE, "rt") as file:
        lines = "".join(islice(file, 12))
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    options = vars(parser.parse_args([*shlex.split(command)[3:], *more]))
    first, theirs = tmp_path / "first.jsonl", tmp_path / "theirs.jsonl"
    first.write_text(lines)
    theirs.write_text(lines if more else shortened(lines))
    assert options["num_prompts"] >= 12
    samples = TimedTrace(**options | {"dataset_path": str(theirs)}).sample(Tokenizer(), options["num_prompts"])
    chats = replayed(Replay(first, speed, shrink, 0), read_agents(str(first)), 1 << 20, 1000)
    turns = [turn for chat in chats for turn in chat.turns]
    assert [len(turn.said.tokens) for turn in turns] == [sample.prompt_len for sample in samples]
    assert [turn.answer_tokens for turn in turns] == [sample.expected_output_len for sample in samples]
    assert [chat.starts_s for chat in chats] == pytest.approx([one.timestamp - samples[0].timestamp for one in samples])
    block = options["timed_trace_chunk_hash_size"]
    shared = [alike(a.said.tokens, b.said.tokens) // block for a, b in combinations(turns, 2)]
    assert shared == [alike(a.prompt, b.prompt) // block for a, b in combinations(samples, 2)]
    assert max(shared) > 100
    names = [json.loads(line)["session_id"] for line in lines.splitlines()]
    for session in sessions_of(read_agents(str(first)), Scale(shrink, speed, 1 << 20, 1000)):
        mine = [sample for sample, name in zip(samples, names, strict=True) if name == session.name]
        told = [(len(turn.said.tokens), turn.answer_tokens) for turn in session.turns]
        assert told == [(sample.prompt_len, sample.expected_output_len) for sample in mine]
        pauses = [after.timestamp - before.timestamp for before, after in pairwise(mine)]
        assert [turn.pause_s for turn in session.turns[1:]] == pytest.approx(pauses)
        for (one, other), (a, b) in zip(pairwise(session.turns), pairwise(mine), strict=True):
            assert alike(one.said.tokens, other.said.tokens) // block == alike(a.prompt, b.prompt) // block


@pytest.mark.slow
def test_vllm_s_client_replays_the_trace_on_a_server(tmp_path: Path) -> None:
    """As the document says, with the trace's first requests."""
    with lzma.open(TRACE, "rt") as file:
        lines = shortened("".join(islice(file, 3)))
    (tmp_path / "short.jsonl").write_text(lines)
    [command] = documented("vllm", "bench", "serve", "short.jsonl")
    size = ("--dtype", "bfloat16", "--block-size", "32", "--num-gpu-blocks-override", "256", "--max-model-len", "4096")
    with warm_server(str(REPO / "tests/data/tiny-llama"), [*size, "--enforce-eager"], tmp_path / "log") as server:
        server.wait_until_ready(300)
        program = str(Path(sys.executable).with_name("vllm"))
        more = ("--base-url", server.url, "--save-result", "--result-filename", "found.json")
        subprocess.run([program, *shlex.split(command)[1:], *more], cwd=tmp_path, check=True)
        metrics = server.metrics()
    found, asked = json.loads((tmp_path / "found.json").read_text()), [json.loads(line) for line in lines.splitlines()]
    assert (found["completed"], found["failed"]) == (3, 0)
    for name, counter in (("input", "prompt"), ("output", "generation")):
        tokens = sum(each[f"{name}_length"] for each in asked)
        assert found[f"total_{name}_tokens"] == metrics[f"vllm:{counter}_tokens_total"] == tokens


def test_a_model_may_be_the_name_of_a_public_shape(tmp_path: Path) -> None:
    """Its vocabulary and its longest context are those of the shape."""
    size = ("--model", "gpt-oss-20b", "--agents", 2, "--seconds", 600, "--shrink", 1, "--faster", 10)
    assert run("agents", "made-up", *size, "--weka", tmp_path / "weka", "--out", tmp_path).exit_code == 0
    theirs = [json.loads(path.read_text()) for path in (tmp_path / "weka").iterdir()]
    assert {Path(each["models"][0]).name for each in theirs} == {"gpt-oss-20b-shape"}
    longest = max(one["in"] + one["out"] for each in theirs for one in each["requests"])
    assert 8192 < longest < PUBLIC["gpt-oss-20b"].config["max_position_embeddings"]


def test_aiperf_is_given_what_the_agents_ask(tmp_path: Path) -> None:
    """A request has as many tokens, the same pause after the answer before, and the same blocks."""
    size = ("--agents", 3, "--seconds", 600, "--shrink", 64, "--faster", 10)
    assert run("agents", "made-up", *size, "--weka", tmp_path / "weka", "--out", tmp_path).exit_code == 0
    longest = Served.choose(None, 0, tmp_path, False).shape.positions - 2 * SPARE_POSITIONS
    agents = agents_of(sessions_of(read_agents("made-up"), Scale(64, 10, longest, 1000)), 3, 600.0, 200.0, 0)
    for agent in agents:
        theirs = json.loads((tmp_path / "weka" / f"{agent.name}.json").read_text())
        assert theirs["hash_id_scope"] == "local"
        requests, prompts = theirs["requests"], [turn.said.tokens for turn in agent.turns]
        assert [one["in"] for one in requests] == [len(prompt) for prompt in prompts]
        assert [one["out"] for one in requests] == [turn.answer_tokens for turn in agent.turns]
        pauses = [b["t"] - a["t"] for a, b in pairwise(requests)]
        assert pauses == pytest.approx([turn.pause_s for turn in agent.turns[1:]])
        block = theirs["block_size"]
        for (one, prompt), (other, later) in pairwise(zip(requests, prompts, strict=True)):
            assert alike(one["hash_ids"], other["hash_ids"]) == alike([*prompt], [*later]) // block


def test_sub_agents_of_the_trace_have_files_too(tmp_path: Path) -> None:
    """Their names have a slash."""
    size = ("--agents", 96, "--half", "odd", "--seconds", 1, "--shrink", 64)
    assert run("agents", str(TRACE), *size, "--weka", tmp_path / "weka", "--out", tmp_path).exit_code == 0
    names = {json.loads(path.read_text())["id"] for path in (tmp_path / "weka").iterdir()}
    assert len(names) == 96
    assert any("/" in name for name in names)


class Tokenizer:
    """As much of one as the client of vLLM needs."""

    all_special_ids: tuple[int, ...] = ()

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(1000)}


def alike(one: Any, other: Any) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def point(arm: str, agents: int, p50: float, p90: float, unfair: float = 1.0) -> Point:
    return Point(arm, agents, 10, {"p50": p50, "p90": p90, "p99": p90}, {}, 0.5, 1.0, 5, math.nan, unfair, 0.0, 0)


def test_a_cliff_is_the_last_number_before_the_first_that_is_too_slow() -> None:
    points = [point("a", 4, 0.1, 1), point("b", 4, 1, 3), point("a", 8, 0.8, 3), point("a", 16, 1, 1)]
    assert cliffs(points, 2.0) == {"a": 4, "b": 0}
    steep, never = said({"bound_s": 2.0}, points)
    assert "with 8, p50 is 8.0 times as long" in steep
    assert "up to 0 agents" in never
    assert "slowest" not in never


def test_a_cliff_says_whether_the_slowest_agent_waits_at_most_three_times_as_long_as_the_median_one() -> None:
    points = [point("a", 4, 1, 1, 9.0), point("a", 8, 1, 1, 3.0), point("b", 8, 1, 1, 3.02), point("b", 16, 1, 9, 1.0)]
    fair, unfair = said({"bound_s": 2.0}, points)
    assert "the slowest agent's mean wait is 3.00 times the median agent's, at most 3" in fair
    assert "the slowest agent's mean wait is 3.02 times the median agent's, more than 3" in unfair


def test_returns_that_found_all_and_the_levels_of_restored_blocks_are_counted() -> None:
    def asked(cached: int, turn: int = 2) -> dict[str, Any]:
        told = {"chat": 0, "turn": turn, "sent_s": 9.0, "error": "", "ttft_s": 1.0, "known_tokens": 100}
        return told | {"prompt_tokens": 120, "cached_tokens": cached}

    counters = {"manthan_restored_levels_total{0}": 1.0, "manthan_restored_levels_total{2}": 3.0}
    point = {"requests": [asked(100), asked(95), asked(94), asked(0, turn=1)], "counters": counters, "ramp_s": 5.0}
    late = point | {"ramp_s": 9.5}
    report = {"runs": [{"arm": "host", "points": {"1": point, "2": point | {"counters": {}}, "3": late}}]}
    one, two = points_of(report | {"token_nbytes": 1, "bound_s": 2.0})
    assert (one.returns, one.kept) == (3, 2)
    assert one.divergence == pytest.approx((LEVELS[0].divergence + 3 * LEVELS[2].divergence) / 4)
    assert math.isnan(two.divergence)
    assert said(report | {"bound_s": 2.0}, [one, two])[-1].endswith(f"{one.divergence:.4f} nats on average")


# -- a run that is stopped ------------------------------------------------------------------------------


class StandIn:
    """Server in this process. It finds all that is known, and stops the run in the `last` of its measurements.

    It counts the requests of a measurement from `ramp_s` on, and sends Ctrl-C with number `count`.
    """

    url = "stand-in"

    def __init__(self, last: int, count: int, ramp_s: float) -> None:
        self._last, self._count, self._ramp_s = last, count, ramp_s
        self._measurement, self._began, self._late = 1, 0.0, 0
        self._lock = threading.Lock()

    def samples(self, *_: str) -> list[tuple[str, dict[str, str], float]]:
        return []

    def reset_prefix_cache(self, _external: bool) -> None:
        self._measurement, self._began, self._late = self._measurement + 1, 0.0, 0

    def complete(self, prompt: list[int], max_tokens: int, **_: Any) -> Reply:
        with self._lock:
            self._began = self._began or time.monotonic()
            self._late += time.monotonic() - self._began >= self._ramp_s
            if self._measurement == self._last and self._late == self._count:
                self._late += 1
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.01)
        return Reply("", len(prompt), 0, 0.01, generated_tokens=max_tokens, token_ids=(1,) * max_tokens)


def stopped_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: StandIn, counts: str, ramp_s: float
) -> tuple[str, Any]:
    """Return the output and the report of a run in which `server` stands in for each arm's server."""

    @contextmanager
    def serving(_: Any, __: Any, arm: Any, *___: Any) -> Iterator[Any]:
        yield server, Bar(make_console(), arm.name), {"arm": arm.name}

    monkeypatch.setattr(agents_run, "serving", serving)
    size = ("--agents", counts, "--seconds", 2, "--ramp", ramp_s, "--faster", 1000, "--arms", "plain,offload")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        done = run("agents", "made-up", *size, "--out", tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 1, done.output
    return done.output, json.loads((tmp_path / "agents.json").read_text())


def test_a_stopped_measurement_is_kept_and_marked_and_counts_in_no_cliff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, found = stopped_run(tmp_path, monkeypatch, StandIn(2, 8, 0.4), "2,4", 0.3)
    assert found["errors"] == {"plain": "stopped"}
    [only] = found["runs"]
    whole, part = only["points"]["2"], only["points"]["4"]
    assert whole["stopped_s"] is None
    assert 0.3 < part["stopped_s"] <= part["wall_s"]
    assert len(part["requests"]) >= 8
    assert max(one["sent_s"] for one in part["requests"]) < part["seconds"]
    points = points_of(found)
    assert [(each.agents, each.stopped_s) for each in points] == [(2, None), (4, part["stopped_s"])]
    assert cliffs(points, 2.0) == {"plain": 2}
    assert re.search(r"^ *4\* .*plain", output, re.MULTILINE)
    assert f"* plain, 4 agents: stopped after {part['stopped_s']:.1f} of 2 s, not counted in a cliff" in output
    assert is_png(tmp_path / "agents.png")


def test_a_measurement_that_is_stopped_in_its_ramp_has_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, found = stopped_run(tmp_path, monkeypatch, StandIn(1, 5, 0.0), "8", 1.8)
    [only] = found["runs"]
    assert len(only["points"]["8"]["requests"]) >= 5
    assert points_of(found) == []
    assert "* plain, 8 agents: stopped after " in output
    assert "of 2 s, before all agents had begun: no row" in output


def test_a_stopped_measurement_is_no_repeat_of_a_whole_one() -> None:
    one = {"chat": 0, "turn": 2, "sent_s": 9.0, "error": "", "ttft_s": 1.0, "known_tokens": 9, "prompt_tokens": 9}
    whole = {"requests": [one | {"cached_tokens": 9}], "counters": {}, "ramp_s": 5.0}
    part = {"requests": [one | {"cached_tokens": 0}], "counters": {}, "ramp_s": 5.0, "stopped_s": 9.5}
    early = part | {"stopped_s": 4.0}
    runs = [{"arm": "host", "points": {"4": point}} for point in (whole, part, early, whole)]
    points = points_of({"runs": runs, "token_nbytes": 1})
    assert [(each.stopped_s, each.returns, each.found) for each in points] == [(None, 2, 1.0), (9.5, 1, 0.0)]


# -- the command ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (("made-up", "--agents", "4,x"), "--agents must be whole numbers"),
        (("made-up", "--agents", 500), "--agents 500 is too many"),
        (("made-up", "--pool", "1MiB"), "--pool must have room for a prompt"),
        (
            ("made-up", "--model", "qwen"),
            "--model qwen has no config.json: name the folder of a model, or a shape: qwen3-8b, ",
        ),
        (("nowhere.jsonl",), "cannot be read"),
        (("made-up", "other.json"), "only --plot-only takes several files"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(arguments: tuple[Any, ...], refused: str, tmp_path: Path) -> None:
    assert refused in refusal("agents", *arguments, "--out", tmp_path)


def test_agents_on_a_real_server_find_what_outgrows_the_pool(tmp_path: Path) -> None:
    """A run of one arm, as small as it can be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity_arms, "VllmServer", warm_server)
        size = ("--agents", "10", "--seconds", 6, "--ramp", 2, "--faster", 80, "--idle-after", 0.2)
        found = report(tmp_path, "agents", "made-up", "--arms", "host", *size)
    (point,) = points_of(found)
    assert point.errors == 0
    assert point.alive_nbytes > found["memory"]["pool_nbytes"]
    assert 0 < point.found <= point.possible + 0.02
    (counted,) = (of["counters"] for run in found["runs"] for of in run["points"].values())
    assert counted["manthan_restored_blocks_total"] > 0
    (log,) = tmp_path.glob("agents-host-*.log")
    assert "Resetting prefix cache" in log.read_text()
    assert "the cold store is emptied" not in log.read_text()
    assert is_png(tmp_path / "agents.png")


@pytest.mark.slow
def test_what_outgrows_the_pool_is_found_by_manthan_and_computed_by_plain_vllm(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capacity_arms, "VllmServer", warm_server)
        size = ("--agents", "2,10", "--seconds", 12, "--ramp", 4, "--faster", 40, "--idle-after", 0.2)
        found = report(tmp_path, "agents", "made-up", *size)
    points = {(each.arm, each.agents): each for each in points_of(found)}
    plain, ours = points["plain", 10], points[f"host {DEFAULT}", 10]
    assert plain.found < ours.found <= 1
    assert all(each.errors == 0 and each.found <= each.possible + 0.02 for each in points.values())
    assert ours.alive_nbytes > found["memory"]["pool_nbytes"]
    assert is_png(tmp_path / "agents.png")
    files = [tmp_path / "agents.json"] * 2
    assert points_of(merged(files)) == points_of(found)
