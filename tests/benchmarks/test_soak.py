"""`manthan bench soak`: one round on a real server, what it counts, and that it says what is wrong."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_command import is_png, refusal, report, run

from manthan.benchmarks.endpoint import ServerError
from manthan.benchmarks.soak_memory import MemorySampler, Sample, group_rss, slope
from manthan.benchmarks.soak_report import failed, total
from manthan.benchmarks.soak_requests import CHATS, LEAVE_AFTER, LEGS, MIX, Kind, Outcome, Sender
from manthan.benchmarks.soak_run import Tally
from manthan.benchmarks.tables import MODEL


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One round with short answers; `folder` is where it is."""
    folder = tmp_path_factory.mktemp("soak")
    return report(folder, "soak", "--scale", 0.05, "--warm-up", 5) | {"folder": folder}


@pytest.mark.slow
def test_all_requests_of_a_round_are_answered_rightly(found: dict[str, Any]) -> None:
    assert found["rounds"] == 1
    assert {name: kind["requests"] for name, kind in found["kinds"].items()} == {
        "short": 12,
        "long": 10,
        "multi-turn": 16,
        "tool call": 8,
        "streamed": 12,
        "left midway": 9,
    }
    assert (total(found, "errors"), total(found, "misled"), total(found, "checked")) == (0, 0, 55)
    assert found["tools"] == "messages"
    assert found["messages"] == failed(found) == []


@pytest.mark.slow
def test_tokens_are_counted(found: dict[str, Any]) -> None:
    tokens = {name: kind["tokens"] for name, kind in found["kinds"].items()}
    whole = 9 * round(0.05 * 450)
    assert 9 * LEAVE_AFTER <= tokens["left midway"] < whole  # a chunk may bring several
    assert tokens["long"] == 10 * round(0.05 * 350)
    assert tokens["multi-turn"] == 16 * 4


@pytest.mark.slow
def test_sessions_go_cold_and_return_and_the_store_overflows(found: dict[str, Any]) -> None:
    manthan = {name.removeprefix("vllm:manthan_"): value for name, value in found["manthan"].items()}
    chats = found["kinds"]["multi-turn"]
    assert manthan["restored_blocks_total"] + manthan["prefetched_blocks_total"] >= 8 * 27  # of 12 returns of 28 blocks
    assert chats["cached"] >= 0.5 * chats["prompt"]
    assert manthan["evictions_total"] >= 40
    assert manthan["dropped_blocks_total"] > 0
    assert manthan.get("failures_total", 0) == 0
    assert manthan["hints_total"] == chats["requests"]


@pytest.mark.slow
def test_nothing_is_left_when_all_is_quiet(found: dict[str, Any]) -> None:
    left = found["left"]
    assert left["pool_in_use"] == left["sessions_not_cold"] == 0
    assert 0 < left["cold_bytes"] <= left["cold_budget_bytes"]


@pytest.mark.slow
def test_memory_is_that_of_all_processes(found: dict[str, Any]) -> None:
    seconds, nbytes, processes = zip(*found["memory"], strict=True)
    assert min(processes) >= 2  # the server, and its engine
    assert min(nbytes) > 500 << 20
    assert seconds[-1] > 5
    assert found["slope"] is not None


@pytest.mark.slow
def test_the_plot_is_drawn_again(found: dict[str, Any]) -> None:
    plot = found["folder"] / "soak.png"
    assert is_png(plot)
    plot.unlink()
    result = run("soak", "--plot-only", plot.with_suffix(".json"))
    assert result.exit_code == 0, result.output
    assert is_png(plot)
    assert "Left when all is quiet: 0.0% of the pool" in result.output


@pytest.mark.slow
def test_what_is_wrong_is_said(found: dict[str, Any]) -> None:
    kinds = found["kinds"] | {"long": {"requests": 10, "errors": 2, "wrong": 3, "misled": 1}}
    left = {"pool_in_use": 0.25, "sessions_not_cold": 3.0, "cold_bytes": 2.0, "cold_budget_bytes": 1.0}
    assert failed(found | {"kinds": kinds, "left": left}) == [
        "2 requests failed",
        "1 answers were wrong that are right when computed anew",
        "25.0% of the pool is still in use",
        "3 sessions are not cold",
        "the cold store is over its budget",
    ]


def test_a_whole_round_is_67_requests_and_more_than_10_000_tokens() -> None:
    assert sum(sum(mix.per_leg) for mix in MIX.values()) == 67
    lengths = {kind: LEAVE_AFTER if kind is Kind.left else mix.answer_tokens for kind, mix in MIX.items()}
    assert sum(sum(mix.per_leg) * lengths[kind] for kind, mix in MIX.items()) > 10_000


def test_each_leg_has_a_turn_of_each_chat() -> None:
    sender, rng = Sender(None, str(MODEL), 1, True, True), random.Random(0)
    chats = [sender.new_chat(rng) for _ in range(CHATS)]
    legs = [[job.kind for job in sender.leg(rng, leg, chats)] for leg in range(LEGS)]
    assert [leg.count(Kind.chat) for leg in legs] == [CHATS] * LEGS
    assert sum(map(len, legs)) == 67


def test_a_wrong_answer_and_an_error_are_counted() -> None:
    tally = Tally()
    tally.add(Outcome(Kind.long, 10, 0, 4, right=False, misled=True))
    tally.add(Outcome(Kind.long, 10, 0, 4, right=True))
    tally.add(Outcome(Kind.long, error="it broke"))
    tally.add(Outcome(Kind.short, 10, 0, 4))
    assert tally.counts[Kind.long] == {
        "requests": 3, "tokens": 8, "prompt": 20, "cached": 0, "checked": 2, "wrong": 1, "misled": 1, "errors": 1
    }  # fmt: skip
    assert tally.counts[Kind.short]["checked"] == 0
    assert tally.errors == ["long: it broke"]


def test_the_slope_is_that_of_the_samples_after_the_warm_up() -> None:
    rng = random.Random(0)
    samples = [Sample(s, int((1000 if s < 60 else 100 + s / 36 + rng.gauss(0, 1)) * 2**20), 2) for s in range(3600)]
    found = slope(samples, 60)
    assert found is not None
    assert found.mib_per_hour == pytest.approx(100, abs=5 * found.standard_error)
    assert 0.02 < found.standard_error < 0.1  # 1 / (hours' spread · root of 3540)
    assert slope(samples[:5], 3) is None


def test_a_group_is_all_that_a_process_started() -> None:
    """A parent that holds little and a child that holds 64 MiB."""
    child = "import sys; held = bytearray(b'x' * (64 << 20)); print('up', flush=True); sys.stdin.read()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with MemorySampler(process.pid) as memory:
            sizes = group_rss(process.pid)
        process.communicate()
    assert len(sizes) == 2
    assert sum(sizes) > 64 << 20
    assert memory.samples[0].nbytes > 64 << 20
    assert memory.samples[0].processes == 2
    assert os.getpgid(0) != process.pid


def test_a_model_that_cannot_chat_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    assert "has no weights or no tokenizer.json: name one that can chat" in refusal("soak", "--model", tmp_path)


def test_a_server_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    result = run("soak", "--flags=--no-such-flag", "--out", tmp_path)
    assert result.exit_code == 1
    assert "The server died (exit status" in result.output
    assert issubclass(ServerError, RuntimeError)
