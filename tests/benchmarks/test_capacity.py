"""`manthan bench capacity` on real servers, at a small size: figures, files, plots, mistakes."""

import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import pytest
import typer
from bench_command import is_png, refusal, report, run
from rich.console import Console

from manthan.benchmarks import settle
from manthan.benchmarks.arms import make_console, read_report, run_jobs
from manthan.benchmarks.capacity_arms import make_arm, read_budgets, read_codecs, split
from manthan.benchmarks.capacity_report import Found, found_in, gains, make_table
from manthan.benchmarks.capacity_run import divergence, duration, where_held
from manthan.benchmarks.endpoint import ServerError
from manthan.benchmarks.served import Served
from manthan.benchmarks.server import VllmServer
from manthan.benchmarks.tables import MODEL
from manthan.benchmarks.whole_blocks import DISTRIBUTION, write_plugin
from manthan.codec import DEFAULT
from manthan.manager.session.blocks import LEVELS
from manthan.manager.session.manager import SessionManager

TOKENS = 528
"""16 full blocks and a half: both questions of a session stand in the half."""
BUDGET = 8 << 20
OURS = f"host {DEFAULT}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a run of both arms in one budget."""
    size = ("--tokens", TOKENS, "--budgets", "8MiB")
    return report(tmp_path_factory.mktemp("capacity"), "capacity", "--arms", "plain,host", *size)


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served.choose(None, 0, tmp_path, on_gpu=False)


@pytest.mark.slow
def test_manthan_keeps_four_times_the_sessions_in_the_same_memory(found: dict[str, Any]) -> None:
    plain, host = (next(one for one in found_in(found) if one.arm == arm) for arm in ("plain", OURS))
    assert plain.budget == host.budget == BUDGET
    assert plain.kept >= 3
    assert host.kept >= 4 * plain.kept
    assert gains([plain, host])[(OURS, BUDGET)] == host.kept / plain.kept
    assert plain.nbytes == 16 * 128 * 1024
    exact = 4 / 512  # of the tokens in full blocks
    assert host.nbytes < plain.nbytes * (exact + (1 - exact) / 4.6)  # what is left of others counts, too


@pytest.mark.slow
def test_every_returning_session_is_answered_rightly(found: dict[str, Any]) -> None:
    returns = [one for run in found["runs"] for level in run["levels"] for one in level["returns"]]
    assert len(returns) >= 2 * (4 + 10)
    assert all(one["was_right"] and one["is_right"] for one in returns)
    assert all(level["failures"] == 0 for run in found["runs"] for level in run["levels"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--arms", "plain,hots"),
            "--arms hots is unknown: there are plain, offload, host, whole, device, redis,",
        ),
        (("--codecs", "lloyd9"), "--codecs lloyd9 is unknown: there are auto, wht-5x,"),
        (("--budgets", "64 apples"), "--budgets must be sizes with commas between, such as 64MiB,128MiB, not"),
        (("--budgets", "4MiB"), "--budgets: 4.0MiB is too small for sessions of 2000 tokens of tiny-llama: name 20."),
        (("--tokens", "100"), "--tokens must be 512 or more, not 100"),
        (("--tokens", "9000"), "--tokens 9000 is too long for tiny-llama: it has 8192 positions"),
        (("--model", "nowhere"), "--model nowhere has no config.json: name the folder of a model"),
        (
            ("--arms", "redis", "--redis-url", "redis://127.0.0.1:1/0"),
            "--redis-url: Redis at redis://127.0.0.1:1/0 does not answer",
        ),
        (
            ("--arms", "redis", "--redis-url", "localhost"),
            "--redis-url must be redis://USER@HOST:PORT/DB, rediss:// for TLS",
        ),
        (("--plot-only",), "--plot-only needs one or more JSON files, and files need --plot-only"),
        (("a.json",), "--plot-only needs one or more JSON files, and files need --plot-only"),
        (("--plot-only", "nowhere.json"), "--plot-only nowhere.json cannot be read"),
        (("--plot-only", "tests/data/tiny-llama/config.json"), "is not a report of the benchmark capacity"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal("capacity", *arguments)


def test_without_a_redis_server_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    sentence = "redis-server is not installed: install it, or name a running server with --redis-url"
    assert sentence in refusal("capacity", "--arms", "redis")


def test_without_a_model_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"there is no {MODEL} here: run this in Manthan's repository, or name a --model" in refusal("capacity")


# -- a server that runs already -------------------------------------------------------------------------


@pytest.mark.slow
def test_a_given_server_is_measured_alone(plain_server: VllmServer, tmp_path: Path) -> None:
    found = report(tmp_path, "capacity", "--base-url", f"{plain_server.url}/v1", "--tokens", TOKENS)
    (one,) = found["runs"]
    assert max(level["kept"] for level in one["levels"]) == 3  # as plain vLLM in 8 MiB
    assert one["levels"][0]["came"] == 1
    assert all(answer["is_right"] for level in one["levels"] for answer in level["returns"])
    assert is_png(tmp_path / "capacity.png")


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    result = run("capacity", "--base-url", "http://127.0.0.1:1", "--out", tmp_path)
    assert result.exit_code == 1
    assert "The server at http://127.0.0.1:1 did not answer a request" in result.output


# -- what the server says -------------------------------------------------------------------------------


def listed(name: str, hot: int, cold: int, lossy_blocks: int = 0, blocks: int = 16) -> dict[str, Any]:
    return {
        "id": name,
        "blocks": blocks,
        "hot_blocks": hot,
        "cold_blocks": cold,
        "lossy_tokens": 32 * lossy_blocks,
    }


def test_resident_blocks_are_computed_or_decoded() -> None:
    sessions = [
        listed("computed", hot=16, cold=0),
        listed("both", hot=10, cold=16),
        listed("tail returned", hot=14, cold=10, lossy_blocks=6),
        listed("all returned", hot=16, cold=16, lossy_blocks=16),
        listed("cut since", hot=2, cold=2, lossy_blocks=16, blocks=2),
        listed("lost", hot=3, cold=4),
    ]
    kept = {name["id"] for name in sessions} - {"lost"}
    found = where_held(sessions, kept, 16, 32)
    assert found == {
        "computed": 16 + 10 + 10,
        "both": 10 + 4,
        "decoded": 4 + 16 + 2,
        "saved": 16 + 10 + 16 + 2 + 4,
    }


def test_restored_blocks_diverge_by_their_sessions_level() -> None:
    coarse, fine = (listed(name, hot=0, cold=16) | {"level": level} for name, level in (("coarse", 0), ("fine", 2)))
    mean = (LEVELS[0].divergence + LEVELS[2].divergence) / 2
    assert divergence([coarse, fine], {"coarse", "fine"}) == pytest.approx(mean)
    assert divergence([coarse, fine], {"fine"}) == LEVELS[2].divergence
    assert divergence([coarse | {"hot_blocks": 16}, fine], {"coarse", "fine"}) == LEVELS[2].divergence
    assert divergence([listed("of one rate", hot=0, cold=16)], {"of one rate"}) is None


def test_the_table_says_how_much_blocks_diverge_where_that_is_known() -> None:
    one = Found("host", 1 << 30, (1 << 29, 1 << 29), 4, 4, 1e6, [1.0], [], 4, 4, 0)
    for found, is_there in (([one], False), ([one, replace(one, divergence=0.1)], True)):
        table = make_table({"tokens": 2000, "model": "one"}, found)
        assert any("diverges" in str(column.header) for column in table.columns) == is_there


def test_a_profile_comes_with_its_codecs(served: Served, tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    assert read_codecs("klt-8x,klt-5x", profile) == ["klt-8x", "klt-5x"]
    assert read_codecs("wht-5x,klt-5x", profile) == ["wht-5x", "klt-5x"]
    with pytest.raises(typer.BadParameter, match="--codecs klt-8x is unknown"):
        read_codecs("klt-8x")
    assert read_codecs("auto") == ["auto"]
    auto = make_arm("host", "auto", BUDGET, served, TOKENS, {}, [], profile)
    assert auto.manthan is not None
    assert auto.manthan["codec"] == {"name": "auto", "profile": str(profile), "guard": False}
    plain = make_arm("host", "wht-5x", BUDGET, served, TOKENS, {}, [], profile)
    assert plain.manthan is not None
    assert plain.manthan["codec"] == {"name": "wht-5x", "guard": False}
    arm = make_arm("whole", "klt-8x", BUDGET, served, TOKENS, {}, [], profile)
    assert arm.manthan is not None
    assert arm.manthan["codec"] == {"name": "klt-8x", "profile": str(profile), "guard": False}
    assert arm.manthan["tiers"]["kind"] == "host"


def test_vllm_finds_the_plugin_that_keeps_blocks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionManager, "_trim_until", SessionManager._trim_until)  # put back at the end
    monkeypatch.syspath_prepend(str(write_plugin(tmp_path)))
    (point,) = entry_points(group="vllm.general_plugins", name=DISTRIBUTION)
    point.load()()
    manager = object.__new__(SessionManager)  # without any session: a cut would fail
    manager._trim_until(lambda: 1)


class Told:
    """Endpoint with a session in one state after the other, and in the last for ever."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)

    def error(self, what: str) -> ServerError:
        return ServerError(what)

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return [("vllm:num_requests_running", {}, 0.0), ("vllm:manthan_sessions", {"state": state}, 1.0)]


def test_a_session_is_waited_for_until_it_is_cold_or_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "POLL_S", 0.001)
    told: Any = Told("active", "idle", "idle", "cold")
    settle.until_settled(told, 60)
    assert told.states == ["cold"]
    settle.until_settled(cast(Any, Told("idle")), 0.01)
    monkeypatch.setattr(settle, "SETTLE_S", 0.05)
    with pytest.raises(ServerError, match="still had something to do"):
        settle.until_settled(cast(Any, Told("idle")), 60)


# -- arithmetic -----------------------------------------------------------------------------------------


def test_the_budget_is_split(served: Served) -> None:
    block = 32 * 4096
    assert split(64 << 20, served, 2000, small_pool=False).pool_blocks == 512
    small = split(64 << 20, served, 2000, small_pool=True)
    assert small.pool_blocks == 82  # 1.3 sessions, which is more than a tenth
    assert small.pool_blocks * block + small.store_nbytes == 64 << 20
    assert split(256 << 20, served, 2000, small_pool=True).pool_blocks == 205  # a tenth
    assert read_budgets("128MiB, 64MiB") == [64 << 20, 128 << 20]


def test_every_arm_has_the_same_budget(served: Served) -> None:
    redis = {"url": "redis://there", "prefix": "bench:"}
    arms = {
        kind: make_arm(kind, "k3v3", 64 << 20, served, 2000, redis, ["--seed", "1"])
        for kind in ("offload", "host", "device", "redis", "tiered")
    }
    pool = {arm.memory.pool_blocks for arm in arms.values()}
    assert len(pool) == 1
    for arm in arms.values():
        store = (arm.manthan or {}).get("tiers", {})
        held = store.get("max_bytes", 0) + store.get("host_bytes", 0)
        assert arm.memory.pool_nbytes + (held or arm.memory.store_nbytes) == 64 << 20
        assert arm.manthan is None or arm.manthan["codec"] == "k3v3"
        assert "--seed" in arm.flags
    size = float(arms["offload"].flags[-1])
    assert size == pytest.approx(arms["host"].memory.store_nbytes / 2**30, abs=1e-6)
    assert arms["redis"].manthan["tiers"]["redis"]["prefix"] != arms["tiered"].manthan["tiers"]["redis"]["prefix"]


def test_a_run_that_is_stopped_has_what_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(_: Console) -> dict[str, Any]:
        sys.exit(143)

    def never(_: Console) -> dict[str, Any]:
        raise AssertionError("it was stopped")

    jobs = {"plain": lambda _: {"arm": "plain"}, "host": stopped, "device": never}
    found = run_jobs("capacity", jobs, {}, {}, tmp_path, make_console())
    assert (found["runs"], found["errors"]) == ([{"arm": "plain"}], {"host": "stopped"})
    assert read_report(tmp_path / "capacity.json", "capacity")["runs"] == found["runs"]
    assert "Stopped during host: what was measured before follows." in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_jobs("capacity", {"host": stopped}, {}, {}, tmp_path, make_console())


def test_how_long_it_may_take_is_said() -> None:
    assert "(--timeout 300): together about 60 at most," in duration(6, 300)
