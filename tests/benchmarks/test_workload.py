"""The made-up workload is what its parameters say."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from manthan.benchmarks.simulator.traces import read_trace
from manthan.benchmarks.workload import (
    CONTEXT_TOKENS,
    LIE_S,
    make_workload,
)

REPO = Path(__file__).parents[2]
ONLY = {"chat": 0.0, "agent": 0.0, "single": 0.0}


def test_lines_are_in_order_and_say_how_many_blocks_they_have() -> None:
    lines = make_workload(300, seed=3, hours=0.5)
    assert lines == sorted(lines, key=lambda line: line.timestamp)
    assert all(len(line.hash_ids) == -(-line.input_length // 512) for line in lines)
    assert all(0 < line.input_length <= CONTEXT_TOKENS and line.output_length > 0 for line in lines)


def test_a_session_goes_on_from_what_was_said() -> None:
    workloads = [make_workload(1, seed, **(ONLY | {"agent": 1.0})) for seed in range(20)]
    lines = max(workloads, key=len)
    assert len(lines) > 10
    for before, after in pairwise(lines):
        full = before.input_length // 512
        assert after.hash_ids[:full] == before.hash_ids[:full]
        assert after.input_length > before.input_length + before.output_length
        assert after.timestamp > before.timestamp


def test_agents_say_when_they_will_be_back_and_others_lie() -> None:
    plain = make_workload(60, seed=4, agent=50, chat=50, single=0)
    lines = make_workload(60, seed=4, agent=50, chat=50, single=0, told=1, lies=1)
    assert [line._replace(expect_return_s=None) for line in lines] == plain
    said = [line.expect_return_s for line in lines if line.expect_return_s is not None]
    assert said.count(LIE_S) > 20
    assert len(set(said)) > 100
    (agent,) = [make_workload(1, 1, told=1, **(ONLY | {"agent": 1.0}))]
    assert len(agent) > 1
    assert agent[-1].expect_return_s is None, "it does not come back"
    for before, after in pairwise(agent):
        pause = (after.timestamp - before.timestamp) / 1000 - 0.3 - 0.02 * before.output_length
        assert before.expect_return_s is not None
        assert pause / 4 < before.expect_return_s < pause * 4


def test_it_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "workload.jsonl"
    made = subprocess.run([sys.executable, "benchmarks/workload.py", "--sessions", "20"], cwd=REPO, capture_output=True)
    assert made.returncode == 0, made.stderr
    path.write_bytes(made.stdout)
    assert len(read_trace(path).requests) > 20
