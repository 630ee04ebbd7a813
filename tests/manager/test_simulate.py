"""`manthan simulate` and `manthan workload`, end to end."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from traces import EXCERPT
from typer.testing import CliRunner, Result

from manthan.manager.cli import app
from manthan.manager.sessions.blocks import BlockTable
from manthan.manager.sessions.session import Block
from manthan.manager.simulator.traces import read_trace
from manthan.policies import policy_names

PNG = b"\x89PNG\r\n"
CSV = "time_s,session_id,input_tokens,output_tokens\n"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 300 requests."""
    path: Path = tmp_path_factory.mktemp("traces") / "short.jsonl"
    path.write_text("".join(EXCERPT.read_text().splitlines(keepends=True)[:300]))
    return path


def figures(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return rows


def test_a_table_json_and_a_plot(short: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    result = run(
        *("simulate", short, "--policy", "lru,lru", "--hot", "0,130k", "--cold", "2%,51200"),
        *("--jobs", 2, "--json", rows, "--plot", plot),
    )
    assert result.exit_code == 0, result.output
    head, *lines = result.stdout.splitlines()
    assert head.split()[:3] == ["policy", "hot", "tokens"]
    assert [line.split()[:3] for line in lines] == 2 * [
        ["lru", "0", f"{int(0.02 * read_trace(short).distinct_blocks) * 512:,}"],
        ["lru", "0", "51,200"],
        ["lru", "129,536", f"{int(0.02 * read_trace(short).distinct_blocks) * 512:,}"],
        ["lru", "129,536", "51,200"],
    ]
    assert plot.read_bytes().startswith(PNG)
    assert [row.pop("replay_s") > 0 for row in figures(rows)] == [True] * 8
    for row in figures(rows):
        assert row["hot_share"] + row["restored_share"] + row["recomputed_share"] == pytest.approx(1)
        assert 0 < row["found_share"] <= row["best_share"] < 1
        assert row["peak_cold_blocks"] <= row["cold_blocks"]
        assert row["peak_hot_blocks"] <= row["hot_blocks"]
        assert row["bytes_out"] == row["blocks_out"] * 512 * 28_800
    first, second = figures(rows)[:4], figures(rows)[4:]
    for row in first + second:
        del row["replay_s"]
    assert json.loads(rows.read_text())["trace"]["requests"] == 300
    assert [{**row, "replay_s": 0} for row in first] == [{**row, "replay_s": 0} for row in second]


def test_flags_change_what_happens(short: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    cost = tmp_path / "cost.yaml"
    cost.write_text("{first_token_s: 100, code_bytes_per_token: 2}")

    def one(*flags: object) -> dict[str, Any]:
        result = run("simulate", short, "--hot", "130k", "--cold", "400k", "--json", path, *flags)
        assert result.exit_code == 0, result.output
        return figures(path)[0]

    plain = one()
    assert one("--hot", "10M")["evictions"] < one("--hot", "10M", "--idle-after", 20)["evictions"]
    assert one("--low-watermark", 0, "--high-watermark", 0)["peak_cold_blocks"] <= plain["peak_cold_blocks"]
    assert one("--min-tokens", 10**6)["blocks_out"] == 0
    assert one("--prefill-slots", 1)["first_token_mean_s"] > plain["first_token_mean_s"]
    assert one("--measure-from", 0.75)["requests"] == 75
    dear = one("--cost", cost)
    assert dear["first_token_mean_s"] > 100
    assert dear["bytes_out"] == dear["blocks_out"] * 512 * 2


@pytest.mark.parametrize("policy", policy_names())
def test_every_policy_can_be_asked_for(policy: str) -> None:
    result = run("simulate", EXCERPT, "--policy", policy, "--cold", "5%")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].split()[0] == policy


def test_a_csv(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(CSV + "0,a,1000,100\n30,a,1300,50\n")
    rows = tmp_path / "rows.json"
    assert run("simulate", trace, "--cold", "4k", "--json", rows).exit_code == 0
    row = figures(rows)[0]
    assert (row["asked_blocks"], row["blocks_in"]) == (63 + 82, 1099 // 16)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cold", "5x"], "--cold must be tokens, such as 64000 or 4M, or a share, such as 5%, not '5x'"),
        (["--cold", "0"], "--cold 0 is less than a block of 512 tokens: give it more"),
        (["--hot", "100"], "--hot 100 is less than a block of 512 tokens: give it more"),
        (["--idle-after", "0"], "--idle-after must be a plain number of seconds above 0, such as 300, not 0.0"),
        (["--low-watermark", "2"], "--low-watermark must be a share of the KV pool between 0 and 1, not 2.0"),
        (["--policy", "lru:x=1"], "--policy lru:x=1: unknown lru option 'x' (there are none)"),
        (
            ["--policy", "lru,ttl:seconds=5"],
            "--policy ttl:seconds=5: unknown ttl option 'seconds' (valid: ttl_s)",
        ),
        (["--cost", "none.yaml"], "none.yaml: cannot be read: No such file or directory"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = run("simulate", EXCERPT, *arguments)
    assert result.exit_code == 1
    assert result.stderr == sentence + "\n"


def test_other_mistakes_are_one_sentence_too(tmp_path: Path) -> None:
    cost = tmp_path / "cost.yaml"
    for text, what in (
        ("first_token_s: -1", "first_token_s must be a number of seconds, 0 or more, not -1"),
        ("firsttoken: 1", "unknown key 'firsttoken' (valid: first_token_s, "),
        ("7", "must be a mapping of keys to values"),
        ("{", "is not valid YAML"),
    ):
        cost.write_text(text)
        result = run("simulate", EXCERPT, "--cost", cost)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"{cost}: {what}")
        assert result.stderr.count("\n") == 1
    result = run("simulate", EXCERPT, "--hot", "30k")
    assert result.stderr.startswith(
        "--hot 30k is too small for the largest request of mooncake_conversation_1000.jsonl,"
    )
    assert run("simulate", EXCERPT, "--policy", "lur").stderr.startswith("unknown policy 'lur': choose one of ")
    assert run("simulate", tmp_path / "no.csv").stderr.endswith("no.csv: cannot be read: No such file or directory\n")


def test_the_books_are_counted_again(short: Path) -> None:
    result = run("simulate", short, "--policy", "lru,arc", "--hot", "0,130k", "--cold", "2%", "--check", "--jobs", 2)
    assert result.exit_code == 0, result.output
    *_, last = result.stdout.splitlines()
    assert last == "--check: the books of 4 replays agreed, each 200 requests and in the end."


@pytest.mark.parametrize("hot", ["0", "130k"])
def test_books_that_do_not_agree_are_told(short: Path, hot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_all = BlockTable.forget_all

    def miscount(table: BlockTable, blocks: Iterable[Block]) -> None:
        forget_all(table, blocks)
        table.exact += 1

    monkeypatch.setattr(BlockTable, "forget_all", miscount)
    flags = ("--hot", hot, "--cold", "2%", "--jobs", 1)
    assert run("simulate", short, *flags).exit_code == 0
    result = run("simulate", short, *flags, "--check")
    assert result.exit_code == 1
    found = re.search(
        r"--check: the books do not agree, which is a bug of Manthan: lru with (\d+) hot and \d+ cold blocks, after "
        r"(\d+) requests: exact is kept as \d+, but there are \d+\n",
        result.stderr,
    )
    assert found, result.output
    assert int(found[1]) == (0 if hot == "0" else 130_000 // 512)
    assert int(found[2]) in (200, 300)


def test_without_matplotlib_a_plot_is_refused_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from manthan.manager.cli import app\n"
        f"app(['simulate', {str(EXCERPT)!r}, '--plot', 'x.png'])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "--plot needs matplotlib, which is not installed: pip install 'manthan-kv[bench]'\n"


# -- workload ---------------------------------------------------------------------------------------------


def test_a_workload_reads_back_and_is_the_same_each_time(tmp_path: Path) -> None:
    texts = [run("workload", "--sessions", 150, "--seed", seed).stdout for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    path = tmp_path / "workload.jsonl"
    path.write_text(texts[0])
    trace = read_trace(path)
    assert len(trace.requests) > 150
    assert run("simulate", path, "--cold", "5%").exit_code == 0


def test_kinds_of_sessions() -> None:
    agents = run("workload", "--sessions", 50, "--chat", 0, "--single", 0).stdout.splitlines()
    singles = run("workload", "--sessions", 50, "--chat", 0, "--agent", 0).stdout.splitlines()
    assert len(singles) == 50 < len(agents) / 5
    result = run("workload", "--chat", 0, "--agent", 0, "--single", 0)
    assert result.exit_code == 1
    assert result.stderr == "--chat, --agent, --single and --reader must not all be 0\n"
